"""Memory that direct I/O reads into and writes from at full speed."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .layout import PAGE, round_up

HUGE_PAGE: Final = 2 * 2**20


def page_memory(size: int) -> NDArray[np.uint8]:
    """`size` bytes of zeros at the start of a page, of a huge one where `size` fills any.

    A request to a disk lists the pages of its buffer, and lists are short: of small pages it takes
    several requests where one of huge pages does. Pages take memory when they are first used, huge
    ones whole: at most `page_memory_bytes(size)`.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size < HUGE_PAGE:
        return np.frombuffer(mmap.mmap(-1, max(size, 1), flags), np.uint8)[:size]
    length = page_memory_bytes(size)
    memory = mmap.mmap(-1, length + HUGE_PAGE, flags)
    view = np.frombuffer(memory, np.uint8)
    start = -view.ctypes.data % HUGE_PAGE
    # Kernels without transparent huge pages refuse; small ones do as well, more slowly.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE, start, length)
    return view[start : start + size]


def page_memory_bytes(size: int) -> int:
    """What `page_memory(size)` takes once all of it was used."""
    return round_up(size, HUGE_PAGE if size >= HUGE_PAGE else PAGE)
