"""Launches kernels on torch tensors: which instance, grid, shared memory and arguments. Allocates what they need.

Knows no model and no step: it is told shapes and given tensors. Whether a GPU or the emulator runs them is the
library's matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cuda.draws import Draws
from octavo.kernels.cuda.library import Function, Library
from octavo.kernels.cuda.plan import Plan
from octavo.kernels.cuda.pool import TILE, PoolLayout
from octavo.kernels.cuda.sources import Instance

NAMES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
}
DECODE_ROWS, PREFILL_ROWS = TILE, 4 * TILE
"""Packed rows in a work of each attention kernel."""

_i32, _f32, _i64 = np.int32, np.float32, np.int64


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's attention: `dtype` is that of queries and results, `layout` says the pool's."""

    heads: int
    dtype: torch.dtype
    layout: PoolLayout
    scale: float
    soft_cap: float = 0.0
    window: int = 0
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def group(self) -> int:
        return self.heads // self.layout.kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A plan on the device, with room for its parts; good for every layer of a step."""

    works: Tensor
    merges: Tensor
    part_out: Tensor
    part_lse: Tensor
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What every layer's kernels read of a step: per token its position and where its KV goes (below 0: nowhere),
    the order that plans speak of tokens in, and the block tables [rows, blocks]."""

    positions: Tensor
    slots: Tensor
    tokens: Tensor
    tables: Tensor


def decode_shared(head_dim: int, kv_bytes: int, warps: int, stages: int) -> int:
    tile = 2 * TILE * head_dim * kv_bytes
    ring = warps * stages * (tile + 8) + TILE * head_dim * 2
    return max(ring, warps * TILE * (head_dim * 4 + 8))


def prefill_shared(head_dim: int, kv_bytes: int, warps: int, tiles: int) -> int:
    return 2 * tiles * 2 * TILE * head_dim * kv_bytes + warps * TILE * head_dim * 2 + 16


def attention_instance(heads: Heads, rows: int, *, bulk: bool, shared_limit: int) -> tuple[Instance, int, int]:
    """The kernel for works of `rows` rows, its threads and its shared memory: the deepest buffers that fit."""
    size, kv = heads.layout.head_dim, heads.layout.dtype
    decode = rows == DECODE_ROWS
    for warps, depth in ((4, 3), (4, 2), (2, 3), (2, 2)) if decode else ((4, 4), (4, 2), (4, 1)):
        shared = (decode_shared if decode else prefill_shared)(size, kv.itemsize, warps, depth)
        if shared <= shared_limit:
            kind = "attn_decode" if decode else "attn_prefill"
            name = f"{kind}<{NAMES[heads.dtype]},{NAMES[kv]},{size},{warps},{depth},{str(bulk).lower()}>"
            return Instance(f"{kind}.cu", name), warps * 32, shared
    raise ValueError(f"attention over heads of {size} needs more than the {shared_limit} bytes of shared memory here")


def merge_instance(heads: Heads, rows: int) -> Instance:
    return Instance("attn_merge.cu", f"attn_merge<{NAMES[heads.dtype]},{heads.layout.head_dim},{rows}>")


def append_instance(heads: Heads, *, interleaved: bool) -> Instance:
    types = f"{NAMES[heads.dtype]},{NAMES[heads.layout.dtype]}"
    return Instance("append_kv.cu", f"append_kv<{types},{heads.layout.head_dim},{str(interleaved).lower()}>")


class Kernels:
    """The kernels of one device. `threads` are those of kernels that work on a row each."""

    def __init__(
        self, library: Library, device: torch.device, *, threads: int = 256, sampling_threads: int = 512
    ) -> None:
        self.device = device
        self._library = library
        self._threads = threads
        self._sampling_threads = sampling_threads
        self._functions: dict[Instance, Function] = {}

    def append_kv(
        self,
        heads: Heads,
        step: Step,
        qkv: Tensor,
        pool: Tensor,
        angles: Tensor,
        *,
        interleaved: bool = False,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Write the keys and values of qkv [tokens, (Hq + 2 Hkv) · d], give the queries [tokens, Hq, d]. `angles` are
        fp32 [positions, rotated]: cosines, then sines."""
        layout = heads.layout
        tokens = len(qkv)
        q = torch.zeros(tokens, heads.heads, layout.head_dim, dtype=qkv.dtype, device=qkv.device)
        if tokens:
            self._get(append_instance(heads, interleaved=interleaved))(
                (-(-tokens * (heads.heads + 2 * layout.kv_heads) // 4),),
                (128,),
                (
                    *_pointers(qkv, step.positions, step.slots, angles, query_norm, key_norm, q, pool),
                    _i32(tokens),
                    _i32(heads.heads),
                    _i32(layout.kv_heads),
                    _i32(angles.shape[1]),
                    _f32(eps),
                    _f32(1 / heads.key_scale),
                    _f32(1 / heads.value_scale),
                ),
            )
        return q

    def stage(self, plan: Plan, heads: Heads) -> Staged:
        """Bring a plan to the device."""
        shape = (plan.parts, heads.layout.kv_heads, plan.rows)
        return Staged(
            torch.from_numpy(plan.works).to(self.device),
            torch.from_numpy(plan.merges).to(self.device),
            torch.empty(*shape, heads.layout.head_dim, device=self.device),
            torch.empty(shape, device=self.device),
            plan.rows,
        )

    def attention(self, heads: Heads, step: Step, staged: Staged, q: Tensor, pool: Tensor, out: Tensor) -> None:
        """Attention of the plan's tokens over their block tables, into their rows of out [tokens, Hq, d]."""
        if not len(staged.works):
            return
        layout = heads.layout
        instance, threads, shared = attention_instance(
            heads, staged.rows, bulk=self._library.bulk, shared_limit=self._library.shared_limit
        )
        self._get(instance)(
            (len(staged.works), layout.kv_heads),
            (threads,),
            (
                *_pointers(q, pool, step.tables),
                _i32(step.tables.shape[1]),
                _i32(layout.tiles_per_block),
                *_pointers(step.positions, step.tokens, staged.works, out, staged.part_out, staged.part_lse),
                _i32(heads.heads),
                _i32(layout.kv_heads),
                _f32(heads.scale * heads.key_scale),
                _f32(heads.soft_cap),
                _f32(heads.value_scale),
                _i32(heads.window),
            ),
            shared_mem=shared,
        )
        if len(staged.merges):
            self._get(merge_instance(heads, staged.rows))(
                (len(staged.merges), layout.kv_heads),
                (128,),
                (
                    *_pointers(staged.merges, step.tokens, staged.part_out, staged.part_lse, out),
                    _i32(heads.heads),
                    _i32(layout.kv_heads),
                ),
            )

    def copy_blocks(self, pools: list[Tensor], pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in every layer, as if all were read before any is written."""
        if not pairs:
            return
        if not {source for source, _ in pairs} & {target for _, target in pairs}:
            self._copy(pools, pools, pairs)
            return
        staging = [torch.empty(len(pairs), pool.shape[1], dtype=torch.uint8, device=self.device) for pool in pools]
        self._copy(pools, staging, [(source, i) for i, (source, _) in enumerate(pairs)])
        self._copy(staging, pools, [(i, target) for i, (_, target) in enumerate(pairs)])

    def _copy(self, sources: list[Tensor], targets: list[Tensor], pairs: list[tuple[int, int]]) -> None:
        table = torch.tensor(
            [[pool.data_ptr() for pool in pools] for pools in (sources, targets)], dtype=torch.int64
        ).to(self.device)
        listed = torch.tensor(pairs, dtype=torch.int32).to(self.device)
        self._get(Instance("copy_blocks.cu", "copy_blocks"))(
            (len(pairs), len(sources)), (256,), (*_pointers(table[0], table[1], listed), _i64(sources[0].shape[1]))
        )

    def add_rmsnorm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of residual + x, which becomes the residual; of x when there is none."""
        out = torch.empty_like(x)
        if len(x):
            self._get(Instance("add_rmsnorm.cu", f"add_rmsnorm<{NAMES[x.dtype]},{self._threads}>"))(
                (len(x),),
                (self._threads,),
                (*_pointers(x, residual, weight, out), _i32(x.shape[1]), _f32(eps)),
                shared_mem=self._threads // 32 * 4,
            )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            self._get(Instance("silu_mul.cu", f"silu_mul<{NAMES[gate_up.dtype]}>"))(
                (-(-rows * width // 8 // 256),), (256,), (*_pointers(gate_up, out), _i64(rows), _i32(width))
            )
        return out

    def sample(
        self,
        rows: Tensor,
        draws: Draws,
        *,
        counts: Tensor | None = None,
        allowed: Tensor | None = None,
        bias: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """A token for each row of logits [n, vocabulary], -1 where the row has no finite maximum. `counts` are int32
        [*, vocabulary], `allowed` int32 bit masks [*, ⌈vocabulary / 32⌉], `bias` ids and fp64 values."""
        n, vocabulary = rows.shape
        tokens = torch.empty(n, dtype=torch.int32, device=self.device)
        if not n:
            return tokens
        on_device = torch.from_numpy(draws.view(np.uint8).reshape(n, -1)).to(self.device)
        scores = torch.empty(n, vocabulary, dtype=torch.float64, device=self.device)
        ids, values = bias if bias is not None else (None, None)
        threads = self._sampling_threads
        self._get(Instance("logits.cu", f"logits<{NAMES[rows.dtype]},{threads}>"))(
            (n,),
            (threads,),
            (
                *_pointers(rows),
                _i64(rows.stride(0)),
                *_pointers(on_device, counts, allowed, ids, values, scores),
                _i32(vocabulary),
            ),
        )
        self._get(Instance("sample.cu", f"sample<{threads}>"))(
            (n,), (threads,), (*_pointers(scores, on_device, tokens), _i32(vocabulary)), shared_mem=_SAMPLE_SHARED
        )
        return tokens

    def _get(self, instance: Instance) -> Function:
        if (function := self._functions.get(instance)) is None:
            function = self._functions[instance] = self._library.get_function(instance)
        return function


_SAMPLE_SHARED = 256 * (8 + 4) + 32 * 16 + 2 * 8 + 16 + 2 * 4
"""Of struct Shared in sample.cu."""


def _pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous() and tensor.stride(-1) != 1:
            raise ValueError(f"a kernel needs rows without gaps; this tensor has strides {tensor.stride()}")
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
