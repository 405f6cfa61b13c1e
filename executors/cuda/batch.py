"""The runs of a step as flat arrays: tokens, positions, where KV goes, block tables, and the work of attention.

Pure NumPy: what comes of it is brought to the device as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.executors.residents import Run
from octavo.kernels.cuda.launch import DECODE_ROWS, PREFILL_ROWS
from octavo.kernels.cuda.plan import Plan, Query, plan

Ints: TypeAlias = npt.NDArray[np.int32]

DECODE_SPLIT = 512
"""Keys in a part of a long context. Fixed, so that how a sequence is cut does not depend on its company."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    ids: npt.NDArray[np.int64]
    positions: Ints
    slots: npt.NDArray[np.int64]
    """Place in the pool of each token: block · block_size + offset."""
    tables: Ints
    decodes: Plan
    prefills: Plan
    ends: list[int]
    """Past the last token of each run."""


def build(runs: list[Run], block_size: int, group: int) -> Batch:
    """`runs` is not empty. `group` is how many query heads share a KV head."""
    lengths = [run.end - run.start for run in runs]
    ends = np.cumsum(lengths)
    positions = np.concatenate([np.arange(run.start, run.end) for run in runs])
    row = np.repeat(np.arange(len(runs)), lengths)
    tables = np.zeros((len(runs), max(-(-run.end // block_size) for run in runs)), dtype=np.int32)
    for i, run in enumerate(runs):
        used = run.resident.table[: -(-run.end // block_size)]
        tables[i, : len(used)] = used
    blocks = tables[row, positions // block_size].astype(np.int64)
    queries = [
        Query(i, int(end) - length, length, run.end)
        for i, (run, length, end) in enumerate(zip(runs, lengths, ends, strict=True))
    ]
    few = [query.tokens * group <= DECODE_ROWS for query in queries]
    return Batch(
        np.concatenate([np.asarray(run.resident.tokens[run.start : run.end], dtype=np.int64) for run in runs]),
        positions.astype(np.int32),
        blocks * block_size + positions % block_size,
        tables,
        plan([q for q, short in zip(queries, few, strict=True) if short], group, DECODE_ROWS, DECODE_SPLIT),
        plan([q for q, short in zip(queries, few, strict=True) if not short], group, PREFILL_ROWS),
        ends.tolist(),
    )
