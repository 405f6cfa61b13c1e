"""The default model in the formats that peers read.

    python -m tests.peers.prepare OUT --python PYTHON [--llama BIN] [--openvino VENV]

PYTHON has torch, transformers, accelerate and gguf (vLLM's environment has them).

Makes `fp32/` and `bf16/` (folders as on the Hugging Face hub, the weights those of the GGUF file, the tokenizer ours),
`q4_1.gguf` (the file itself), with `--llama` also `q8_0.gguf` and `bf16.gguf`, with `--openvino` also `int8/`. What is
there already stays as it is.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

from octavo.core.models.locate import locate
from octavo.core.tokenizer.convert import converted_tokenizer

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests" / "clients" / "reference_model.py"
HALVED = """
import sys, shutil, pathlib, torch
from transformers import AutoModelForCausalLM
whole, half = map(pathlib.Path, sys.argv[1:])
AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(half)
for path in whole.iterdir():
    if not (half / path.name).exists():
        shutil.copy(path, half / path.name)
"""
NAME = "SmolLM2-135M-Instruct"
"""By which every server serves it."""


def folders(python: Path, gguf: Path, out: Path) -> None:
    """As transformers reads the file; its own reading of a GGUF's tokenizer is wrong, so ours is put there."""
    if not (out / "fp32").exists():
        command = [str(python), str(REFERENCE), str(gguf), str(converted_tokenizer(gguf)), str(out / "reference")]
        subprocess.run(command, check=True)
        (out / "reference" / "model").rename(out / "fp32")
    if not (out / "bf16").exists():
        subprocess.run([str(python), "-c", HALVED, str(out / "fp32"), str(out / "bf16.part")], check=True)
        (out / "bf16.part").rename(out / "bf16")


def quantised(binary: Path, out: Path) -> None:
    for kind in ("q8_0", "bf16"):
        target = out / f"{kind}.gguf"
        if not target.exists():
            command = [str(binary / "llama-quantize"), "--allow-requantize", str(out / "q4_1.gguf"), str(target), kind]
            subprocess.run(command, check=True)


def exported(venv: Path, out: Path) -> None:
    if not (out / "int8").exists():
        command = [str(venv / "bin" / "optimum-cli"), "export", "openvino", "--model", str(out / "fp32")]
        command += ["--task", "text-generation-with-past", "--weight-format", "int8", str(out / "int8.part")]
        subprocess.run(command, check=True)
        (out / "int8.part").rename(out / "int8")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--python", type=Path, required=True)
    options.add_argument("--llama", type=Path, help="the folder of llama-quantize")
    options.add_argument("--openvino", type=Path, help="the environment of optimum-intel")
    given = options.parse_args()
    gguf = locate("default").path
    assert gguf is not None
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folders(given.python, gguf, out)
    if not (out / "q4_1.gguf").exists():
        shutil.copy(gguf, out / "q4_1.gguf")
    if given.llama is not None:
        quantised(given.llama, out)
    if given.openvino is not None:
        exported(given.openvino, out)


if __name__ == "__main__":
    main()
