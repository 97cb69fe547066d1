"""Memory that is taken page by page as it is written to, and can be given back."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import numpy as np


class LazyMemory:
    """Zeros that take memory only where something was written.

    One anonymous mapping in ordinary pages: a huge page would take 2 MiB for the first byte.

    Attributes:
        array: `(n_bytes,) uint8`, starting at a page; keeps the mapping alive.
    """

    def __init__(self, n_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, n_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if (advice := getattr(mmap, "MADV_NOHUGEPAGE", None)) is not None:
            # A kernel without huge pages refuses: there is nothing to advise against.
            with suppress(OSError):
                self._map.madvise(advice)
        self.array = np.frombuffer(self._map, np.uint8)[:n_bytes]

    def give_back(self) -> bool:
        """Whether the system took all of it back: it is zeros again, and takes no memory. Memory
        that is locked is not taken back, nor is any on systems other than Linux."""
        if sys.platform != "linux" or not hasattr(mmap, "MADV_DONTNEED"):
            return False
        try:
            self._map.madvise(mmap.MADV_DONTNEED)
        except OSError:
            return False
        return True
