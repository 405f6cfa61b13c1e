"""The native executor's step against the torch executor's, and against memory: `python tests/bench/native_cpu.py`.

Both run the default model in one process and take turns, so that what else the machine does falls on both; a row
gives the medians and the median of the pairs' ratios with its quartiles. A step is greedy, argmax included.
The roofline is the packed weights over the read bandwidth, measured just before. Torch's row counts are taken freely
here, faster than where its executor had to refuse some to be exact.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from octavo.core.models.locate import locate
from octavo.executors.cpu.layout import PoolShape, Span
from octavo.executors.cpu.linear import Backend, RowCounts
from octavo.executors.cpu.llama import Arithmetic, KvPool, Llama
from octavo.executors.loading.files import load_model, open_checkpoint
from octavo.executors.native.library import Isa, Kind, int32s, load
from octavo.executors.native.program import Inputs, Native, Pool, Weights

SIZE, CONTEXT, PREFILL = 16, 256, 512
BATCHES = (1, 8, 32)
BLOCKS = max(BATCHES) * (CONTEXT // SIZE) + PREFILL // SIZE
RESULTS = Path(__file__).parents[1] / "results" / "native_cpu.md"


def spans(batch: int) -> list[tuple[list[int], int, list[int]]]:
    """`batch` decodes at the end of CONTEXT tokens; 0 is one prefill."""
    order = np.random.default_rng(1).permutation(BLOCKS).tolist()
    if batch == 0:
        return [(np.random.default_rng(2).integers(0, 49152, PREFILL).tolist(), 0, order[: PREFILL // SIZE])]
    each = CONTEXT // SIZE
    return [([1000 + i], CONTEXT - 1, order[i * each : (i + 1) * each]) for i in range(batch)]


def native_step(native: Native, batch: int) -> Callable[[], object]:
    work = spans(batch)
    last = np.cumsum([len(ids) for ids, _, _ in work]) - 1
    inputs = Inputs(
        int32s([i for ids, _, _ in work for i in ids]),
        int32s([p for ids, start, _ in work for p in range(start, start + len(ids))]),
        int32s([s for s, (ids, _, _) in enumerate(work) for _ in ids]),
        int32s([b for _, _, table in work for b in table]),
        int32s(np.cumsum([0, *(len(table) for _, _, table in work)])),
        int32s(last), int32s([-1] * len(work)), int32s([]), int32s([]),
    )  # fmt: skip
    return lambda: native.step(inputs)


def torch_step(llama: Llama, pool: KvPool, batch: int) -> Callable[[], object]:
    work = [Span(*span) for span in spans(batch)]
    last = np.cumsum([len(span.ids) for span in work]) - 1

    def run() -> object:
        with torch.inference_mode():
            hidden = llama.hidden(llama.layout(work, pool.shape), pool)
            return llama.logits(hidden[last]).argmax(-1)

    return run


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def pairs(
    one: Callable[[], object], other: Callable[[], object], seconds: float, least: int
) -> list[tuple[float, float]]:
    one(), other()
    out: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(out) < least or (time.perf_counter() < end and len(out) < 200):
        out.append((timed(one), timed(other)))
    return out


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--seconds", type=float, default=8.0, help="for each row")
    options.add_argument("--alone", action="store_true", help="without torch: best and median of the native step only")
    options.add_argument("--isa", choices=[isa.name for isa in Isa], default=None)
    options.add_argument("--write", action="store_true", help=f"also write {RESULTS.name}")
    given = options.parse_args()
    files = locate("default")
    assert files.path is not None
    library, checkpoint = load(), open_checkpoint(files)
    isa = None if given.isa is None else Isa[given.isa]
    natives = {}
    for mode, kind in (("fast", Kind.BF16), ("exact", Kind.F32)):
        weights = Weights(library, checkpoint, exact=mode == "exact")
        natives[mode] = Native(weights, Pool(BLOCKS, SIZE, kind), given.threads, isa)
    size = natives["fast"].weights.arena.size
    read = library.oct_read_bandwidth(given.threads, 1 << 30, 3)
    head = (
        f"{given.threads} threads, level {natives['fast'].isa.name}, load of the machine {os.getloadavg()[0]:.1f}; "
        f"weights {size / 1e6:.0f} MB; reads {read / 1e9:.1f} GB/s (1 GiB): {size / read * 1e3:.2f} ms for them."
    )
    lines = [head, ""]
    if given.alone:
        lines += ["| step | mode | best ms | median ms | tokens/s (best) |", "|---|---|---|---|---|"]
        for batch in (*BATCHES, 0):
            for mode, native in natives.items():
                run = native_step(native, batch)
                times = [timed(run) for _ in range(40 if batch else 8)]
                rate = (batch or PREFILL) / min(times)
                lines.append(
                    f"| {f'decode {batch}' if batch else f'prefill {PREFILL}'} | {mode} | {min(times) * 1e3:.2f} | "
                    f"{statistics.median(times) * 1e3:.2f} | {rate:.0f} |"
                )
    else:
        torch.set_num_threads(given.threads)
        arithmetic = Arithmetic(Backend.PACKED, RowCounts((1, 8, 32, 256)), RowCounts((1, 8, 32)), (1, 16, 64))
        llama = Llama(load_model(files), arithmetic)
        pool = KvPool(PoolShape(BLOCKS, SIZE, llama.spec.kv_heads, llama.spec.head_dim), llama.spec.layers)
        lines += [
            "| step | mode | native ms | torch ms | ratio (quartiles) | pairs |",
            "|---|---|---|---|---|---|",
        ]
        for batch in (*BATCHES, 0):
            for mode, native in natives.items():
                found = pairs(native_step(native, batch), torch_step(llama, pool, batch), given.seconds, 7)
                ratios = [b / a for a, b in found]
                low, middle, high = statistics.quantiles(ratios, n=4)
                lines.append(
                    f"| {f'decode {batch}' if batch else f'prefill {PREFILL}'} | {mode} | "
                    f"{statistics.median(a for a, _ in found) * 1e3:.2f} | "
                    f"{statistics.median(b for _, b in found) * 1e3:.1f} | {middle:.1f}x ({low:.1f} to {high:.1f}) | "
                    f"{len(found)} |"
                )
    text = "\n".join(lines)
    print(text)
    if given.write:
        RESULTS.write_text(f"# Native CPU step\n\n{(__doc__ or '').strip()}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
