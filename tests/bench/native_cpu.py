"""The native executor's step against memory, byte products and torch: `python -m tests.bench.native_cpu`.

What is compared runs the default model in one process and takes turns, so that what else the machine does falls on
both; a row gives the medians and the median of the pairs' ratios with its quartiles. A step is greedy, argmax included.
The rooflines are measured just before: reading 1 GiB, for the packed weights of decode 1 (a cache that holds some of
them takes a step past it), and for the products of prefill the bare byte products of each level that this machine has,
from the first-level cache, without scales. Those of AVX512 (VNNI) are the measure of a kernel for weights with scales:
each group of 32 products is scaled and summed by the same vector units, whatever multiplied it. AMX's tiles alone are
several times as fast, which only a format without scales by group could use. `--against` takes turns with another
build of the library. Torch's row counts are taken freely here, faster than where its executor had to refuse some to be
exact. `--beside` measures something else: steps beside a busy process.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from octavo.core.models.locate import locate
from octavo.executors.cpu.layout import PoolShape, Span
from octavo.executors.cpu.linear import Backend, RowCounts
from octavo.executors.cpu.llama import Arithmetic, KvPool, Llama
from octavo.executors.loading.files import load_model, open_checkpoint
from octavo.executors.native.library import Isa, Kind, OpKind, int32s, load
from octavo.executors.native.program import Inputs, Native, Pool
from octavo.executors.native.weights import Weights

SIZE = 16
BATCHES = (1, 8, 32)
RESULTS = Path(__file__).parents[1] / "results" / "native_cpu.md"
BUSY = RESULTS.with_name("native_busy.md")
ABOUT_BUSY = """\
Steps of the native executor beside a process that computes without end, one more than there are cores for:
`python -m tests.bench.native_cpu --beside`. It is stopped and let go in turns of 100 steps, so that what else the
machine does falls on both. p50 and p99 are those of all steps; the ratio of p99s is the median of those of a turn and
the next one, with quartiles."""


class Sizes(NamedTuple):
    """Tokens that a decode has behind it, and those of a prefill; whole blocks."""

    context: int
    prefill: int

    @property
    def blocks(self) -> int:
        """Of a pool for any of the steps."""
        return max(max(BATCHES) * self.context, self.prefill) // SIZE

    def name(self, batch: int) -> str:
        """Of a step of so many decodes; 0 is one prefill."""
        return f"decode {batch}" if batch else f"prefill {self.prefill}"

    def spans(self, batch: int) -> list[tuple[list[int], int, list[int]]]:
        """`batch` decodes at the end of their context, or one prefill."""
        order = np.random.default_rng(1).permutation(self.blocks).tolist()
        if batch == 0:
            ids = np.random.default_rng(2).integers(0, 49152, self.prefill).tolist()
            return [(ids, 0, order[: self.prefill // SIZE])]
        each = self.context // SIZE
        return [([1000 + i], self.context - 1, order[i * each : (i + 1) * each]) for i in range(batch)]


def native_step(native: Native, sizes: Sizes, batch: int) -> Callable[[], object]:
    work = sizes.spans(batch)
    last = np.cumsum([len(ids) for ids, _, _ in work]) - 1
    inputs = Inputs(
        int32s([i for ids, _, _ in work for i in ids]),
        int32s([p for ids, start, _ in work for p in range(start, start + len(ids))]),
        int32s([s for s, (ids, _, _) in enumerate(work) for _ in ids]),
        int32s([b for _, _, table in work for b in table]),
        int32s(np.cumsum([0, *(len(table) for _, _, table in work)])),
        int32s(last), int32s([-1] * len(work)), int32s([]), int32s([]),
        prompt_ends=int32s([sizes.prefill]) if not batch and native.own_prompts else None,
    )  # fmt: skip
    return lambda: native.step(inputs)


def torch_step(llama: Llama, pool: KvPool, sizes: Sizes, batch: int) -> Callable[[], object]:
    work = [Span(*span) for span in sizes.spans(batch)]
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


class Roofs(NamedTuple):
    """Bytes read, and by level operations of byte products (a product and its sum are two), a second."""

    read: float
    products: dict[Isa, float]


def operations(native: Native, tokens: int) -> float:
    """Of the products of a step over one text, of which the last token is sampled; without attention."""
    sizes = {name: 2 * matrix.rows * matrix.cols for name, matrix in native.weights.matrices.items()}
    head = sizes.pop("head", None)
    embed = sizes.pop("embed")
    return float(tokens * sum(sizes.values()) + (head or embed))


def ratio(pairs_found: list[tuple[float, float]]) -> str:
    """How much longer the second one takes: median of the pairs (quartiles)."""
    low, middle, high = statistics.quantiles([b / a for a, b in pairs_found], n=4)
    return f"{middle:.2f}x ({low:.2f} to {high:.2f})"


def alone(natives: dict[str, Native], sizes: Sizes, roofs: Roofs) -> list[str]:
    lines = [
        "| step | mode | best ms | median ms | tokens/s (best) | of the roof (best) |",
        "|---|---|---|---|---|---|",
    ]
    for batch in (*BATCHES, 0):
        for mode, native in natives.items():
            run = native_step(native, sizes, batch)
            run()
            times = [timed(run) for _ in range(40 if batch else 8)]
            best = min(times)
            roof = ""
            if batch == 1:
                roof = f"{native.weights.arena.size / roofs.read / best:.2f} of reading"
            elif batch == 0 and mode == "fast":
                rate = operations(native, sizes.prefill) / best
                roof = ", ".join(f"{rate / bare:.2f} of {isa.name}'s products" for isa, bare in roofs.products.items())
            lines.append(
                f"| {sizes.name(batch)} | {mode} | {best * 1e3:.2f} | {statistics.median(times) * 1e3:.2f} | "
                f"{(batch or sizes.prefill) / best:.0f} | {roof} |"
            )
    return lines


def shares(native: Native, sizes: Sizes, steps: int = 20) -> list[str]:
    """Where the time of a step goes."""
    lines = ["| step | rows made ready | products | attention | head | rest |", "|---|---|---|---|---|---|"]
    kinds = np.array(native.operations)
    for batch in (*BATCHES, 0):
        run = native_step(native, sizes, batch)
        run()
        seconds = native.watch()
        for _ in range(steps if batch else 4):
            run()
        ready, computed = seconds[kinds == OpKind.LINEAR].sum(0)
        parts = [ready, computed, *(seconds[kinds == kind].sum() for kind in (OpKind.ATTEND, OpKind.HEAD))]
        cells = " | ".join(f"{part / seconds.sum():.0%}" for part in (*parts, seconds.sum() - sum(parts)))
        lines.append(f"| {sizes.name(batch)} | {cells} |")
    return lines


def against_torch(natives: dict[str, Native], sizes: Sizes, threads: int, seconds: float) -> list[str]:
    torch.set_num_threads(threads)
    arithmetic = Arithmetic(Backend.PACKED, RowCounts((1, 8, 32, 256)), RowCounts((1, 8, 32)), (1, 16, 64))
    llama = Llama(load_model(locate("default")), arithmetic)
    pool = KvPool(PoolShape(sizes.blocks, SIZE, llama.spec.kv_heads, llama.spec.head_dim), llama.spec.layers)
    lines = ["| step | mode | native ms | torch ms | torch takes (quartiles) | pairs |", "|---|---|---|---|---|---|"]
    for batch in (*BATCHES, 0):
        for mode, native in natives.items():
            found = pairs(native_step(native, sizes, batch), torch_step(llama, pool, sizes, batch), seconds, 7)
            lines.append(row(sizes.name(batch), mode, found))
    return lines


def against_build(natives: dict[str, Native], old: dict[str, Native], sizes: Sizes, seconds: float) -> list[str]:
    lines = ["| step | mode | this ms | other ms | the other takes (quartiles) | pairs |", "|---|---|---|---|---|---|"]
    for batch in (*BATCHES, 0):
        for mode, native in natives.items():
            found = pairs(native_step(native, sizes, batch), native_step(old[mode], sizes, batch), seconds, 7)
            lines.append(row(sizes.name(batch), mode, found))
    return lines


def row(step: str, mode: str, found: list[tuple[float, float]]) -> str:
    one, other = (statistics.median(times) * 1e3 for times in zip(*found, strict=True))
    return f"| {step} | {mode} | {one:.2f} | {other:.2f} | {ratio(found)} | {len(found)} |"


def beside(native: Native, sizes: Sizes, seconds: float, least: int = 9, steps: int = 100) -> list[str]:
    """Step times without a busy process and with one, in turns of `steps` steps."""
    lines = [
        "| step | p50 ms | p99 ms | beside a busy process: p50 ms | p99 ms | p99 to p99 (quartiles) | pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def turn(run: Callable[[], object], sign: signal.Signals) -> list[float]:
        busy.send_signal(sign)
        run()
        return [timed(run) for _ in range(steps)]

    try:
        for batch in BATCHES:
            run = native_step(native, sizes, batch)
            turns: list[tuple[list[float], list[float]]] = []
            end = time.perf_counter() + seconds
            while len(turns) < least or time.perf_counter() < end:
                turns.append((turn(run, signal.SIGSTOP), turn(run, signal.SIGCONT)))
            cells = list[str]()
            for side in zip(*turns, strict=True):
                times = list(itertools.chain(*side))
                cells += [f"{statistics.median(times) * 1e3:.2f}", f"{p99(times) * 1e3:.2f}"]
            found = ratio([(p99(idle), p99(other)) for idle, other in turns])
            lines.append(f"| {sizes.name(batch)} | {' | '.join(cells)} | {found} | {len(turns)} |")
    finally:
        busy.kill()
        busy.wait()
    return lines


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--seconds", type=float, default=4.0, help="for each row of pairs")
    options.add_argument("--alone", action="store_true", help="without torch: the native step only")
    options.add_argument("--against", type=Path, help="another build of the library, with the same interface")
    options.add_argument(
        "--beside", action="store_true", help=f"only that: steps beside a busy process; --write: to {BUSY.name}"
    )
    options.add_argument("--context", type=int, default=256, help="tokens behind each decode")
    options.add_argument("--prefill", type=int, default=512, help="tokens of the prefill")
    options.add_argument("--modes", nargs="+", choices=["fast", "exact"], default=["fast", "exact"])
    options.add_argument("--isa", choices=[isa.name for isa in Isa], default=None)
    options.add_argument("--write", action="store_true", help=f"also write {RESULTS.name}")
    given = options.parse_args()
    files = locate("default")
    assert files.path is not None
    library, checkpoint = load(), open_checkpoint(files)
    sizes = Sizes(given.context, given.prefill)
    isa = Isa(library.oct_isa_best()) if given.isa is None else Isa[given.isa]

    def models(library: ctypes.CDLL) -> dict[str, Native]:
        return {
            mode: Native(
                Weights(library, checkpoint, exact=mode == "exact"), Pool(sizes.blocks, SIZE, kind), given.threads, isa
            )
            for mode, kind in (("fast", Kind.BF16), ("exact", Kind.F32))
            if mode in given.modes
        }

    natives = models(library)
    first = natives[given.modes[0]]
    size = first.weights.arena.size
    if given.beside:
        about = f"{given.threads} threads, level {isa.name}, {given.modes[0]}, load {os.getloadavg()[0]:.1f}."
        text = (
            "\n\n".join(
                ["# Beside a busy process", ABOUT_BUSY, about, "\n".join(beside(first, sizes, given.seconds * 6))]
            )
            + "\n"
        )
        print(text)
        if given.write:
            BUSY.write_text(text, encoding="utf-8")
        return
    levels = [] if isa is Isa.NEON else [level for level in (Isa.AVX2, Isa.AVX512, Isa.AMX) if level <= isa]
    roofs = Roofs(
        library.oct_read_bandwidth(given.threads, 1 << 30, 3),
        {level: library.oct_byte_rate(level, given.threads, 10) for level in levels or [isa]},
    )
    work = operations(first, sizes.prefill)
    rates = ", ".join(
        f"{level.name} {rate / 1e9:.0f} G/s ({work / rate * 1e3:.0f} ms for those of prefill)"
        for level, rate in roofs.products.items()
    )
    head = (
        f"{given.threads} threads, level {isa.name}, load of the machine {os.getloadavg()[0]:.1f}; weights "
        f"{size / 1e6:.0f} MB; reads {roofs.read / 1e9:.1f} GB/s (1 GiB), {size / roofs.read * 1e3:.2f} ms for them; "
        f"bare byte products: {rates}; decodes have {sizes.context} tokens behind them."
    )
    parts = [[head], alone(natives, sizes, roofs), shares(first, sizes)]
    if given.against:
        parts.append(against_build(natives, models(load(given.against)), sizes, given.seconds))
    if not given.alone:
        parts.append(against_torch(natives, sizes, given.threads, given.seconds))
    text = "\n\n".join("\n".join(lines) for lines in parts)
    print(text)
    if given.write:
        RESULTS.write_text(f"# Native CPU step\n\n{(__doc__ or '').strip()}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
