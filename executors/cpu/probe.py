"""Find, on this very machine and thread count, arithmetic under which a token's bits do not depend on its company.

Which row counts of a matrix product agree bit for bit differs by processor, library and number of threads: MKL
changes its blocking at 2, 4 or 16 rows, and with two threads at others again. So nothing is assumed. Every row
count and attention tile that will ever be used is compared with an anchor on the model's own shapes, those that
differ are never used, and the whole model is checked at the end. The result is a function of machine, threads and
model, never of timing: a restarted executor finds the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.core.models.errors import ModelError
from octavo.executors.cpu.forward import Forward
from octavo.executors.cpu.layout import PoolShape, Span, build
from octavo.executors.cpu.linear import Backend, Linear, RowCounts
from octavo.executors.cpu.llama import Arithmetic, KvPool, Llama
from octavo.executors.cpu.lora import Packed, linears
from octavo.executors.loading.peft import Lora
from octavo.executors.loading.spec import Model, Spec
from octavo.kernels.attention import KEYS, paged_attention

ANCHOR = 32
"""Rows of the call that all others must agree with."""
ROWS = (1, 2, 4, 8, 12, 16, 24, ANCHOR, 48, 64, 96, 128, 192, 256)
_HEAD_ROWS = (1, 2, 4, 8, 16, ANCHOR, 64)
_ADAPTER_ROWS = (1, 2, 4, 8, 16, ANCHOR, 64, 128)
_TILES = (1, 2, 3, 4, 6, 8, 16, 64)
_ANCHOR_TILE = 16


class NotExactError(ModelError):
    """No arithmetic was found that is independent of the batch."""


def load_exact(model: Model) -> Llama:
    """Build the model with the first arithmetic that passes every check."""
    arithmetics = [a for backend in (Backend.PACKED, Backend.PLAIN) if (a := _arithmetic(model, backend))]
    arithmetics.sort(key=lambda a: (a.rows.counts[0] > 4, len(a.rows.counts) == 1))  # stable: packed wins a draw
    fixed = [Arithmetic(a.backend, RowCounts((ANCHOR,)), RowCounts((ANCHOR,)), (_ANCHOR_TILE,)) for a in arithmetics]
    for arithmetic in arithmetics + fixed:
        llama = Llama(model, arithmetic)
        if independent(llama):
            return llama
    raise NotExactError(
        f"no way was found to compute this model's numbers independently of the batch, with {torch.get_num_threads()} "
        f"threads and {torch.__config__.parallel_info().splitlines()[0]}: not even at {ANCHOR} rows a call; "
        "try another executor.threads (1 is the safest)"
    )


def _arithmetic(model: Model, backend: Backend) -> Arithmetic | None:
    """What agrees with the anchor; None when not even the anchor agrees with itself, or the backend is not there."""
    if backend is Backend.PACKED and not torch._C._has_mkldnn:
        return None
    weights = model.weights
    shapes = {tuple(weights[name].shape): name for name in weights if name.endswith(".weight")}
    head = weights.get("head.weight", weights["embed"])
    counts, head_counts = set(ROWS), equal_row_counts(Linear(head, None, backend), head.shape[1], _HEAD_ROWS)
    for shape, name in shapes.items():
        if name != "head.weight":
            bias = weights.get(name.removesuffix("weight") + "bias")
            counts &= equal_row_counts(Linear(weights[name], bias, backend), shape[1], ROWS)
    tiles = equal_tiles(model.spec)
    if not counts or not head_counts or not tiles:
        return None
    return Arithmetic(backend, RowCounts(tuple(sorted(counts))), RowCounts(tuple(sorted(head_counts))), tiles)


def equal_row_counts(linear: Linear, inputs: int, candidates: tuple[int, ...]) -> set[int]:
    """Those of `candidates` whose rows, wherever they stand in the call, equal those of calls of `ANCHOR` rows."""
    most = -(-max(candidates) // ANCHOR) * ANCHOR
    x = torch.randn(most, inputs, generator=torch.Generator().manual_seed(1))
    shifted = x.roll(1, 0)
    anchor = RowCounts((ANCHOR,))
    expected = linear(x, anchor)
    if not torch.equal(linear(shifted, anchor), expected.roll(1, 0)):
        return set()
    return {
        n
        for n in candidates
        if torch.equal(linear.product(x[:n]), expected[:n])
        and torch.equal(linear.product(shifted[:n]), expected.roll(1, 0)[:n])
    }


def exact_adapter(lora: Lora, like: Arithmetic) -> Packed:
    """An adapter as linears whose rows do not depend on their company. Raises `NotExactError`."""
    for backend in (like.backend, Backend.PLAIN):
        lows = linears(lora, backend)
        shapes = {
            shape: linear
            for parts, name in ((lora.parts[name], name) for name in lows)
            for part, low in zip(parts, lows[name], strict=True)
            for shape, linear in ((part.down.shape, low.down), (part.up.shape, low.up))
        }
        counts = set(_ADAPTER_ROWS)
        for shape, linear in shapes.items():
            counts &= equal_row_counts(linear, shape[1], _ADAPTER_ROWS)
        if counts:
            nbytes = sum(part.down.nbytes + part.up.nbytes for parts in lora.parts.values() for part in parts)
            return Packed(lows, RowCounts(tuple(sorted(counts))), nbytes)
    raise NotExactError("no way was found to compute this adapter's numbers independently of the batch")


def equal_tiles(spec: Spec) -> tuple[int, ...]:
    """Numbers of queries in an attention tile that agree with each other, alone and in batches, over short and long."""
    shape = PoolShape(9 * KEYS, 1, spec.kv_heads, spec.head_dim)
    generator = torch.Generator().manual_seed(2)
    pool = torch.randn(shape.rows, spec.head_dim, generator=generator)
    pool.view(-1, shape.slots + 1, spec.head_dim)[:, -1] = 0
    table = torch.randperm(shape.slots, generator=generator).tolist()
    lengths = (3, 67, KEYS, 2 * KEYS + 5, 3 * KEYS, 5 * KEYS - 9, 9 * KEYS)
    q = torch.randn(70 * len(lengths), spec.heads, spec.head_dim, generator=generator)

    def attend(spans: list[Span], queries: Tensor, tiles: tuple[int, ...]) -> Tensor:
        layout = build(spans, len(queries), tiles, shape)
        return paged_attention(queries, pool, layout.gathers, layout.order, spec.kv_heads)

    spans = [Span([0] * min(70, n), n - min(70, n), table) for n in lengths]
    starts = [sum(len(span.ids) for span in spans[:i]) for i in range(len(spans) + 1)]
    q = q[: starts[-1]]
    expected = attend(spans, q, (_ANCHOR_TILE,))

    def agrees(tile: int) -> bool:
        lasts = [end - 1 for end in starts[1:]]  # the last query of each span, as decodes would ask it
        decodes = [Span([0], span.end - 1, table) for span in spans]
        alone = [attend([decode], q[i : i + 1], (tile,)) for i, decode in zip(lasts, decodes, strict=True)]
        return (
            torch.equal(attend(spans, q, (tile,)), expected)
            and torch.equal(attend(decodes, q[lasts], (tile,)), expected[lasts])
            and torch.equal(torch.cat(alone), expected[lasts])
        )

    if not agrees(_ANCHOR_TILE):
        return ()
    return tuple(tile for tile in _TILES if agrees(tile))


def independent(forward: Forward[Any]) -> bool:
    """Is a sequence's every hidden state and logit the same in one chunk, in pieces, and one by one in company?"""
    spec = forward.spec
    n = min(10, spec.context)
    ids = (torch.arange(n) * 7919 % spec.vocab_size).tolist()
    others = [(token + 1) % spec.vocab_size for token in ids]
    shape = PoolShape(2 * n, 1, spec.kv_heads, spec.head_dim)
    mine, theirs = list(range(n)), list(range(n, 2 * n))

    def run(steps: list[list[Span]]) -> Tensor:
        pool = KvPool(shape, spec.layers)
        states = []
        for spans in steps:
            hidden = forward.hidden(forward.layout(spans, shape), pool)
            states.append(torch.cat((hidden, forward.logits(hidden)), dim=1)[: len(spans[0].ids)])
        return torch.cat(states)

    whole = run([[Span(ids, 0, mine)]])
    half = n // 2
    pieces = run([[Span(ids[:half], 0, mine), Span(others[:1], 0, theirs)], [Span(ids[half:], half, mine)]])
    single = run(
        [[Span(ids[i : i + 1], i, mine)] + ([Span(others[i : i + 1], i, theirs)] if i % 3 else []) for i in range(n)]
    )
    return torch.equal(whole, pieces) and torch.equal(whole, single)
