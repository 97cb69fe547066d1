"""Cold starts: what is known of a file leaves the kernel's page cache."""

from __future__ import annotations

import mmap
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ._native import resident_pages

_CHUNK_BYTES: Final = 8 * 2**20
_STRETCH_BYTES: Final = 2**20
_N_STRETCHES: Final = 512
COLD_SHARE: Final = 0.02
"""A file of which no more than this is in the page cache counts as cold."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """How the page cache was emptied; `is_cold` says whether the file's pages are surely gone."""

    is_cold: bool
    how: str


def drop_caches(*files: Path, root: Path = Path("/")) -> CacheState:
    """Empties the page cache as root, else asks the kernel to drop the pages of `files`."""
    os.sync()
    try:
        (root / "proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        reason = error.strerror
    else:
        return CacheState(True, "all page cache dropped (drop_caches 3)")
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return CacheState(False, f"fadvise DONTNEED only (drop_caches: {reason})")


def read_all(file: Path) -> None:
    """Reads the file once, so that the page cache holds it if it can."""
    with file.open("rb", buffering=0) as stream:
        buffer = bytearray(_CHUNK_BYTES)
        while stream.readinto(buffer):
            pass


def resident_share(file: Path) -> float | None:
    """The share of the file's pages that the page cache holds, told from stretches all over it;
    None where the kernel does not say, as of files that this process may not write to.

    Whatever claimed to have emptied the cache, this asks, and brings nothing in. (Reads with
    RWF_NOWAIT would: they start to read what is missing.)
    """
    if not os.access(file, os.W_OK):
        # mincore(2) then says that all pages are resident.
        return None
    try:
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        ):
            return _share(mapping)
    except (OSError, ValueError):
        return None


def _share(mapping: mmap.mmap) -> float | None:
    starts = range(0, len(mapping), _STRETCH_BYTES)
    chosen = sorted(random.Random(1).sample(starts, min(_N_STRETCHES, len(starts))))
    found = [
        resident_pages(mapping, start, min(_STRETCH_BYTES, len(mapping) - start))
        for start in chosen
    ]
    known = [pages for pages in found if pages is not None]
    return float(np.concatenate(known).mean()) if known else None
