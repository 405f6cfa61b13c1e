"""The CUDA kernels on a GPU against what bounds them: `./dev gpu-bench`, that is `python tests/bench/cuda_kernels.py`.

Every figure is a ratio to something measured in the same run and interleaved with it: the device's own copy, a matrix
product of torch's, or torch's attention on the same numbers. Prints a table, and writes tests/results/cuda_kernels.json
and .md with the GPU, its driver and the date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from octavo.executors.cuda.batch import Batch, attention_plans, build
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import CudaRecorder, Recorder
from octavo.executors.loading.rope import Rope
from octavo.executors.loading.spec import Model, Spec
from octavo.executors.residents import Span
from octavo.kernels.cuda.cascade import fitting_cascade, groups
from octavo.kernels.cuda.device import Device
from octavo.kernels.cuda.draws import draws
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS, Heads
from octavo.kernels.cuda.launch import Kernels, Step
from octavo.kernels.cuda.plan import Plan, fitting_split, plan
from octavo.kernels.cuda.pool import PoolLayout

RESULTS = Path(__file__).resolve().parents[1] / "results"
Work = Callable[[], object]
Planner = Callable[[Batch], list[Plan]]


class Sizes(NamedTuple):
    """Of what is measured: a Llama-8B's, or so small that a test can see that everything runs."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    vocabulary: int = 128256
    batch: int = 64
    large: int = 2**30
    small: int = 2**27
    """Bytes of KV in the two decodes, and of the copies beside them."""
    prompt: int = 8192
    context: int = 4096
    gemm: int = 8192
    repeats: int = 20


TINY = Sizes(128, 128, 4, 2, 64, 2, 300, 2, 2**16, 2**15, 96, 48, 64, 1)


@dataclass(frozen=True)
class Figure:
    """`value` of what was measured over what it is held against, both per second; or in `unit`. `target` as planned."""

    name: str
    value: float
    against: str
    target: float
    unit: str = ""
    most: bool = False
    """The target is not to be exceeded."""

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.most else self.value >= self.target


