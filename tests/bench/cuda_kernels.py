"""The CUDA kernels on a GPU against what bounds them: `./dev gpu-bench`, that is `python -m tests.bench.cuda_kernels`.

Every figure is a ratio to something measured in the same run and interleaved with it: the device's own copy, a matrix
product of torch's, or torch's attention on the same numbers; or a time, where launching is what counts. A run ends
after `--minutes`, between two parts: what a part found is written when it ends, beside what earlier runs on the same
GPU found, and all of it is printed against its target (see `cuda_report`). Installs nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from octavo.executors.cuda.batch import Batch, attention_plans, build
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import CudaRecorder, Recorder
from octavo.executors.cuda.swap import HostPool, InOrder, SideStream
from octavo.executors.loading.rope import Rope
from octavo.executors.loading.spec import Model, Spec
from octavo.executors.residents import Span
from octavo.kernels.cuda.cascade import fitting_cascade, groups
from octavo.kernels.cuda.device import Device, DeviceError
from octavo.kernels.cuda.draws import draws
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS, Heads
from octavo.kernels.cuda.launch import Kernels, Step
from octavo.kernels.cuda.plan import Plan, fitting_split, plan
from octavo.kernels.cuda.pool import PoolLayout
from tests.bench import cuda_host
from tests.bench.cuda_report import BENCH, arguments, lines, machine, save

PARTS = ("decode", "prefill", "rows", "swap", "sampling", "step", "host")
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
    sequences: int = 256
    """Whose decode step the host's part is measured for."""


TINY = Sizes(128, 128, 4, 2, 64, 2, 300, 2, 2**16, 2**15, 96, 48, 64, 1, 2)


