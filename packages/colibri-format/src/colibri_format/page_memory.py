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

    Raises:
        MemoryError: the system gives none.
    """
    if size < HUGE_PAGE:
        return np.frombuffer(_pages(max(size, 1)), np.uint8)[:size]
    length = page_memory_bytes(size)
    memory = _pages(length + HUGE_PAGE)
    view = np.frombuffer(memory, np.uint8)
    start = -view.ctypes.data % HUGE_PAGE
    # Kernels without transparent huge pages refuse; small ones do as well, more slowly.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE, start, length)
    return view[start : start + size]


def _pages(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes for a buffer: {error.strerror}") from error


def page_memory_bytes(size: int) -> int:
    """What `page_memory(size)` takes once all of it was used."""
    return round_up(size, HUGE_PAGE if size >= HUGE_PAGE else PAGE)
