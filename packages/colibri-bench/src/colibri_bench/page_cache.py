"""Cold starts: what is known of a file leaves the kernel's page cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CHUNK_BYTES: Final = 8 * 2**20


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
