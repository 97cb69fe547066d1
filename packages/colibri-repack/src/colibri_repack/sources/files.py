"""The input files of one source: opened on demand, read by position, watched for changes."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from colibri_format import FormatCode, StorageError

MAX_OPEN: Final = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells whether a file is still the one that was opened."""

    device: int
    inode: int
    size: int
    mtime_ns: int


class InputFiles:
    """Position reads over any number of files, at most `MAX_OPEN` of them open at once.

    A checkpoint may have more shards than the process may have descriptors. Not thread-safe.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, Fingerprint] = {}
        self._open: OrderedDict[Path, int] = OrderedDict()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that was added, in that order."""
        return tuple(self._seen)

    def add(self, path: Path) -> int:
        """The size in bytes of `path`, which is watched from now on.

        Raises:
            StorageError: it cannot be looked at, or `not-a-file` when it is no regular file.
        """
        try:
            found = path.stat()
        except OSError as error:
            raise StorageError.of(error, path, "looking at the file") from error
        if not path.is_file():
            raise StorageError(
                "not-a-file", path, "is no regular file", "a checkpoint's file is required"
            )
        self._seen.setdefault(path, _fingerprint(found))
        return found.st_size

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of `path` on.

        Raises:
            StorageError: the kernel refused; `short-read` when the file ends before.
        """
        fd = self._descriptor(path)
        done = 0
        try:
            while done < len(buffer):
                n = os.preadv(fd, [buffer[done:]], offset + done)
                if n == 0:
                    raise StorageError(
                        FormatCode.SHORT_READ,
                        path,
                        f"ends at byte {offset + done}",
                        f"{len(buffer)} bytes at offset {offset} are needed",
                        "the file is cut short or changed: fetch it again",
                    )
                done += n
        except StorageError:
            raise
        except OSError as error:
            raise StorageError.of(error, path, f"reading at offset {offset}") from error

    def read(self, path: Path, offset: int, size: int) -> bytearray:
        """`size` bytes at `offset` of `path`; the caller has bounded `size`."""
        data = bytearray(size)
        self.read_into(path, offset, memoryview(data))
        return data

    def changed(self) -> Path | None:
        """The first file that is not, or no longer, what it was when it was added."""
        for path, then in self._seen.items():
            try:
                if _fingerprint(path.stat()) != then:
                    return path
            except OSError:
                return path
        return None

    def close(self) -> None:
        """Close every open descriptor; the next read opens its file again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        if (fd := self._open.get(path)) is not None:
            self._open.move_to_end(path)
            return fd
        while len(self._open) >= MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError.of(error, path, "opening the file") from error
        self._open[path] = fd
        return fd


def _fingerprint(found: os.stat_result) -> Fingerprint:
    return Fingerprint(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
