"""Drive the step library without an executor: logits of every position of a text, cut into steps as one likes."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from octavo.executors.loading.checkpoint import Checkpoint
from octavo.executors.native.library import Floats, Isa, Kind, int32s, load
from octavo.executors.native.matrix import Wanted
from octavo.executors.native.program import Inputs, Native, Pool
from octavo.executors.native.weights import Weights


@cache
def library() -> ctypes.CDLL:
    return load()


def levels() -> list[Isa]:
    """What this processor can run."""
    return [isa for isa in Isa if isa <= library().oct_isa_best()]


def make(
    checkpoint: Checkpoint,
    *,
    exact: bool,
    blocks: int = 64,
    block_size: int = 16,
    threads: int = 2,
    isa: Isa | None = None,
    wanted: Wanted = "file",
) -> Native:
    weights = Weights(library(), checkpoint, exact=exact, wanted=wanted)
    return Native(weights, Pool(blocks, block_size, Kind.F32 if exact else Kind.BF16), threads, isa)


def step(
    native: Native,
    spans: list[tuple[list[int], int, list[int]]],
    *,
    logits: bool = True,
    prompts: list[int] | None = None,
) -> tuple[Floats, list[int]]:
    """Compute (ids, first position, block table) spans; logits and best tokens of all their rows. `prompts` say
    where each sequence's prompt ends."""
    n = sum(len(ids) for ids, _, _ in spans)
    positions = [position for ids, start, _ in spans for position in range(start, start + len(ids))]
    sequences = [s for s, (ids, _, _) in enumerate(spans) for _ in ids]
    starts = np.cumsum([0, *(len(table) for _, _, table in spans)])
    out = native.step(
        Inputs(
            int32s([i for ids, _, _ in spans for i in ids]), int32s(positions), int32s(sequences),
            int32s([b for _, _, table in spans for b in table]), int32s(starts), int32s(range(n)),
            int32s(range(n) if logits else [-1] * n), int32s([]), int32s([]),
            prompt_ends=None if prompts is None else int32s(prompts),
        )
    )  # fmt: skip
    assert all(out.finite)
    assert all(out.sample_finite)
    return out.logits, out.best.tolist()


def logits_of(native: Native, ids: list[int], chunk: int = 10**9) -> Floats:
    """Logits at every position; the sequence lies in the pool's last blocks, in reverse order."""
    blocks, size = native.pool.blocks, native.pool.block_size
    table = list(range(blocks))[::-1][: -(-len(ids) // size)]
    return np.concatenate([step(native, [(ids[i : i + chunk], i, table)])[0] for i in range(0, len(ids), chunk)])
