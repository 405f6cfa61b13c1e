"""Latent attention with keys and values of heads, for chunks of prompts long enough: which those are, and their work.

Absorbed attention meets a key with `rank + rotated` numbers and mixes `rank` of them; expanded, with `kept + rotated`,
and mixes `values`. So a pair of query and key costs about a third, but first each key of the context must be made for
each head, the cached ones of a prefix too. Queries' ways into latents and out of them are saved, which for a chunk
without a prefix is as much as making its keys. `pays` counts that. For DeepSeek-V2's heads it does from 187 tokens on
behind the longest of prefixes, and sooner behind shorter ones.

Sums come out otherwise than in the space of latents, so nothing is expanded where a token's numbers may depend on
nothing but its sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.executors.cuda.batch import Batch, Ints
from octavo.executors.cuda.step import step_of
from octavo.executors.loading.spec import Latent
from octavo.kernels.cuda.instances import Heads
from octavo.kernels.cuda.launch import Kernels, Staged, Step
from octavo.kernels.cuda.plan import TILE, TREE, fitting_split, plan
from octavo.kernels.cuda.pool import LatentLayout, PoolLayout

ROOM = 1 << 17
"""Keys of single heads that are made at once, 300 MB of DeepSeek-V2's: of as many heads as they are enough for."""


def pays(latent: Latent, tokens: int, length: int) -> bool:
    """Whether it is less arithmetic to expand a context of `length` than to absorb its last `tokens` queries."""
    pairs = tokens * (length - tokens) + tokens * (tokens + 1) // 2
    through = 2 * latent.rank * (latent.kept + latent.values)
    absorbed = pairs * (4 * latent.rank + 2 * latent.rotated) + tokens * through
    return pairs * 4 * width(latent) + length * through < absorbed


def reach(latent: Latent, chunk: int, context: int) -> int:
    """The longest context, `context` at most, of which up to `chunk` tokens are ever expanded; 0 if none is."""
    tokens = min(chunk, context, ROOM)
    if tokens <= TREE:
        return 0
    lengths = range(tokens, min(context, ROOM) + 1)
    pay = bisect_left(lengths, True, key=lambda length: not pays(latent, tokens, length))
    return lengths[pay - 1] if pay else 0


