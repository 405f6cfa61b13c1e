"""What a process has for good, once it has started: out of the garbage collector's sight, and in huge pages.

An actor sleeps while a step runs, and the step pushes what the actor works with out of all caches, page tables too:
where the heap is a few huge pages, it wakes to fewer misses. Linux 6.1 and newer; elsewhere the pages stay as they are.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from threading import Timer

import numpy as np

HUGE = 2 << 20
LATER_S = 5.0
"""When pages are made huge: tens of milliseconds, which the way to a first token does not have."""
MOST = 256 << 20
"""Bytes of one mapping of a heap. A greater one holds weights or KV: its owner has said how it wants it, and to look at
every page of it would take seconds."""

_PRESENT = np.uint64(1 << 63)
_MADV_COLLAPSE = 25


def settle() -> None:
    """Call it when what is there now stays: to look for garbage in it again and again would hold up a step for
    milliseconds. With another in its place call it again: only then is what has gone since looked for."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    later = Timer(LATER_S, make_huge)
    later.daemon = True
    later.start()


def make_huge() -> int:
    """Bring what is on the heap to huge pages; how many there are now."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return sum(madvise(at, HUGE, _MADV_COLLAPSE) == 0 for at in worth())


def worth() -> Iterator[int]:
    """Where the heap fills at least half of a huge page: less would cost more memory than it saves time."""
    try:
        with Path("/proc/self/maps").open() as maps, Path("/proc/self/pagemap").open("rb") as pagemap:
            for first, pages in list(_heap(maps)):
                pagemap.seek(first // PAGESIZE * 8)
                entries = np.frombuffer(pagemap.read(pages * 8), np.uint64)
                if len(entries) == pages:  # or it has gone meanwhile
                    present = (entries >= _PRESENT).reshape(-1, HUGE // PAGESIZE).mean(axis=1)
                    yield from (first + HUGE * np.flatnonzero(present >= 0.5)).tolist()
    except OSError:  # a system that does not show them: nothing is made
        return


def _heap(maps: Iterator[str]) -> Iterator[tuple[int, int]]:
    """Memory of no file that can be written: the first place for a huge page, and the pages in all such places."""
    for line in maps:
        where, access, _, _, _, *name = line.split()
        if access.startswith("rw") and name in ([], ["[heap]"]):
            start, end = (int(side, 16) for side in where.split("-"))
            first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if first < last and end - start <= MOST:
                yield first, (last - first) // PAGESIZE
