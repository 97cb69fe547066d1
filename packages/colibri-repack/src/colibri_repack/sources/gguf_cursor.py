"""Reads a GGUF header front to back and never past what the file can hold."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import SourceError
from .files import InputFiles

# The largest real headers (vocabularies of 262,144 tokens with as many scores and merges) are
# below 20 MiB; parsed strings take up to six times their bytes.
MAX_HEADER_BYTES: Final = 64 * 2**20
_CHUNK: Final = 2**20
_U64: Final = struct.Struct("<Q")


class GgufCursor:
    """A position in a GGUF header; every take is bounded by the file before memory is."""

    def __init__(self, files: InputFiles, path: Path, file_size: int) -> None:
        self._files = files
        self._path = path
        self._file_size = file_size
        self._data = bytearray()
        self.position = 0
        self.n_elements = 0

    @property
    def remaining(self) -> int:
        """Bytes of the file behind the position."""
        return self._file_size - self.position

    def error(self, code: str, found: str, required: str, remedy: str = "") -> SourceError:
        """An error of this file, at this position."""
        return SourceError(code, f"{self._path} at byte {self.position}", found, required, remedy)

    def need(self, size: int, what: str) -> None:
        """Bring the next `size` bytes into memory.

        Raises:
            SourceError: `gguf-truncated` when the file ends before; `gguf-header-size` when the
                header would grow past `MAX_HEADER_BYTES`.
        """
        end = self.position + size
        if end <= len(self._data):
            return
        if end > self._file_size:
            raise self.error(
                "gguf-truncated",
                f"{what} takes {size} bytes, {self.remaining} are left in the file",
                "the whole header is required",
                "the file is cut short or damaged: fetch it again",
            )
        if end > MAX_HEADER_BYTES:
            raise self.error(
                "gguf-header-size",
                f"the header goes on past {MAX_HEADER_BYTES} bytes",
                "key-values and tensor table fit into that",
            )
        have = len(self._data)
        wanted = min(max(end, have + _CHUNK), self._file_size, MAX_HEADER_BYTES)
        self._data += self._files.read(self._path, have, wanted - have)

    def scalar(self, form: struct.Struct, what: str) -> int | float | bool:
        """The next value of `form`."""
        self.need(form.size, what)
        value: int | float | bool = form.unpack_from(self._data, self.position)[0]
        self.position += form.size
        return value

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit number."""
        return int(self.scalar(_U32, what))

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit number."""
        return int(self.scalar(_U64, what))

    def string(self, what: str) -> str:
        """The next string: a u64 length and so many bytes.

        Bytes that are not UTF-8 become lone surrogates (PEP 383), so that nothing is lost.
        """
        return self.strings(1, what)[0]

    def strings(self, n: int, what: str) -> list[str]:
        """The next `n` strings; the caller has bounded `n` by the file's size.

        Raises:
            SourceError: `gguf-string` when a length points past the end of the file.
        """
        values: list[str] = []
        position, data, unpack = self.position, self._data, _U64.unpack_from
        have = len(data)
        for _ in range(n):
            if position + 8 > have:
                self.position = position
                self.need(8, f"the length of {what}")
                have = len(data)
            end = position + 8 + unpack(data, position)[0]
            if end > have:
                self.position = position
                if end > self._file_size:
                    raise self.error(
                        "gguf-string",
                        f"{what} is {end - position - 8} bytes long, "
                        f"{self.remaining - 8} are left in the file",
                        "a string ends inside the file",
                        "the file is cut short or damaged: fetch it again",
                    )
                self.need(end - position, what)
                have = len(data)
            values.append(data[position + 8 : end].decode("utf-8", "surrogateescape"))
            position = end
        self.position = position
        return values

    def numbers(self, dtype: np.dtype[np.generic], n: int, what: str) -> NDArray[np.generic]:
        """The next `n` numbers as an array of their own."""
        self.need(n * dtype.itemsize, what)
        values = np.frombuffer(self._data, dtype, n, self.position).copy()
        self.position += n * dtype.itemsize
        return values


_U32: Final = struct.Struct("<I")
