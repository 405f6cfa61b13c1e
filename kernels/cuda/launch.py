"""Launches kernels on torch tensors: grid, shared memory and arguments. Allocates what they need.

Knows no model and no step: it is told shapes and given tensors. Whether a GPU or the emulator runs them is the
library's matter. One idea, if long: a method for each kernel, and each says all that its kernel is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cuda.draws import Draws
from octavo.kernels.cuda.instances import (
    COPY_BLOCKS,
    DECODE_ROWS,
    PLAN_THREADS,
    PREFILL_ROWS,
    ROW_THREADS,
    SAMPLE_SHARED,
    SAMPLE_THREADS,
    SPEC_VERIFY,
    WGMMA_ROWS,
    Heads,
    append_instance,
    append_latent_instance,
    attention_instance,
    expand_latent_instance,
    gate_instance,
    gather_latent_instance,
    latent_instance,
    logits_instance,
    merge_instance,
    norm_instance,
    plan_instance,
    reject_instance,
    sample_instance,
    wgmma_serves,
)
from octavo.kernels.cuda.library import Function, Library
from octavo.kernels.cuda.plan import TILE, Plan
from octavo.kernels.cuda.pool import LatentLayout
from octavo.kernels.cuda.sources import Instance

_MANY = 2**31 - 1
_i32, _f32, _i64 = np.int32, np.float32, np.int64


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A plan on the device, with room for its parts; good for every layer of a step.

    `counts` int32 [works, merges, parts, split] are those of a plan that the device made: works and merges then have
    room for more. Without them all are meant."""

    works: Tensor
    merges: Tensor
    part_out: Tensor
    part_lse: Tensor
    rows: int
    counts: Tensor | None = None
    order: Tensor | None = None
    """The step's tokens that works and merges speak of, int32; None: in the order of the step."""
    shared: Staged | None = None
    """Works on keys that sequences share: their parts are the first that the merges ask for."""

    def first(self, works: int) -> Staged:
        """Of room for works that the device plans, so much: in the same memory."""
        parts = self.part_out[:works], self.part_lse[:works]
        return Staged(self.works[:works], self.merges[:works], *parts, self.rows, self.counts)

    def beside(self) -> Staged:
        """Room for another plan, whose parts lie where this one's do: for layers that are computed in turn."""
        return Staged(
            torch.zeros_like(self.works), torch.zeros_like(self.merges), self.part_out, self.part_lse, self.rows,
            None if self.counts is None else torch.zeros_like(self.counts),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What every layer's kernels read of a step: per token its position and where its KV goes (below 0: nowhere),
    the order that plans speak of tokens in, and the block tables [rows, blocks].

    `tree_mask` int64 and `tree_start` int32 are per token: one that is a node of a drafted tree sees all keys before
    its start, and of the 64 from there on those of its mask. A start below 0 is a plain token's."""

    positions: Tensor
    slots: Tensor
    tokens: Tensor
    tables: Tensor
    tree_mask: Tensor | None = None
    tree_start: Tensor | None = None


class Kernels:
    """The kernels of one device. `threads` are those of kernels that work on a row each."""

    def __init__(
        self,
        library: Library,
        device: torch.device,
        *,
        threads: int = ROW_THREADS,
        sampling_threads: int = SAMPLE_THREADS,
    ) -> None:
        self.device = device
        self._library = library
        self._threads = threads
        self._sampling_threads = sampling_threads
        self._functions: dict[Instance, Function] = {}

    @property
    def blocks(self) -> int:
        """Blocks of attention that the device runs at once."""
        return self._library.blocks

    def rows(self, heads: Heads) -> tuple[int, ...]:
        """Packed rows of the works that attention over these heads has kernels for here, fewest first."""
        wgmma = self._library.wgmma and wgmma_serves(heads)
        return (DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS) if wgmma else (DECODE_ROWS, PREFILL_ROWS)

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
        saturated: Tensor | None = None,
    ) -> Tensor:
        """Write the keys and values of qkv [tokens, (Hq + 2 Hkv) · d], give the queries [tokens, Hq, d]. `angles` are
        fp32 [positions, rotated]: cosines, then sines. Numbers that fp8 made smaller are added to int32 `saturated`
        [1]."""
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
                    *_pointers(saturated),
                ),
            )
        return q

    def append_latent(
        self,
        layout: LatentLayout,
        step: Step,
        latent: Tensor,
        pool: Tensor,
        angles: Tensor,
        norm: Tensor,
        eps: float,
        *,
        interleaved: bool = False,
    ) -> None:
        """Write latent [tokens, content + rotated]: the content's norm, and the rest rotated by `angles`."""
        if tokens := len(latent):
            self._get(append_latent_instance(layout))(
                (-(-tokens // 4),),
                (128,),
                (
                    *_pointers(latent, step.positions, step.slots, angles, norm, pool),
                    _i32(tokens),
                    _i32(interleaved),
                    _f32(eps),
                    _f32(1 / layout.unit),
                ),
            )

    def gather_latent(self, layout: LatentLayout, tiles: Tensor, pool: Tensor, out: Tensor) -> None:
        """The contents of these tiles of a pool (int32 [n]) as plain rows, into out [16 n, content]."""
        self._get(gather_latent_instance(layout))(
            (len(tiles),), (128,), (*_pointers(pool, tiles, out), _f32(layout.unit))
        )

    def expand_latent(
        self,
        layout: LatentLayout,
        width: int,
        tiles: Tensor,
        keys: Tensor,
        values: Tensor,
        pool: Tensor,
        images: Tensor,
    ) -> None:
        """Keys [heads, 16 n, kept], made of these tiles' contents, with what is rotated of them after it, and values
        [heads, 16 n, mixed], both padded to `width`, into the first n tiles of a pool with as many key heads."""
        self._get(expand_latent_instance(layout, width))(
            (len(tiles), len(keys)),
            (128,),
            (*_pointers(pool, tiles, keys, values, images), _i32(keys.shape[2]), _i32(values.shape[2])),
        )

    def stage(self, plan: Plan, kv_heads: int, size: int) -> Staged:
        """Bring a plan to the device; `size` is that of a head's result."""
        shape = (plan.parts, kv_heads, plan.rows)
        return Staged(
            self._sent(torch.from_numpy(plan.works)),
            self._sent(torch.from_numpy(plan.merges)),
            torch.empty(*shape, size, device=self.device),
            torch.empty(shape, device=self.device),
            plan.rows,
            order=None if plan.order is None else self._sent(torch.from_numpy(plan.order)),
            shared=None if plan.shared is None else self.stage(plan.shared, kv_heads, size),
        )

    def room(self, works: int, merges: int, parts: int, rows: int, kv_heads: int, size: int) -> Staged:
        """Room for plans that the device makes; empty until then."""
        return Staged(
            torch.zeros(works, 8, dtype=torch.int32, device=self.device),
            torch.zeros(merges, 8, dtype=torch.int32, device=self.device),
            torch.empty(parts, kv_heads, rows, size, device=self.device),
            torch.empty(parts, kv_heads, rows, device=self.device),
            rows,
            torch.zeros(4, dtype=torch.int32, device=self.device),
        )

    def plan(
        self,
        into: Staged,
        lengths: Tensor,
        firsts: Tensor,
        group: int,
        *,
        split: int,
        fill: int = 0,
        window: int = 0,
        step: int = TILE,
        least: int = 1,
        most: int = _MANY,
    ) -> None:
        """Plan on the device what `plan.plan` plans: int32 `lengths` [n] of the contexts, and `firsts` [n + 1], each
        one's first token. Only queries of `least` to `most` packed rows. `split` 0 takes the least that gives no more
        than `fill` blocks. More than there is room for is counted and not planned."""
        instance, threads, shared = plan_instance(PLAN_THREADS)
        self._get(instance)(
            (1,),
            (threads,),
            (
                *_pointers(lengths, firsts),
                *(
                    _i32(n)
                    for n in (len(lengths), group, into.rows, least, most, window, step, split, into.part_lse.shape[1])
                ),
                _i32(fill),
                *_pointers(into.works, into.merges, into.counts),
                _i32(len(into.works)),
                _i32(len(into.merges)),
            ),
            shared_mem=shared,
        )

    def attention(self, heads: Heads, step: Step, staged: Staged, q: Tensor, pool: Tensor, out: Tensor) -> None:
        """Attention of the plan's tokens over their block tables, into their rows of out [tokens, Hq, d]."""
        if not len(staged.works):
            return
        if staged.shared is not None:
            self.attention(heads, step, staged.shared, q, pool, out)  # gives parts only
        layout, order = heads.layout, step.tokens if staged.order is None else staged.order
        instance, threads, shared = attention_instance(
            heads,
            staged.rows,
            biased=heads.slopes is not None or step.tree_mask is not None,
            bulk=self._library.bulk,
            shared_limit=self._library.shared_limit,
        )
        self._get(instance)(
            (len(staged.works), layout.kv_heads),
            (threads,),
            (
                *_pointers(q, pool, step.tables),
                _i32(step.tables.shape[1]),
                _i32(layout.tiles_per_block),
                *_pointers(step.positions, order, staged.works, staged.counts),
                *_pointers(out, staged.part_out, staged.part_lse),
                *_pointers(heads.sinks, heads.slopes, step.tree_mask, step.tree_start),
                _i32(heads.heads),
                _i32(layout.kv_heads),
                _f32(heads.scale * heads.key_scale),
                _f32(heads.soft_cap),
                _f32(heads.value_scale),
                _i32(heads.window),
            ),
            shared_mem=shared,
        )
        self._merge(step, staged, out, heads.sinks)

    def attention_latent(
        self, layout: LatentLayout, step: Step, staged: Staged, q: Tensor, pool: Tensor, out: Tensor, scale: float
    ) -> None:
        """Attention of absorbed queries q [tokens, heads, content + rotated] over latent KV, into out [tokens, heads,
        content]. The plan's rows are those of decodes, with all heads for a group."""
        if not len(staged.works):
            return
        trees, limit = step.tree_mask is not None, self._library.shared_limit
        instance, threads, shared = latent_instance(layout, trees=trees, shared_limit=limit)
        self._get(instance)(
            (len(staged.works),),
            (threads,),
            (
                *_pointers(q, pool, step.tables),
                _i32(step.tables.shape[1]),
                _i32(layout.tiles_per_block),
                *_pointers(step.positions, step.tokens, staged.works, staged.counts),
                *_pointers(out, staged.part_out, staged.part_lse, step.tree_mask, step.tree_start),
                _i32(q.shape[1]),
                _f32(scale),
                _f32(layout.unit),
            ),
            shared_mem=shared,
        )
        self._merge(step, staged, out, None)

    def _merge(self, step: Step, staged: Staged, out: Tensor, sinks: Tensor | None) -> None:
        if not len(staged.merges):
            return
        kv_heads, size = staged.part_out.shape[1], staged.part_out.shape[3]
        shared, order = staged.shared or staged, step.tokens if staged.order is None else staged.order
        count = 0 if staged.counts is None else staged.counts[1:].data_ptr()
        self._get(merge_instance(out.dtype, size, staged.rows))(
            (len(staged.merges), kv_heads),
            (128,),
            (
                *_pointers(staged.merges),
                count,
                *_pointers(order, staged.part_out, staged.part_lse, shared.part_out, shared.part_lse),
                _i32(shared.rows),
                *_pointers(sinks, out),
                _i32(out.shape[1]),
                _i32(kv_heads),
            ),
        )

    def staging(self, pools: list[Tensor], blocks: int) -> Tensor:
        """Room for blocks of all layers as bytes [blocks, layers, block_bytes]: each can be moved at once."""
        return torch.empty(blocks, len(pools), pools[0].shape[1], dtype=torch.uint8, device=self.device)

    def gather_blocks(self, pools: list[Tensor], blocks: list[int], staging: Tensor) -> None:
        """The blocks of all layers into a staging buffer, to be swapped out."""
        if blocks:
            self._copy(pools, _by_layer(staging), [(block, i * len(pools)) for i, block in enumerate(blocks)])

    def scatter_blocks(self, pools: list[Tensor], blocks: list[int], staging: Tensor) -> None:
        """What `gather_blocks` brought there, into these blocks."""
        if blocks:
            self._copy(_by_layer(staging), pools, [(i * len(pools), block) for i, block in enumerate(blocks)])

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
        table = self._sent(
            torch.tensor([[pool.data_ptr() for pool in pools] for pools in (sources, targets)], dtype=torch.int64)
        )
        listed = self._sent(torch.tensor(pairs, dtype=torch.int32))
        self._get(COPY_BLOCKS)(
            (len(pairs), len(sources)), (256,), (*_pointers(table[0], table[1], listed), _i64(sources[0].shape[1]))
        )

    def add_rmsnorm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of residual + x, which becomes the residual; of x when there is none."""
        out = torch.empty_like(x)
        if len(x):
            instance, threads, shared = norm_instance(x.dtype, self._threads)
            self._get(instance)(
                (len(x),),
                (threads,),
                (*_pointers(x, residual, weight, out), _i32(x.shape[1]), _f32(eps)),
                shared_mem=shared,
            )
        return out

    def gate_mul(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        """activation(gate) · up of [rows, gate | up]: silu, gelu or gelu_tanh."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            self._get(gate_instance(gate_up.dtype, activation))(
                (-(-rows * width // 8 // 256),), (256,), (*_pointers(gate_up, out), _i64(rows), _i32(width))
            )
        return out

    def scores(
        self,
        rows: Tensor,
        draws: Draws | Tensor,
        *,
        counts: Tensor | None = None,
        allowed: Tensor | None = None,
        bias: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Logits [n, vocabulary] after penalties, bias and masks, fp64. `counts` are int32 [*, vocabulary], `allowed`
        int32 bit masks [*, ⌈vocabulary / 32⌉], `bias` ids and fp64 values: `draws` says which are whose."""
        n, vocabulary = rows.shape
        scores = torch.empty(n, vocabulary, dtype=torch.float64, device=self.device)
        ids, values = bias if bias is not None else (None, None)
        if n:
            self._get(logits_instance(rows.dtype, self._sampling_threads))(
                (n,),
                (self._sampling_threads,),
                (
                    *_pointers(rows),
                    _i64(rows.stride(0)),
                    *_pointers(self._draws(draws), counts, allowed, ids, values, scores),
                    _i32(vocabulary),
                ),
            )
        return scores

    def sample(self, scores: Tensor, draws: Draws | Tensor) -> Tensor:
        """A token for each row of `scores`, -1 where the row has no finite maximum."""
        n, vocabulary = scores.shape
        tokens = torch.empty(n, dtype=torch.int32, device=self.device)
        if n:
            self._get(sample_instance(self._sampling_threads))(
                (n,),
                (self._sampling_threads,),
                (*_pointers(scores, self._draws(draws), tokens), _i32(vocabulary)),
                shared_mem=SAMPLE_SHARED,
            )
        return tokens

    def verify(self, firsts: Tensor, guesses: Tensor, parents: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which guesses are what was drawn: tokens, the nodes that they were drawn at, and how many, [n].

        All int32. Sequence i has the nodes [firsts[i], firsts[i + 1]) of the others' [nodes]: its last token, then
        guesses; a parent is a node of the same sequence, counted from its first. Tokens and nodes lie from firsts[i] on
        and are defined as far as the count says."""
        tokens, path = torch.empty_like(drawn), torch.empty_like(drawn)
        counts = torch.empty(len(firsts) - 1, dtype=torch.int32, device=self.device)
        if len(counts):
            self._get(SPEC_VERIFY)(
                (len(counts),), (32,), _pointers(firsts, guesses, parents, drawn, tokens, path, counts)
            )
        return tokens, path, counts

    def distributions(self, scores: Tensor, draws: Draws | Tensor) -> Tensor:
        """What tokens would be drawn from, fp64, in place of the scores; zeros where a row has no finite maximum."""
        n, vocabulary = scores.shape
        if n:
            self._get(sample_instance(self._sampling_threads, whole=True))(
                (n,),
                (self._sampling_threads,),
                (*_pointers(scores, self._draws(draws), None), _i32(vocabulary)),
                shared_mem=SAMPLE_SHARED,
            )
        return scores

    def reject(
        self,
        firsts: Tensor,
        guesses: Tensor,
        parents: Tensor,
        target: Tensor,
        chances: Tensor,
        drawn_from: Tensor,
        draws: Draws | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rejection sampling of guesses laid out as for `verify`: tokens likewise, and how many; at a node that has no
        distribution -1, and no more.

        `target` fp64 [nodes, vocabulary] are the target's distributions at each node, `chances` [*, vocabulary] those
        that guesses were drawn from: `drawn_from` int32 [nodes] says whose is which, below 0 that it was certain. At
        most 64 guesses have one parent."""
        tokens = torch.empty(len(target), dtype=torch.int32, device=self.device)
        counts = torch.empty(len(firsts) - 1, dtype=torch.int32, device=self.device)
        if len(counts):
            instance, threads, shared = reject_instance(self._sampling_threads)
            packed = self._draws(draws)
            self._get(instance)(
                (len(counts),),
                (threads,),
                (
                    *_pointers(firsts, guesses, parents, target, chances, drawn_from, packed, tokens, counts),
                    _i32(target.shape[1]),
                ),
                shared_mem=shared,
            )
        return tokens, counts

    def _draws(self, draws: Draws | Tensor) -> Tensor:
        """Records, or their bytes that are on the device already."""
        if isinstance(draws, Tensor):
            return draws
        return self._sent(torch.from_numpy(draws.view(np.uint8).reshape(len(draws), -1)))

    def _sent(self, host: Tensor) -> Tensor:
        """On the device, which is not waited for."""
        if self.device.type != "cuda":
            return host.to(self.device)
        return host.pin_memory().to(self.device, non_blocking=True)

    def _get(self, instance: Instance) -> Function:
        if (function := self._functions.get(instance)) is None:
            function = self._functions[instance] = self._library.get_function(instance)
        return function


def _by_layer(staging: Tensor) -> list[Tensor]:
    """A staging buffer as pools of the layers, whose blocks are as many apart as there are layers."""
    return [staging.flatten(0, 1)[layer:] for layer in range(staging.shape[1])]


def _pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous() and tensor.stride(-1) != 1:
            raise ValueError(f"a kernel needs rows without gaps; this tensor has strides {tensor.stride()}")
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
