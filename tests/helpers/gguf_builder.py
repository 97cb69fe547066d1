"""Builds GGUF files byte by byte, valid or as wrong as a test asks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?",
          U64: "Q", I64: "q", F64: "d"}  # fmt: skip


def string(text: str | bytes) -> bytes:
    """A GGUF string: its length and its bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, item: Any) -> bytes:
    """A value without its type; an array is a pair of element type and items."""
    if kind == STRING:
        return string(item)
    if kind == ARRAY:
        element, items = item
        if element == STRING:
            body = b"".join(map(string, items))
        else:
            body = struct.pack(f"<{len(items)}{_FORMS[element]}", *items)
        return struct.pack("<IQ", element, len(items)) + body
    return struct.pack("<" + _FORMS[kind], item)


@dataclass
class TensorRow:
    """One row of the tensor table; `shape` in C order, `offset` from the data's start."""

    name: str | bytes
    shape: tuple[int, ...]
    ggml_type: int
    data: bytes
    offset: int | None = None
    rank: int | None = None


@dataclass
class GgufBuilder:
    """Collects key-values and tensors; `build()` gives the bytes. Counts may be forced wrong."""

    alignment: int = 32
    version: int = 3
    pairs: list[bytes] = field(default_factory=list)
    rows: list[TensorRow] = field(default_factory=list)
    n_pairs: int | None = None
    n_rows: int | None = None

    def add(self, key: str | bytes, kind: int, item: Any) -> GgufBuilder:
        """A key-value."""
        self.pairs.append(string(key) + struct.pack("<I", kind) + value(kind, item))
        return self

    def add_raw(self, pair: bytes) -> GgufBuilder:
        """A key-value as bytes that may be wrong."""
        self.pairs.append(pair)
        return self

    def tensor(
        self,
        name: str | bytes,
        shape: Sequence[int],
        ggml_type: int,
        data: bytes,
        *,
        offset: int | None = None,
        rank: int | None = None,
    ) -> GgufBuilder:
        """A tensor behind those before it, or at `offset` of the data."""
        self.rows.append(TensorRow(name, tuple(shape), ggml_type, data, offset, rank))
        return self

    def head(self) -> bytes:
        """All that stands before the data, unpadded."""
        n_rows = len(self.rows) if self.n_rows is None else self.n_rows
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        out = b"GGUF" + struct.pack("<IQQ", self.version, n_rows, n_pairs) + b"".join(self.pairs)
        position = 0
        for row in self.rows:
            offset = position if row.offset is None else row.offset
            rank = len(row.shape) if row.rank is None else row.rank
            out += string(row.name) + struct.pack("<I", rank)
            out += struct.pack(f"<{len(row.shape)}Q", *row.shape[::-1])
            out += struct.pack("<IQ", row.ggml_type, offset)
            position += self._pad(len(row.data))
        return out

    def build(self) -> bytes:
        """The whole file."""
        head = self.head()
        data = b"".join(row.data.ljust(self._pad(len(row.data)), b"\0") for row in self.rows)
        return head.ljust(self._pad(len(head)), b"\0") + data

    def write(self, path: Path) -> Path:
        """The whole file, written to `path`."""
        path.write_bytes(self.build())
        return path

    def _pad(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment
