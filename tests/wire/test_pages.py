"""What an actor keeps: its bytes stay as they are, what is hardly used takes no more memory, and what has gone none."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from pathlib import Path

import pytest

from octavo.core.pages import HUGE, MOST, make_huge, settle

PAGE = mmap.PAGESIZE
PAGES = 4 * HUGE // PAGE

needs_pages = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system does not show its pages")


def touched(every: int, size: int = PAGES * PAGE) -> mmap.mmap:
    """Memory with one page in so many written to, whole huge pages among it; some systems would fill them at once."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, PAGES, every):
        memory[page * PAGE : page * PAGE + 4] = page.to_bytes(4, "little")
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def present(memory: mmap.mmap) -> int:
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(at // PAGE * 8)
        entries = pagemap.read(PAGES * 8)
    return sum(entry >> 7 for entry in entries[7::8])


@needs_pages
def test_what_is_there_stays_and_what_is_hardly_used_takes_no_more() -> None:
    full, sparse = touched(every=1), touched(every=64)
    before = present(sparse)
    make_huge()
    assert all(full[page * PAGE : page * PAGE + 4] == page.to_bytes(4, "little") for page in range(PAGES))
    assert present(full) == PAGES
    assert present(sparse) == before == PAGES // 64


@needs_pages
def test_what_is_too_great_for_a_heap_stays_as_it_is() -> None:
    weights = touched(every=2, size=MOST + HUGE)
    make_huge()
    assert present(weights) == PAGES // 2


def test_a_core_of_an_earlier_generation_does_not_stay_for_good() -> None:
    class Core:
        def __init__(self) -> None:
            self.myself = self

    try:
        core = Core()
        settle()
        gone = weakref.ref(core)
        del core
        settle()
        assert gone() is None
    finally:
        gc.unfreeze()
