# mypy: ignore-errors
"""The model as folders that the evaluation harness reads without a hub: `tokenizer/`, and `model/` in fp32.

    reference_model.py MODEL.gguf TOKENIZER_FOLDER OUT

The tokenizer is ours (transformers takes a GGUF's tokenizer apart wrongly); the weights are transformers' own reading.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

gguf, tokenizer, out = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(
    str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
)
model.to(torch.float32).save_pretrained(out / "model")
shutil.copytree(tokenizer, out / "tokenizer", dirs_exist_ok=True)
(out / "tokenizer" / "config.json").write_bytes((out / "model" / "config.json").read_bytes())
for path in tokenizer.iterdir():
    if path.name != "config.json":
        shutil.copy(path, out / "model" / path.name)