def width(latent: Latent) -> int:
    """Numbers of a head's key, and of its value, as kernels have them."""
    return -(-max(latent.kept + latent.rotated, latent.values) // 16) * 16


def expands(latent: Latent) -> bool:
    """Whether kernels have such keys and values."""
    return width(latent) <= 256 and not latent.kept % 8 and not latent.values % 8


class Share(NamedTuple):
    """Sequences of a batch (`rows`) that are expanded at once, for so many heads at a time."""

    rows: list[int]
    tiles: Ints
    """Of the latents' pool, in the order in which they are expanded."""
    tables: Ints
    """Where each sequence's tiles are among those."""
    heads: int


def shares(batch: Batch, latent: Latent, heads: int, longest: int) -> list[Share]:
    """Those for whom it pays, `longest` tokens of context in a share at most. What might be a tree is none of them."""
    found: list[list[int]] = []
    free = 0
    for i, _, tokens, length in batch.queries():
        padded = _tiles(length) * TILE
        if tokens > TREE and padded <= longest and pays(latent, tokens, length):
            if padded > free:
                found.append([])
                free = longest
            found[-1].append(i)
            free -= padded
    return [share(batch, rows, heads) for rows in found]


def share(batch: Batch, rows: list[int], heads: int) -> Share:
    """These sequences at once."""
    per_block = batch.block_size // TILE
    counts = [_tiles(int(batch.lengths[row])) for row in rows]
    tables = np.zeros((len(rows), max(counts)), dtype=np.int32)
    tiles: list[Ints] = []
    at = 0
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        each = np.arange(count, dtype=np.int32)
        tiles.append(batch.tables[row, each // per_block] * per_block + each % per_block)
        tables[i, :count] = at + each
        at += count
    fits = max(n for n in range(1, heads + 1) if not heads % n and (n == 1 or n * at * TILE <= ROOM))
    return Share(rows, np.concatenate(tiles), tables, fits)


def _tiles(length: int) -> int:
    return -(-length // TILE)


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """A share on the device: its `tokens` among the step's (int64), `step` and `plan` of these over the expanded
    tiles."""

    tokens: Tensor
    step: Step
    plan: Staged
    tiles: Tensor
    heads: int


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """A step's tokens: those of `waves`, and the rest, if there are any, as a step of their own."""

    waves: list[Wave]
    rest: tuple[Tensor, Step] | None


class Expansion:
    """Memory for keys and values of heads, the same for every layer, and what is expanded of the pass under way."""

    def __init__(self, kernels: Kernels, layout: LatentLayout, latent: Latent, heads: int, scale: float, longest: int):
        """Contexts of up to `longest` tokens are expanded."""
        self.kernels, self.layout, self.latent, self.heads, self._scale = kernels, layout, latent, heads, scale
        self.width = width(latent)
        self.longest = min(ROOM, _tiles(longest) * TILE)
        self.now: Divided | None = None
        each = min(ROOM, self.longest * heads)

        def room(size: int) -> Tensor:
            return torch.empty(size, dtype=layout.dtype, device=kernels.device)

        self._latents = room(self.longest * latent.rank)
        self._keys, self._values = room(each * latent.kept), room(each * latent.values)
        self._images = room(each * 2 * self.width).view(torch.uint8)

    def heads_of(self, count: int) -> Heads:
        """Attention of so many heads over what is expanded."""
        dtype = self.layout.dtype
        return Heads(count, dtype, PoolLayout(1, TILE, count, self.width, dtype), self._scale)

    def divide(self, batch: Batch, fill: int) -> tuple[Divided | None, Batch | None]:
        """What of the batch is expanded, and the rest; `fill` as in `attention_plans`."""
        found = shares(batch, self.latent, self.heads, self.longest)
        if not found:
            return None, batch
        taken = {row for each in found for row in each.rows}
        left = [row for row in range(len(batch.lengths)) if row not in taken]
        waves = self.waves(batch, found, fill)
        if not left:
            return Divided(waves, None), None
        tokens, rest = batch.of(left)
        step, at = step_of(self.kernels.device, rest, {"tokens": tokens})
        return Divided(waves, (at["tokens"], step)), rest

    def waves(self, batch: Batch, found: list[Share], fill: int) -> list[Wave]:
        return [self._wave(batch, each, fill) for each in found]

    def _wave(self, batch: Batch, given: Share, fill: int) -> Wave:
        tokens, mine = batch.of(given.rows)
        mine = replace(mine, tables=given.tables, tree_mask=None, tree_start=None)
        step, at = step_of(self.kernels.device, mine, {"tokens": tokens, "tiles": given.tiles})
        queries, rows = mine.queries(), self.kernels.rows(self.heads_of(given.heads))[-1]
        made = plan(queries, 1, rows, fitting_split(queries, 1, rows, max(1, fill // given.heads)))
        return Wave(at["tokens"], step, self.kernels.stage(made, given.heads, self.width), at["tiles"], given.heads)

    def attention(self, q: Tensor, wave: Wave, into: Tensor, out_of: Tensor, pool: Tensor) -> Tensor:
        """Of q [tokens, heads, kept + rotated], rotated, by the matrices of heads that take queries into latents and
        what is mixed out of them: [tokens, heads, values]."""
        kernels, latent, n = self.kernels, self.latent, len(wave.tiles) * TILE
        latents = self._latents[: n * latent.rank].view(n, latent.rank)
        kernels.gather_latent(self.layout, wave.tiles, pool, latents)
        q = torch.nn.functional.pad(q, (0, self.width - q.shape[-1]))
        mixed, count = q.new_empty(len(q), self.heads, latent.values), wave.heads
        keys = self._keys[: count * n * latent.kept].view(count, n, latent.kept)
        values = self._values[: count * n * latent.values].view(count, n, latent.values)
        each, heads = latents.expand(count, -1, -1), self.heads_of(count)
        for first in range(0, self.heads, count):
            mine = slice(first, first + count)
            torch.bmm(each, into[mine].transpose(1, 2), out=keys)
            torch.bmm(each, out_of[mine], out=values)
            kernels.expand_latent(self.layout, self.width, wave.tiles, keys, values, pool, self._images)
            queries, out = q[:, mine].contiguous(), q.new_empty(len(q), count, self.width)
            kernels.attention(heads, wave.step, wave.plan, queries, self._images, out)
            mixed[:, mine] = out[..., : latent.values]
        return mixed