class Bench:
    def __init__(self, kernels: Kernels, sizes: Sizes, recorder: Recorder) -> None:
        self.kernels, self.sizes, self._recorder = kernels, sizes, recorder
        self.device = kernels.device
        self.found: dict[str, float] = {}
        """By target."""

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

    def short(self, work: Work, times: int = 20) -> float:
        """Microseconds of what is shorter than its launch by the host: so many are recorded, and replayed as one."""
        work()

        def many() -> None:
            for _ in range(times):
                work()

        replay = self._recorder(many)
        (took,) = self.seconds(replay)
        return took / times * 1e6

    def copy(self, size: int) -> tuple[Work, int]:
        """A copy that moves `size` bytes, half in and half out."""
        source, target = (torch.empty(size // 2, dtype=torch.uint8, device=self.device) for _ in range(2))
        return lambda: target.copy_(source), size // 2 * 2

    def against_copy(self, name: str, work: Work, size: int) -> None:
        copy, copied = self.copy(max(size, 2**16))
        mine, theirs = self.seconds(work, copy)
        self.found[name] = size / mine / (copied / theirs)

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

    def decode(self, name: str, kv: torch.dtype, size: int) -> None:
        s = self.sizes
        context = size // (2 * s.kv_heads * s.head_dim * kv.itemsize) // s.batch // 16 * 16
        heads = self.heads(kv, context * s.batch)
        blocks = context // 16
        spans = [Span([0], context - 1, list(range(i * blocks, (i + 1) * blocks))) for i in range(s.batch)]
        work, _ = self.attention(heads, spans, self.plans(heads, self.kernels.rows(heads)))
        bytes_read = heads.layout.blocks * heads.layout.block_bytes
        self.against_copy(name, work, bytes_read)
        if kv == torch.bfloat16:
            shape = (s.batch, s.kv_heads, context, s.head_dim)
            keys, values = (torch.randn(shape, device=self.device).bfloat16() for _ in range(2))
            q = torch.randn(s.batch, s.heads, 1, s.head_dim, device=self.device).bfloat16()
            mine, theirs = self.seconds(work, lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True))
            self.found[f"{name}_sdpa"] = theirs / mine

    def decodes(self) -> None:
        s = self.sizes
        self.decode("decode_large", torch.bfloat16, s.large)
        self.decode("decode_small", torch.bfloat16, s.small)
        self.decode("decode_fp8", torch.float8_e4m3fn, s.large)
        n = min(1024, s.context)
        heads = self.heads(torch.bfloat16, n)
        work, _ = self.attention(heads, [Span([0], n - 1, list(range(n // 16)))], self.plans(heads, (DECODE_ROWS,)))
        self.found["decode_one"] = self.short(work)
        self.merge()
        self.sharing()

    def merge(self) -> None:
        """Of decodes that are cut into parts of 256 keys."""
        s, n = self.sizes, self.sizes.context
        heads, blocks = self.heads(torch.bfloat16, n * s.batch), n // 16
        spans = [Span([0], n - 1, list(range(i * blocks, (i + 1) * blocks))) for i in range(s.batch)]
        batch = build(spans, 16)
        made = plan(batch.queries(), heads.group, DECODE_ROWS, 256 if n > 256 else 16)
        staged = self.kernels.stage(made, s.kv_heads, s.head_dim)
        staged.part_out.normal_()
        staged.part_lse.normal_()
        out = torch.empty(s.batch, s.heads, s.head_dim, device=self.device, dtype=torch.bfloat16)
        none = torch.empty(0)
        step = Step(none, none, torch.arange(s.batch, dtype=torch.int32, device=self.device), none)
        size = staged.part_out.nbytes + staged.part_lse.nbytes + out.nbytes
        self.against_copy("attn_merge", lambda: self.kernels._merge(step, staged, out, None), size)

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
        self.found["sharing"] = theirs / mine

    def prefills(self) -> None:
        self.prefill("prefill_mma", (DECODE_ROWS, PREFILL_ROWS))
        if WGMMA_ROWS in (rows := self.kernels.rows(self.heads(torch.bfloat16, 16))):
            self.prefill("prefill_wgmma", rows)

    def prefill(self, name: str, rows: tuple[int, ...]) -> None:
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
        self.found[name] = flops / mine / (2 * s.gemm**3 / gemm)
        self.found[f"{name}_sdpa"] = sdpa / mine

    # ---- rows

    def rows(self) -> None:
        s, k = self.sizes, self.kernels
        n = max(64, s.large // 16 // s.hidden)
        x, residual = (torch.randn(n, s.hidden, device=self.device).bfloat16() for _ in range(2))
        weight = torch.ones(s.hidden, device=self.device).bfloat16()
        self.against_copy("add_rmsnorm", lambda: k.add_rmsnorm(x, residual, weight, 1e-5), 4 * x.nbytes)
        gate_up = torch.randn(n // 2, 2 * s.inner, device=self.device).bfloat16()
        self.against_copy("gate_mul", lambda: k.gate_mul(gate_up), gate_up.nbytes * 3 // 2)
        heads = self.heads(torch.bfloat16, n)
        pool = heads.layout.allocate(self.device)
        qkv = torch.randn(n, (s.heads + 2 * s.kv_heads) * s.head_dim, device=self.device).bfloat16()
        place = torch.arange(n, device=self.device)
        step = Step(place.int() % s.context, place, torch.empty(0), torch.empty(0))
        angles = torch.randn(s.context, s.head_dim, device=self.device)
        self.against_copy("append_kv", lambda: k.append_kv(heads, step, qkv, pool, angles), 2 * qkv.nbytes)
        blocks = heads.layout.blocks // 2
        pairs = [(i, blocks + i) for i in range(blocks)]
        size = 2 * blocks * heads.layout.block_bytes
        self.against_copy("copy_blocks", lambda: k.copy_blocks([pool], pairs), size)
        few = Step(step.positions[:64].contiguous(), place[:64].contiguous(), torch.empty(0), torch.empty(0))
        rows = qkv[:64].contiguous()
        self.found["append_few"] = self.short(lambda: k.append_kv(heads, few, rows, pool, angles))
        lengths = torch.full((s.batch,), s.context, dtype=torch.int32, device=self.device)
        firsts = torch.arange(s.batch + 1, dtype=torch.int32, device=self.device)
        works = max(k.blocks // s.kv_heads, s.batch)
        room = k.room(works, works, works, DECODE_ROWS, s.kv_heads, s.head_dim)
        fill = k.blocks
        self.found["attn_plan"] = self.short(lambda: k.plan(room, lengths, firsts, heads.group, split=0, fill=fill))

    def swap(self) -> None:
        """Blocks of all layers to host memory, as when they are evicted, against one copy of as many bytes."""
        s = self.sizes
        layout = self.heads(torch.bfloat16, 16).layout
        n = max(2, s.small // (s.layers * layout.block_bytes))
        layout = self.heads(torch.bfloat16, 16 * n).layout
        aside = SideStream(self.device) if self.device.type == "cuda" else InOrder()
        host = HostPool(self.kernels, [layout.allocate(self.device) for _ in range(s.layers)], n, aside)
        size = n * s.layers * layout.block_bytes
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        pairs = [(i, n + i) for i in range(n)]

        def out() -> None:
            host.copy(pairs)
            aside.hold_steps(aside.of_transfers())  # steps would go on, and time is theirs here

        mine, theirs = self.seconds(out, lambda: target.copy_(source, non_blocking=True))
        self.found["swap"] = theirs / mine

    def sampling(self) -> None:
        s = self.sizes
        logits = torch.randn(s.batch, s.vocabulary, device=self.device) * 3
        drawn = draws(s.batch)
        drawn["temperature"], drawn["top_k"], drawn["top_p"] = 1.0, 50, 0.9
        packed = torch.from_numpy(drawn.view(np.uint8).reshape(s.batch, -1)).to(self.device)
        (took,) = self.seconds(lambda: self.kernels.sample(self.kernels.scores(logits, packed), packed))
        self.found["sample"] = took * 1000
        self.against_copy("logits", lambda: self.kernels.scores(logits, packed), 3 * logits.nbytes)  # fp64 comes out
        nodes = 5 * s.batch
        firsts = torch.arange(0, nodes + 1, 5, dtype=torch.int32, device=self.device)
        tokens = torch.ones(nodes, dtype=torch.int32, device=self.device)
        parents = torch.arange(-1, 4, dtype=torch.int32, device=self.device).repeat(s.batch)
        self.found["spec_verify"] = self.short(lambda: self.kernels.verify(firsts, tokens, parents, tokens))
        rows = torch.randn(nodes, s.vocabulary, device=self.device) * 3
        each, certain = packed.repeat_interleave(5, 0), torch.full_like(tokens, -1)

        def rejected() -> None:
            target = self.kernels.distributions(self.kernels.scores(rows, each), each)
            self.kernels.reject(firsts, tokens, parents, target, target[:0], certain, each)

        mine, theirs = self.seconds(rejected, lambda: self.kernels.sample(self.kernels.scores(rows, each), each))
        self.found["spec_reject"] = theirs / mine

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
        self.against_copy("step", lambda: forward.run(build(spans, 16)), size)

    def host(self) -> None:
        s = self.sizes
        self.found["host"] = min(cuda_host.measured(s.sequences, s.context, "drawn"))

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        return {
            "decode": self.decodes, "prefill": self.prefills, "rows": self.rows, "swap": self.swap,
            "sampling": self.sampling, "step": self.engine, "host": self.host,
        }  # fmt: skip


def main() -> int:
    args = arguments("gpu-bench", __doc__, PARTS)
    device = torch.device("cuda", 0)
    try:
        kernels = Kernels(Device(device), device)
    except DeviceError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    bench, about, until = Bench(kernels, Sizes(), CudaRecorder()), machine(), time.monotonic() + 60 * args.minutes
    print("| what | got | wanted | met |\n|---|--:|---|---|")
    for part in args.parts or PARTS:
        if time.monotonic() > until:
            print(f"octavo: no time for {part} and what follows it; ./dev gpu-bench {part} …", file=sys.stderr)
            return 1
        before = dict(bench.found)
        with torch.inference_mode():
            bench.parts[part]()
        torch.cuda.empty_cache()
        new = {name: value for name, value in bench.found.items() if name not in before}
        save(args.out, BENCH, about, new)
        print("\n".join(lines(new)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
