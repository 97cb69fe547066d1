"""Embeddings: rows of a matrix that is in memory, or that stays in its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType

from .backend import Backend, Floats, Matrix

_ROWS_AT_ONCE: Final = 16
_CHECK_BYTES: Final = 32 * 1024


class RowTable(Protocol):
    """Gives rows of a `(vocab_size, hidden)` matrix by token."""

    def rows(self, backend: Backend, ids: NDArray[np.intp]) -> Floats:
        """The rows `ids`, `(len(ids), hidden)`, new."""


class ResidentTable:
    """Rows of a matrix that is in memory, as the head is when it is the embeddings as well."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def rows(self, backend: Backend, ids: NDArray[np.intp]) -> Floats:
        """The rows `ids`."""
        return backend.rows(self.matrix, ids)


class PieceStream(Protocol):
    """A tensor's bytes in order, checked at the end."""

    def read_into(self, buffer: Any) -> None: ...
    def finish(self) -> None: ...


class StoredTensor(Protocol):
    """A dense tensor in a file, of which parts can be read."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    def stream(self) -> PieceStream: ...
    def read_part_into(self, start: int, buffer: Any) -> None: ...


class FileTable:
    """Rows read from the file when a token needs them: one small read a token.

    A token needs one row of the table, whose memory is worth more as slots for experts. Rows are
    in plain order. The whole tensor is read and checked against its checksum once, when this is
    made; later reads of rows are not checked, and go through the page cache.

    Raises:
        FormatError: `tensor-checksum`.
        StorageError: what the kernel refused, then or when rows are read.
    """

    def __init__(
        self, name: str, tensor: StoredTensor, tell: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._tensor = tensor
        n_rows, n_columns = tensor.shape
        self._shape = (n_rows, n_columns)
        self._row_bytes = tensor.dtype.row_bytes(n_columns)
        self._check()
        if tell is not None:
            tell()

    def rows(self, backend: Backend, ids: NDArray[np.intp]) -> Floats:
        """The rows `ids`; reads each from the file."""
        n_columns = self._shape[1]
        out = np.empty((len(ids), n_columns), np.float32)
        # 64 more bytes, so that they can start where vector loads like it.
        held = np.empty(_ROWS_AT_ONCE * self._row_bytes + 64, np.uint8)
        held = held[-held.ctypes.data % 64 :][: _ROWS_AT_ONCE * self._row_bytes]
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            wanted = ids[start : start + _ROWS_AT_ONCE]
            for place, row in enumerate(wanted):
                piece = held[place * self._row_bytes : (place + 1) * self._row_bytes]
                self._tensor.read_part_into(int(row) * self._row_bytes, piece)
            data = held[: len(wanted) * self._row_bytes]
            some = Matrix(self._name, self._tensor.dtype, (len(wanted), n_columns), data)
            out[start : start + len(wanted)] = backend.rows(some, np.arange(len(wanted)))
        return out

    def _check(self) -> None:
        stream = self._tensor.stream()
        buffer = np.empty(min(_CHECK_BYTES, self._tensor.size), np.uint8)
        for start in range(0, self._tensor.size, len(buffer) or 1):
            stream.read_into(buffer[: self._tensor.size - start])
        stream.finish()
