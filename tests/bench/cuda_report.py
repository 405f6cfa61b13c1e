"""What a GPU has shown: tests/results/cuda.md, made of what `./dev gpu-test` and `./dev gpu-bench` wrote.

Every target that the kernels were built for stands there, with what was measured or that nothing was, and where to look
when it is missed. Both commands write the page anew; so does `python -m tests.bench.cuda_report`, which runs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

RESULTS = Path(__file__).resolve().parents[1] / "results"
TESTS, BENCH, PAGE = "cuda_tests.json", "cuda_kernels.json", "cuda.md"
Found: TypeAlias = dict[str, Any]
"""A JSON of results: `about` the machine, and by name what its parts found."""


class Target(NamedTuple):
    """A ratio `of` what is measured beside it, at least `wanted`; or with a `unit` a time, at most `wanted`."""

    what: str
    of: str
    wanted: float
    look: str
    unit: str = ""

    def met(self, got: float) -> bool:
        return got <= self.wanted if self.unit else got >= self.wanted


_DECODE = "`attn_decode.cu`: stages of its ring, blocks on an SM (registers: `octavo kernels list`), bytes in flight"
_PREFILL = "`attn_prefill.cu`: stages, registers, bank conflicts of its ldmatrix (Nsight: shared)"
_WGMMA = "`attn_wgmma.cu`: depth of the ring, waits of the consumers on the producer, registers that change hands"
_ROWS = "its .cu: bytes a thread loads at once, threads of a block, rows of a block"
_SHORT = "launches and blocks: one block's latency is all that it has"
TARGETS: dict[str, Target] = {
    "decode_large": Target("decode, bf16 KV of 1 GiB", "copy", 0.90, _DECODE),
    "decode_small": Target("decode, bf16 KV of 128 MiB", "copy", 0.75, "how contexts are split (`plan.fitting_split`)"),
    "decode_fp8": Target("decode, fp8 KV of 1 GiB", "copy", 0.75, "`tile.cuh`: what widens e4m3 (is it ALU?)"),
    "decode_one": Target("decode, batch 1, context 1024", "", 8, _SHORT + "; how it is split", "µs"),
    "decode_large_sdpa": Target("decode, bf16 KV of 1 GiB", "torch's SDPA over contiguous KV", 1.0, _DECODE),
    "decode_small_sdpa": Target("decode, bf16 KV of 128 MiB", "torch's SDPA over contiguous KV", 1.0, _DECODE),
    "sharing": Target("decode, half of the context shared", "no sharing", 1.0, "`cascade.fitting_cascade`, the merge"),
    "prefill_mma": Target("prefill by mma.sync, causal", "GEMM", 0.45, _PREFILL),
    "prefill_mma_sdpa": Target("prefill by mma.sync, causal", "torch's SDPA", 1.0, _PREFILL),
    "prefill_wgmma": Target("prefill by wgmma, causal", "GEMM", 0.70, _WGMMA),
    "prefill_wgmma_sdpa": Target("prefill by wgmma, causal", "torch's SDPA", 1.0, _WGMMA),
    "attn_plan": Target("the plan of 64 decodes, on the device", "", 5, "`attn_plan.cu`: its one block's passes", "µs"),
    "attn_merge": Target("merge of parts", "copy", 0.80, _ROWS),
    "append_kv": Target("append_kv, many tokens", "copy", 0.70, _ROWS),
    "append_few": Target("append_kv, 64 tokens", "", 4, _SHORT, "µs"),
    "copy_blocks": Target("copy_blocks", "copy", 0.85, _ROWS),
    "swap": Target("blocks to host memory", "one pinned copy", 0.85, "`cuda/swap.py`: a transfer a block; gather them"),
    "add_rmsnorm": Target("add_rmsnorm", "copy", 0.85, _ROWS),
    "gate_mul": Target("gate_mul", "copy", 0.85, _ROWS),
    "logits": Target("penalties, bias, masks of logits", "copy", 0.80, "`logits.cu`: two thirds of its bytes are fp64"),
    "sample": Target("logits to tokens, top-k and top-p", "", 0.15, "`sample.cu`: passes over the row", "ms"),
    "spec_verify": Target("verification of 64 chains of 4", "", 20, _SHORT, "µs"),
    "spec_reject": Target("rejection of 64 chains of 4", "a draw for each row", 0.80, "`spec_verify.cu`: one block"),
    "step": Target("decode step of a Llama-8B's shape, recorded", "bytes by copy", 0.80, "Nsight: gaps, cuBLAS"),
    "host": Target("the host's part of a step of 256 sequences", "", 300, "`python -m tests.bench.cuda_host`", "µs"),
}  # fmt: skip
STAGES = {
    "primitives": "device against emulator, bit for bit: all else rests on these",
    "kernels": "kernels against float64",
    "executor": "the executor and the engine on it",
    "memcheck": "small cases under compute-sanitizer",
    "racecheck": "small cases under compute-sanitizer",
    "synccheck": "small cases under compute-sanitizer",
}


def arguments(command: str, about: str | None, among: Sequence[str]) -> argparse.Namespace:
    """`parts` of those there are (none: all), `minutes` and `out`, from the command line."""
    parser = argparse.ArgumentParser(prog=f"./dev {command}", description=about)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(among)} (default: all)")
    parser.add_argument("--minutes", type=float, default=60, help="end after so many (default 60)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default tests/results)")
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in among]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(among)}")
    return args


def machine() -> dict[str, str]:
    """Of this run. Raises `OSError` or `CalledProcessError` without a driver."""
    import torch  # the page is made without it, too

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    first = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[0]
    gpu, driver = first.split(", ")
    return {"gpu": gpu, "driver": driver, "torch": str(torch.__version__), "date": datetime.now(UTC).date().isoformat()}


def load(path: Path) -> Found:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def merged(before: Found, about: Mapping[str, str], part: Mapping[str, Any]) -> Found:
    """What was found before, with a part found now: only of one GPU with one driver and torch."""
    same = all(before.get("about", {}).get(key) == about[key] for key in ("gpu", "driver", "torch"))
    return {"about": dict(about), "found": {**(before.get("found", {}) if same else {}), **part}}


def save(folder: Path, name: str, about: Mapping[str, str], part: Mapping[str, Any]) -> None:
    """Beside what `folder` has of the same machine, and the page anew: what was found stays, whatever comes next."""
    folder.mkdir(parents=True, exist_ok=True)
    found = merged(load(folder / name), about, part)
    (folder / name).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (folder / PAGE).write_text(page(load(folder / TESTS), load(folder / BENCH)), "utf-8")


def page(tests: Found, bench: Found) -> str:
    return "\n".join(
        [
            "# CUDA on a GPU",
            "",
            "Written by `./dev gpu-test` and `./dev gpu-bench`; no figure is entered by hand.",
            "",
            "## Tests",
            "",
            *_of(tests),
            *_stages(tests.get("found", {})),
            "",
            "## Targets",
            "",
            *_of(bench),
            *_targets(bench.get("found", {})),
            "",
        ]
    )


def lines(found: Mapping[str, float]) -> list[str]:
    """A row for each target of `found`, in the order of all."""
    rows = []
    for key, target in TARGETS.items():
        if key not in found:
            continue
        got, met = found[key], target.met(found[key])
        rows.append(f"| {target.what} | {_amount(got, target.unit)} | {_wanted(target)} | {_verdict(target, met)} |")
    return rows


def _targets(found: Mapping[str, float]) -> list[str]:
    missing = [
        f"| {target.what} | – | {_wanted(target)} | not measured |"
        for key, target in TARGETS.items()
        if key not in found
    ]
    return ["| what | got | wanted | met |", "|---|--:|---|---|", *lines(found), *missing]


def _stages(found: Mapping[str, Any]) -> list[str]:
    rows = ["| stage | what | passed | failed | skipped | ended |", "|---|---|--:|--:|--:|---|"]
    for name, what in STAGES.items():
        one = found.get(name)
        told = (
            f"{one['passed']} | {one['failed']} | {one['skipped']} | {one['ended']}" if one else "– | – | – | not run"
        )
        rows.append(f"| {name} | {what} | {told} |")
    return rows


def _of(found: Found) -> list[str]:
    if not (about := found.get("about")):
        return ["Nothing of this has run on a GPU yet.", ""]
    return [f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, {about['date']}.", ""]


def _wanted(target: Target) -> str:
    of = f" of {target.of}" if target.of else ""
    return f"{'≤' if target.unit else '≥'} {_amount(target.wanted, target.unit)}{of}"


def _verdict(target: Target, met: bool) -> str:
    return "yes" if met else f"no: {target.look}"


def _amount(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if unit else f"{value:.2f}"


def main() -> None:
    (RESULTS / PAGE).write_text(page(load(RESULTS / TESTS), load(RESULTS / BENCH)), "utf-8")


if __name__ == "__main__":
    main()
