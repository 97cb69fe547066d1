"""Memory that is taken page by page as it is written to, and can be given back."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from .pool import CAN_GIVE_BACK


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

    def give_back(self) -> None:
        """Zeros all of it, which takes no memory then, where the system takes it back."""
        if CAN_GIVE_BACK:
            self._map.madvise(mmap.MADV_DONTNEED)
