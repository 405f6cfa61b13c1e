"""What an actor keeps: its bytes stay as they are, what is hardly used takes no more memory, and what has gone none."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from pathlib import Path

import pytest

from octavo.core.pages import HUGE, MOST, make_huge, settle, worth

PAGE = mmap.PAGESIZE
PAGES = 4 * HUGE // PAGE

needs_pages = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system does not show its pages")


def touched(every: int, size: int = PAGES * PAGE) -> mmap.mmap:
    """Memory with one page in so many written to, whole huge pages among it, which the system leaves as it is."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, PAGES, every):
        memory[page * PAGE : page * PAGE + 4] = page.to_bytes(4, "little")
    return memory


def huge_of(memory: mmap.mmap) -> set[int]:
    """Of `memory`, what is worth a huge page."""
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return {place for place in worth() if at <= place <= at + len(memory) - HUGE}


@needs_pages
def test_only_what_is_used_is_worth_a_huge_page() -> None:
    full, sparse = touched(every=1), touched(every=64)
    assert len(huge_of(full)) >= PAGES * PAGE // HUGE - 1
    assert not huge_of(sparse)


@needs_pages
def test_what_is_too_great_for_a_heap_stays_as_it_is() -> None:
    assert not huge_of(touched(every=1, size=MOST + HUGE))


@needs_pages
def test_the_bytes_of_what_is_made_huge_are_as_they_were() -> None:
    full = touched(every=1)
    full.madvise(mmap.MADV_HUGEPAGE)
    make_huge()
    assert all(full[page * PAGE : page * PAGE + 4] == page.to_bytes(4, "little") for page in range(PAGES))


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
