"""Which KV a drafter with a pool of its own has written, block by block.

Its pool has the target's blocks, so the KV-manager's tables are its tables too: what requests share (prefixes, forks)
is shared here as well, and no block has two owners. But a block may have been computed by the target alone, or hold a
guess that was wrong; so for each block is kept for which tokens, after which prefix, its KV was computed. What is there
is known by what it stands for, and nothing needs to be said when blocks change hands.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from octavo.executors.residents import Resident

_NOTHING = -1


class Written:
    """`ids` [blocks, size]: the tokens whose KV is there; `chain` [blocks]: a hash of all tokens before the block."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._ids: npt.NDArray[np.int32] = np.full((blocks, block_size), _NOTHING, dtype=np.int32)
        self._chain: npt.NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self._chains: WeakKeyDictionary[Resident, list[int]] = WeakKeyDictionary()
        """Of each resident, the hash before each of its blocks."""

    def clear(self) -> None:
        self._ids[:] = _NOTHING

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._ids[target], self._chain[target] = self._ids[source], self._chain[source]

    def upto(self, resident: Resident) -> int:
        """How many of its first tokens have their KV."""
        known, size = len(resident.tokens), self._size
        blocks = -(-known // size)
        tokens = np.full(blocks * size, _NOTHING - 1, dtype=np.int32)
        tokens[:known] = resident.tokens
        table = resident.table[:blocks]
        same = self._ids[table] == tokens.reshape(blocks, size)
        same &= (self._chain[table] == np.asarray(self._before(resident)[:blocks], dtype=np.int64))[:, None]
        flat = same.ravel()
        return known if flat[:known].all() else int(flat.argmin())

    def wrote(self, resident: Resident, start: int, ids: Sequence[int]) -> None:
        """KV of tokens `ids` from position `start` on; all before has its own. What was after them in their blocks no
        longer counts."""
        size, before = self._size, self._before(resident)
        for i in range(start // size, -(-(start + len(ids)) // size)):
            first, last = max(start, i * size), min(start + len(ids), (i + 1) * size)
            block = resident.table[i]
            self._ids[block, first - i * size : last - i * size] = ids[first - start : last - start]
            self._ids[block, last - i * size :] = _NOTHING
            # A block of guesses alone stands after tokens that are not known yet: it counts for nobody.
            self._chain[block] = before[i] if i < len(before) else _NOTHING

    def _before(self, resident: Resident) -> list[int]:
        chains = self._chains.setdefault(resident, [0])
        while len(chains) * self._size <= len(resident.tokens):
            at = (len(chains) - 1) * self._size
            chains.append(hash((chains[-1], *resident.tokens[at : at + self._size])))
        return chains
