"""The bytes of a GGUF file before its data (ggml's docs/gguf.md)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from colibri_format import DType, round_up

from ..sources.gguf_header import MAGIC, KeyValue

_TYPES: Final = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7,
                 "str": 8, "u64": 10, "i64": 11, "f64": 12}  # fmt: skip
_ARRAY: Final = 9
_FORMS: Final = {"u8": "<B", "i8": "<b", "u16": "<H", "i16": "<h", "u32": "<I", "i32": "<i",
                 "f32": "<f", "bool": "<?", "u64": "<Q", "i64": "<q", "f64": "<d"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor to be written: `shape` in C order, `offset` from the start of the data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.dtype.size_bytes(self.shape)


def place_tensors(
    tensors: Sequence[tuple[str, DType, tuple[int, ...]]], alignment: int
) -> tuple[tuple[GgufTensor, ...], int]:
    """The tensors one after another, as llama.cpp requires, and the bytes of data in all."""
    placed = []
    position = 0
    for name, dtype, shape in tensors:
        tensor = GgufTensor(name, dtype, shape, position)
        placed.append(tensor)
        position += round_up(tensor.size, alignment)
    return tuple(placed), position


def encode_head(
    version: int, alignment: int, pairs: Sequence[KeyValue], tensors: Sequence[GgufTensor]
) -> bytes:
    """Everything before the data, padded to `alignment`."""
    parts = [MAGIC, struct.pack("<IQQ", version, len(tensors), len(pairs))]
    for pair in pairs:
        parts.extend(_pair(pair))
    for tensor in tensors:
        parts.append(_string(tensor.name))
        rank = len(tensor.shape)
        # ggml stores the contiguous axis first.
        parts.append(struct.pack(f"<I{rank}Q", rank, *tensor.shape[::-1]))
        parts.append(struct.pack("<IQ", tensor.dtype.ggml_id, tensor.offset))
    data = b"".join(parts)
    return data.ljust(round_up(len(data), alignment), b"\0")


def _pair(pair: KeyValue) -> Iterator[bytes]:
    yield _string(pair.key)
    value: Any = pair.value
    if not pair.type.startswith("arr:"):
        yield struct.pack("<I", _TYPES[pair.type])
        yield _string(value) if pair.type == "str" else _number(pair.type, value)
        return
    kind = pair.type.removeprefix("arr:")
    yield struct.pack("<IIQ", _ARRAY, _TYPES[kind], len(value))
    if kind == "str":
        yield from map(_string, value)
    else:
        yield np.asarray(value, np.dtype(_FORMS[kind])).tobytes()


def _number(kind: str, value: float) -> bytes:
    if kind == "f32":
        # struct refuses what only rounds to infinity, as the largest float32 written short may.
        with np.errstate(over="ignore"):
            return np.array(value, "<f4").tobytes()
    return struct.pack(_FORMS[kind], value)


def _string(text: str) -> bytes:
    # Bytes that are no UTF-8 were read as lone surrogates (PEP 383).
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
