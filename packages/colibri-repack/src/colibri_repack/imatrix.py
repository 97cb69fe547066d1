"""llama.cpp's importance matrices: how much each column of a weight matrix matters.

Two forms exist, told apart by their first bytes. Layouts: llama.cpp, tools/imatrix/imatrix.cpp
(`save_imatrix`, `save_imatrix_legacy`) and common/imatrix-loader.cpp; meaning:
tools/quantize/quantize.cpp (`load_imatrix`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .errors import RepackError, SourceError
from .sources import Source, open_source
from .sources.files import Fingerprint, InputFiles

_MAGIC: Final = b"GGUF"
_SUMS: Final = ".in_sum2"
_COUNTS: Final = ".counts"
_MAX_ENTRIES: Final = 2**20
_MAX_NAME: Final = 4096
_I32: Final = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class Importance:
    """The weights of one matrix's columns: `n_columns` floats of `name` from `first` on."""

    imatrix: Imatrix
    name: str
    first: int
    n_columns: int

    def read(self) -> NDArray[np.float32]:
        """`(n_columns,)` float32, finite and not negative.

        Raises:
            SourceError: `imatrix-value` when they are not; `short-read`, or the kernel's refusal.
        """
        weights = self.imatrix.read(self.name, self.first, self.n_columns)
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            raise SourceError(
                "imatrix-value",
                f"{self.imatrix.path}: {self.name!r}",
                f"value {self.first + int(bad[0])} is {float(weights[bad[0]])}",
                "finite values from 0 on",
                "make the importance matrix again",
            )
        return weights


@dataclass(frozen=True, slots=True)
class _Entry:
    """`n_values` sums at byte `offset`, all over `n_calls`."""

    offset: int
    n_values: int
    n_calls: int


class Imatrix:
    """An importance matrix, read where it is needed; close it after use."""

    def __init__(self, path: Path) -> None:
        """Open `path` and check its tables.

        Raises:
            SourceError: `bad-imatrix`, or what is wrong with the GGUF file that it is.
            StorageError: it cannot be read.
        """
        self.path = path
        self._files = InputFiles()
        self._size = self._files.add(path)
        self._source: Source | None = None
        self._entries: Mapping[str, _Entry] = {}
        self._sizes: Mapping[str, int]
        try:
            if self._bytes(0, 4, "its first bytes") == _MAGIC:
                self._source = open_source(path)
                self._sizes = self._gguf_sizes(self._source)
            else:
                self._entries = self._legacy_entries()
                self._sizes = {name: entry.n_values for name, entry in self._entries.items()}
        except BaseException:
            self.close()
            raise

    @property
    def fingerprints(self) -> Mapping[Path, Fingerprint]:
        """The file as it was when it was opened."""
        return self._files.fingerprints

    def changed(self) -> tuple[Path, str] | None:
        """The file, and what is other, if it is no longer what it was when it was opened."""
        return self._files.changed()

    def close(self) -> None:
        """Let go of the file."""
        self._files.close()
        if self._source is not None:
            self._source.close()

    def importance(
        self, name: str, n_columns: int, matrix: int, n_matrices: int
    ) -> Importance | None:
        """That of matrix number `matrix` of the tensor `name`; None when it is not there.

        Raises:
            RepackError: `imatrix-size` when it is that of a tensor of another size.
        """
        size = self._sizes.get(name)
        if size is None:
            return None
        if size != n_columns * n_matrices:
            if name == "token_embd.weight":  # llama.cpp goes on without, too
                return None
            raise RepackError(
                "imatrix-size",
                f"{self.path}: {name!r}",
                f"has {size} values",
                f"{n_columns} columns of {n_matrices} matrices",
                "the importance matrix is of another model",
            )
        return Importance(self, name, matrix * n_columns, n_columns)

    def read(self, name: str, first: int, n: int) -> NDArray[np.float32]:
        """`n` values of `name`: mean squares of the activations that met each column."""
        if self._source is not None:
            return self._read_gguf(self._source, name, first, n)
        entry = self._entries[name]
        data = self._bytes(entry.offset + 4 * first, 4 * n, name)
        values = np.frombuffer(data, "<f4").astype(np.float32)
        if entry.n_calls > 0:
            values /= np.float32(entry.n_calls)
        return values

    def _read_gguf(self, source: Source, name: str, first: int, n: int) -> NDArray[np.float32]:
        values = np.empty(n, "<f4")
        source.read_into(name + _SUMS, 4 * first, values.view(np.uint8).data)
        # One count a row of sums. All experts are in one row where llama-imatrix read them from
        # the older form, which has one number of calls for all.
        rows = np.arange(first, first + n) // source.tensors[name + _SUMS].shape[-1]
        found = np.empty(rows[-1] - rows[0] + 1, "<f4")
        source.read_into(name + _COUNTS, 4 * int(rows[0]), found.view(np.uint8).data)
        # llama.cpp keeps counts as whole numbers.
        counts = np.floor(found + np.float32(0.5))[rows - rows[0]]
        # An expert that no token chose: every column counts alike.
        weights = np.ones(n, np.float32)
        np.divide(values, counts, out=weights, where=counts > 0)
        return weights

    def _gguf_sizes(self, source: Source) -> dict[str, int]:
        if source.config.get("general.type") != "imatrix":
            raise self._bad(f"general.type is {source.config.get('general.type')!r}", "'imatrix'")
        sizes = {}
        for key, sums in source.tensors.items():
            if not key.endswith(_SUMS):
                continue
            name = key.removesuffix(_SUMS)
            counts = source.tensors.get(name + _COUNTS)
            n_rows = sums.size // 4 // sums.shape[-1] if sums.shape and sums.shape[-1] else 0
            if (
                counts is None
                or {sums.dtype.name, counts.dtype.name} != {"f32"}
                or (counts.size != 4 * n_rows or not n_rows)
            ):
                raise self._bad(f"{name!r} has no counts that fit its sums", "float32 sums and "
                                "one count a row")  # fmt: skip
            sizes[name] = sums.size // 4
        return sizes

    def _bytes(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > self._size:
            raise self._bad(f"ends at byte {self._size}, within {what}", "the whole file")
        data = bytearray(size)
        self._files.read_into(self.path, offset, memoryview(data))
        return bytes(data)

    def _legacy_entries(self) -> dict[str, _Entry]:
        at = 0

        def number(most: int, what: str, least: int = 0) -> int:
            nonlocal at
            value = int(_I32.unpack(self._bytes(at, 4, what))[0])
            if not least <= value <= most:
                raise self._bad(f"{what} at byte {at} is {value}", f"{least} to {most}")
            at += 4
            return value

        entries: dict[str, _Entry] = {}
        for _ in range(number(_MAX_ENTRIES, "the number of tensors", 1)):
            length = number(_MAX_NAME, "the length of a name", 1)
            try:
                name = self._bytes(at, length, "a name").decode()
            except UnicodeDecodeError:
                raise self._bad(f"the name at byte {at} is no UTF-8", "tensor names") from None
            at += length
            n_calls = number(2**31 - 1, "the number of calls")
            n_values = number(2**31 - 1, "the number of values", 1)
            if at + 4 * n_values > self._size:
                raise self._bad(f"ends at byte {self._size}, within {name!r}", "the whole file")
            if name in entries:
                raise self._bad(f"has {name!r} twice", "each tensor once")
            entries[name] = _Entry(at, n_values, n_calls)
            at += 4 * n_values
        return entries

    def _bad(self, found: str, required: str) -> SourceError:
        return SourceError(
            "bad-imatrix", self.path, found, required, "give a file that llama-imatrix wrote"
        )