class Bench:
    def __init__(self, kernels: Kernels, sizes: Sizes, recorder: Recorder) -> None:
        self.kernels, self.sizes, self._recorder = kernels, sizes, recorder
        self.device = kernels.device
        self.figures: list[Figure] = []

    def seconds(self, *works: Work) -> list[float]:
        """Medians of interleaved runs, each alone on the device."""
        took: list[list[float]] = [[] for _ in works]
        for _ in range(3 if self.sizes.repeats > 1 else 1):
            for work in works:
                work()
        for _ in range(self.sizes.repeats):
            for mine, work in zip(took, works, strict=True):
                mine.append(self._once(work))
        return [statistics.median(mine) for mine in took]

    def _once(self, work: Work) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def add(self, name: str, value: float, against: str, target: float, **how: Any) -> None:
        self.figures.append(Figure(name, value, against, target, **how))

    def copy(self, size: int) -> tuple[Work, int]:
        """A copy that moves `size` bytes, half in and half out."""
        source, target = (torch.empty(size // 2, dtype=torch.uint8, device=self.device) for _ in range(2))
        return lambda: target.copy_(source), size // 2 * 2

    def against_copy(self, name: str, work: Work, size: int, target: float) -> None:
        copy, copied = self.copy(max(size, 2**16))
        mine, theirs = self.seconds(work, copy)
        self.add(name, size / mine / (copied / theirs), "copy", target)

    # ---- attention

    def heads(self, kv: torch.dtype, tokens: int) -> Heads:
        s = self.sizes
        layout = PoolLayout(-(-tokens // 16), 16, s.kv_heads, s.head_dim, kv)
        return Heads(s.heads, torch.bfloat16, layout, s.head_dim**-0.5)

    def plans(self, heads: Heads, rows: tuple[int, ...]) -> Planner:
        """As the executor makes them, for kernels with works of `rows`."""
        kv_heads, fill = heads.layout.kv_heads, self.kernels.blocks
        return lambda batch: attention_plans(batch, heads.group, kv_heads, fill=fill, rows=rows)

    def attention(self, heads: Heads, spans: list[Span], plans: Planner) -> tuple[Work, torch.Tensor]:
        """The kernels' work for these spans over a random pool, and the queries."""
        batch = build(spans, 16)
        step = Step(
            torch.from_numpy(batch.positions).to(self.device),
            torch.from_numpy(batch.slots).to(self.device),
            torch.arange(len(batch.ids), dtype=torch.int32, device=self.device),
            torch.from_numpy(batch.tables).to(self.device),
        )
        layout = heads.layout
        pool = layout.allocate(self.device)
        if layout.dtype.itemsize == 2:
            pool.view(torch.bfloat16).normal_()
        else:
            pool.random_(0, 100)
        q = torch.randn(len(batch.ids), heads.heads, layout.head_dim, device=self.device).bfloat16()
        out = torch.empty_like(q)
        staged = [self.kernels.stage(one, layout.kv_heads, layout.head_dim) for one in plans(batch)]

        def work() -> None:
            for one in staged:
                self.kernels.attention(heads, step, one, q, pool, out)

        return work, q

    def decode(self, name: str, kv: torch.dtype, size: int, target: float) -> None:
        s = self.sizes
        context = size // (2 * s.kv_heads * s.head_dim * kv.itemsize) // s.batch // 16 * 16
        heads = self.heads(kv, context * s.batch)
        blocks = context // 16
        spans = [Span([0], context - 1, list(range(i * blocks, (i + 1) * blocks))) for i in range(s.batch)]
        work, _ = self.attention(heads, spans, self.plans(heads, self.kernels.rows(heads)))
        bytes_read = heads.layout.blocks * heads.layout.block_bytes
        self.against_copy(name, work, bytes_read, target)
        if kv == torch.bfloat16:
            shape = (s.batch, s.kv_heads, context, s.head_dim)
            keys, values = (torch.randn(shape, device=self.device).bfloat16() for _ in range(2))
            q = torch.randn(s.batch, s.heads, 1, s.head_dim, device=self.device).bfloat16()
            mine, theirs = self.seconds(work, lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True))
            self.add(f"{name}, against torch's SDPA over contiguous KV", theirs / mine, "SDPA", 1.0)

    def sharing(self) -> None:
        """Decodes whose contexts are half the same: those keys once for all, against once for each."""
        s, blocks = self.sizes, self.sizes.context // 16
        half, heads = blocks // 2, self.heads(torch.bfloat16, 16 * blocks * s.batch)
        spans = []
        for i in range(s.batch):
            own = half + i * (blocks - half)
            spans.append(Span([0], s.context - 1, [*range(half), *range(own, own + blocks - half)]))
        fill, most = self.kernels.blocks // s.kv_heads, self.kernels.rows(heads)[-1]

        def once(batch: Batch) -> list[Plan]:
            common = groups(batch.queries(), batch.tables, 16, step=16, least=16)
            return [fitting_cascade(batch.queries(), common, heads.group, DECODE_ROWS, most, fill)]

        def each(batch: Batch) -> list[Plan]:
            split = fitting_split(batch.queries(), heads.group, DECODE_ROWS, fill)
            return [plan(batch.queries(), heads.group, DECODE_ROWS, split)]

        (together, _), (apart, _) = (self.attention(heads, spans, plans) for plans in (once, each))
        mine, theirs = self.seconds(together, apart)
        self.add(f"decode, {16 * half} of {s.context} tokens shared, batch {s.batch}", theirs / mine, "no sharing", 1.0)

    def prefill(self, name: str, rows: tuple[int, ...], target: float) -> None:
        s, n = self.sizes, self.sizes.prompt
        heads = self.heads(torch.bfloat16, n)
        work, q = self.attention(heads, [Span([0] * n, 0, list(range(n // 16)))], self.plans(heads, rows))
        flops = 2 * s.heads * s.head_dim * n * n  # two products, of which causality leaves half
        a, b = (torch.randn(s.gemm, s.gemm, device=self.device).bfloat16() for _ in range(2))
        shape = (1, s.kv_heads, n, s.head_dim)
        keys, values = (torch.randn(shape, device=self.device).bfloat16() for _ in range(2))
        queries = q.transpose(0, 1).unsqueeze(0)
        mine, gemm, sdpa = self.seconds(
            work,
            lambda: a @ b,
            lambda: F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True),
        )
        self.add(f"{name} of {n} tokens, causal", flops / mine / (2 * s.gemm**3 / gemm), "GEMM", target)
        self.add(f"{name} of {n} tokens, against torch's SDPA", sdpa / mine, "SDPA", 1.0)

    # ---- rows

    def rows(self) -> None:
        s, k = self.sizes, self.kernels
        n = max(64, s.large // 16 // s.hidden)
        x, residual = (torch.randn(n, s.hidden, device=self.device).bfloat16() for _ in range(2))
        weight = torch.ones(s.hidden, device=self.device).bfloat16()
        self.against_copy("add_rmsnorm", lambda: k.add_rmsnorm(x, residual, weight, 1e-5), 4 * x.nbytes, 0.85)
        gate_up = torch.randn(n // 2, 2 * s.inner, device=self.device).bfloat16()
        self.against_copy("gate_mul", lambda: k.gate_mul(gate_up), gate_up.nbytes * 3 // 2, 0.85)
        heads = self.heads(torch.bfloat16, n)
        pool = heads.layout.allocate(self.device)
        qkv = torch.randn(n, (s.heads + 2 * s.kv_heads) * s.head_dim, device=self.device).bfloat16()
        place = torch.arange(n, device=self.device)
        step = Step(place.int() % s.context, place, torch.empty(0), torch.empty(0))
        angles = torch.randn(s.context, s.head_dim, device=self.device)
        self.against_copy("append_kv", lambda: k.append_kv(heads, step, qkv, pool, angles), 2 * qkv.nbytes, 0.7)
        blocks = heads.layout.blocks // 2
        pairs = [(i, blocks + i) for i in range(blocks)]
        size = 2 * blocks * heads.layout.block_bytes
        self.against_copy("copy_blocks", lambda: k.copy_blocks([pool], pairs), size, 0.85)

    def sampling(self) -> None:
        s = self.sizes
        logits = torch.randn(s.batch, s.vocabulary, device=self.device) * 3
        drawn = draws(s.batch)
        drawn["temperature"], drawn["top_k"], drawn["top_p"] = 1.0, 50, 0.9
        packed = torch.from_numpy(drawn.view(np.uint8).reshape(s.batch, -1)).to(self.device)
        (took,) = self.seconds(lambda: self.kernels.sample(self.kernels.scores(logits, packed), packed))
        name = f"scores and sample, batch {s.batch}, vocabulary {s.vocabulary}"
        self.add(name, took * 1000, "", 0.15, unit="ms", most=True)

    # ---- a whole step

    def engine(self) -> None:
        """A decode step of a random model, replayed as a graph, against the bytes of weights and KV."""
        s = self.sizes
        qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
        shapes = {"embed": (s.vocabulary, s.hidden), "norm": (s.hidden,)}
        for i in range(s.layers):
            shapes |= {f"{i}.attn_norm": (s.hidden,), f"{i}.mlp_norm": (s.hidden,), f"{i}.qkv.weight": (qkv, s.hidden)}
            shapes |= {f"{i}.o.weight": (s.hidden, s.heads * s.head_dim), f"{i}.down.weight": (s.hidden, s.inner)}
            shapes |= {f"{i}.gate_up.weight": (2 * s.inner, s.hidden)}
        weights = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=0.02)
            for name, shape in shapes.items()
        }
        spec = Spec(
            architecture="llama",
            vocab_size=s.vocabulary,
            hidden=s.hidden,
            layers=s.layers,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            inner=s.inner,
            norm_eps=1e-5,
            context=2 * s.context,
            rope=Rope(500000.0),
        )
        decoder = Decoder(Model(spec, weights, b""), self.kernels, torch.bfloat16, 16, exact=False)
        blocks = s.context // 16
        decoder.allocate(blocks * s.batch)
        forward = Forward(decoder, self._recorder)
        spans = [Span([5], s.context - 1, list(range(i * blocks, (i + 1) * blocks))) for i in range(s.batch)]
        size = sum(weight.nbytes for weight in weights.values()) + sum(pool.nbytes for pool in decoder.pools)
        name = f"decode step of a model of {spec.layers} layers, batch {s.batch}, context {s.context}, with graphs"
        self.against_copy(name, lambda: forward.run(spans), size, 0.8)

    @torch.inference_mode()
    def run(self) -> None:
        s = self.sizes
        self.decode("decode, bf16 KV, large", torch.bfloat16, s.large, 0.90)
        self.decode("decode, bf16 KV, small", torch.bfloat16, s.small, 0.75)
        self.decode("decode, fp8 KV, large", torch.float8_e4m3fn, s.large, 0.75)
        self.sharing()
        self.prefill("prefill by mma.sync", (DECODE_ROWS, PREFILL_ROWS), 0.45)
        if WGMMA_ROWS in (rows := self.kernels.rows(self.heads(torch.bfloat16, 16))):
            self.prefill("prefill by wgmma", rows, 0.70)
        self.rows()
        self.sampling()
        self.engine()


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"gpu": name, "driver": driver, "date": today, "torch": str(torch.__version__)}


def table(figures: list[Figure]) -> str:
    lines = ["| what | measured | of | target | met |", "|---|--:|---|--:|---|"]
    for one in figures:
        sign = "≤" if one.most else "≥"
        value, target = f"{one.value:.2f} {one.unit}".strip(), f"{sign} {one.target} {one.unit}".strip()
        lines.append(f"| {one.name} | {value} | {one.against} | {target} | {'yes' if one.met else 'no'} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = torch.device("cuda", 0)
    bench = Bench(Kernels(Device(device), device), Sizes(), CudaRecorder())
    bench.run()
    about = machine()
    print(table(bench.figures))
    figures = [{**vars(one), "met": one.met} for one in bench.figures]
    RESULTS.joinpath("cuda_kernels.json").write_text(
        json.dumps({**about, "figures": figures}, indent=1) + "\n", "utf-8"
    )
    words = f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, {about['date']}."
    text = f"# CUDA kernels on a GPU\n\n{words} Written by `./dev gpu-bench`.\n\n{table(bench.figures)}\n"
    RESULTS.joinpath("cuda_kernels.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
