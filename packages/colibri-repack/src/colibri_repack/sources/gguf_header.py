"""A GGUF file's key-values and tensor table, every number checked before it is believed.

Layout: ggml's docs/gguf.md (github.com/ggml-org/ggml). Versions 2 and 3 are the same bytes on
little-endian machines; version 1 had 32-bit counts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES_BY_GGML_ID

from ..errors import SourceError
from .files import InputFiles
from .gguf_cursor import GgufCursor
from .tensor import SourceTensor

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_RANK: Final = 4
MAX_RECORDS: Final = 400_000
MAX_ELEMENTS: Final = 12_000_000
MAX_SIZE: Final = 2**62
_MIN_KEY_VALUE_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8
_STRING: Final = 8
_ARRAY: Final = 9
_RETIRED: Final = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
                   36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}  # fmt: skip

# Value types: number -> name, struct code, NumPy type (gguf.md, gguf_metadata_value_type).
_SCALARS: Final[dict[int, tuple[str, struct.Struct, np.dtype[Any]]]] = {
    0: ("u8", struct.Struct("<B"), np.dtype("<u1")),
    1: ("i8", struct.Struct("<b"), np.dtype("<i1")),
    2: ("u16", struct.Struct("<H"), np.dtype("<u2")),
    3: ("i16", struct.Struct("<h"), np.dtype("<i2")),
    4: ("u32", struct.Struct("<I"), np.dtype("<u4")),
    5: ("i32", struct.Struct("<i"), np.dtype("<i4")),
    6: ("f32", struct.Struct("<f"), np.dtype("<f4")),
    7: ("bool", struct.Struct("<?"), np.dtype("<?")),
    10: ("u64", struct.Struct("<Q"), np.dtype("<u8")),
    11: ("i64", struct.Struct("<q"), np.dtype("<i8")),
    12: ("f64", struct.Struct("<d"), np.dtype("<f8")),
}

GgufValue: TypeAlias = int | float | bool | str | list[str] | NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key of the header; `type` is `u32`, `str`, `arr:f32`, ...; numbers stay NumPy."""

    key: str
    type: str
    value: GgufValue


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All a GGUF file says before its data; `data_offset` is where tensor data starts."""

    version: int
    alignment: int
    key_values: tuple[KeyValue, ...]
    tensors: dict[str, SourceTensor]
    data_offset: int
    trailing_bytes: int


def parse_gguf_header(files: InputFiles, path: Path, file_size: int) -> GgufHeader:
    """The checked header of the GGUF file `path` of `file_size` bytes.

    Holds the header's bytes and what they say, at most some 350 MB for the most hostile header,
    about 60 MB for a vocabulary of 262,144 tokens.

    Raises:
        SourceError: with a code `gguf-...` for each way a header can be wrong.
    """
    cursor = GgufCursor(files, path, file_size)
    cursor.need(24, "the file's head")
    version = _read_version(cursor)
    n_tensors = cursor.u64("the number of tensors")
    n_keys = cursor.u64("the number of key-values")
    _check_count(cursor, "key-values", n_keys, _MIN_KEY_VALUE_BYTES)
    _check_count(cursor, "tensors", n_tensors, _MIN_TENSOR_BYTES)
    key_values: dict[str, KeyValue] = {}
    for _ in range(n_keys):
        pair = _read_key_value(cursor)
        if pair.key in key_values:
            raise cursor.error("gguf-duplicate-key", f"key {pair.key!r} is there twice",
                               "each key once")  # fmt: skip
        key_values[pair.key] = pair
    alignment = _alignment(path, key_values)
    rows = [_read_tensor(cursor, path) for _ in range(n_tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = _place(path, rows, data_offset, alignment, file_size)
    end = max((t.offset + t.size for t in tensors.values()), default=data_offset)
    trailing = max(0, file_size - -(-end // alignment) * alignment)
    return GgufHeader(
        version, alignment, tuple(key_values.values()), tensors, data_offset, trailing
    )


def _read_version(cursor: GgufCursor) -> int:
    cursor.position = len(MAGIC)
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    cursor.position = len(MAGIC)
    if version & 0xFFFF == 0 and version:
        raise cursor.error(
            "gguf-big-endian",
            f"version reads 0x{version:08x}: the file is big-endian",
            "little-endian GGUF of version 2 or 3",
            "convert it with gguf-py's gguf_convert_endian script",
        )
    raise cursor.error(
        "gguf-version",
        f"version {version}",
        "GGUF of version 2 or 3",
        "convert the model again with a current llama.cpp",
    )


def _check_count(cursor: GgufCursor, what: str, count: int, least_bytes: int) -> None:
    if count > MAX_RECORDS:
        raise cursor.error("gguf-count", f"{count} {what} are announced", f"at most {MAX_RECORDS}")
    if count * least_bytes > cursor.remaining:
        raise cursor.error(
            "gguf-count",
            f"{count} {what} are announced, {cursor.remaining} bytes are left in the file",
            f"{what} take at least {least_bytes} bytes each",
            "the file is cut short or damaged: fetch it again",
        )


def _read_key_value(cursor: GgufCursor) -> KeyValue:
    key = cursor.string("a key")
    if not key:
        raise cursor.error("gguf-name", "a key is empty", "keys have names")
    kind = cursor.u32(f"the type of {key!r}")
    if kind == _STRING:
        return KeyValue(key, "str", cursor.string(f"the value of {key!r}"))
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.error("gguf-value-type", f"{key!r} has value type {kind}",
                           "types 0 to 12 are defined")  # fmt: skip
    name, form, _ = _SCALARS[kind]
    return KeyValue(key, name, cursor.scalar(form, f"the value of {key!r}"))


def _read_array(cursor: GgufCursor, key: str) -> KeyValue:
    kind = cursor.u32(f"the element type of {key!r}")
    if kind == _ARRAY:
        raise cursor.error("gguf-nested-array", f"{key!r} is an array of arrays",
                           "arrays hold numbers, booleans or strings")  # fmt: skip
    if kind != _STRING and kind not in _SCALARS:
        raise cursor.error("gguf-value-type", f"{key!r} has elements of type {kind}",
                           "types 0 to 12 are defined")  # fmt: skip
    count = cursor.u64(f"the length of {key!r}")
    least = 8 if kind == _STRING else _SCALARS[kind][2].itemsize
    # A string becomes an object of its own, which weighs as much as some ten numbers.
    cursor.n_elements += count * (10 if kind == _STRING else 1)
    if cursor.n_elements > MAX_ELEMENTS:
        raise cursor.error(
            "gguf-array-length",
            f"{key!r} has {count} elements",
            f"arrays of at most {MAX_ELEMENTS} numbers in all, a string counting as ten",
        )
    if count * least > cursor.remaining:
        raise cursor.error(
            "gguf-array-length",
            f"{key!r} has {count} elements of at least {least} bytes, "
            f"{cursor.remaining} bytes are left in the file",
            "an array ends inside the file",
            "the file is cut short or damaged: fetch it again",
        )
    if kind == _STRING:
        return KeyValue(key, "arr:str", cursor.strings(count, f"an element of {key!r}"))
    name, _, dtype = _SCALARS[kind]
    return KeyValue(key, f"arr:{name}", cursor.numbers(dtype, count, f"the elements of {key!r}"))


def _alignment(path: Path, key_values: dict[str, KeyValue]) -> int:
    pair = key_values.get("general.alignment")
    if pair is None:
        return DEFAULT_ALIGNMENT
    value = pair.value
    if pair.type != "u32" or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise SourceError("gguf-alignment", path, f"general.alignment is {pair.type} {value!r}",
                          "a u32 that is a power of two")  # fmt: skip
    return value


def _read_tensor(cursor: GgufCursor, path: Path) -> SourceTensor:
    """One row of the table; `offset` still counts from the start of the data."""
    name = cursor.string("a tensor's name")
    if not name:
        raise cursor.error("gguf-name", "a tensor's name is empty", "tensors have names")
    what = f"tensor {name!r}"
    rank = cursor.u32(f"the rank of {what}")
    if not 1 <= rank <= MAX_RANK:
        raise cursor.error("gguf-rank", f"{what} has {rank} dimensions", f"1 to {MAX_RANK}")
    # ggml stores the contiguous axis first.
    shape = tuple(cursor.u64(f"the shape of {what}") for _ in range(rank))[::-1]
    n_elements = 1
    for length in shape:
        n_elements *= length
        if length >= MAX_SIZE or n_elements >= MAX_SIZE:
            raise cursor.error("gguf-shape", f"{what} has shape {shape}",
                               f"fewer than {MAX_SIZE} elements")  # fmt: skip
    kind = cursor.u32(f"the type of {what}")
    dtype = DTYPES_BY_GGML_ID.get(kind)
    if dtype is None:
        retired = f" ({_RETIRED[kind]}, retired)" if kind in _RETIRED else ""
        raise cursor.error("gguf-dtype", f"{what} has ggml type {kind}{retired}",
                           f"one of {sorted(DTYPES_BY_GGML_ID)}",
                           "convert the model again with a current llama.cpp")  # fmt: skip
    if shape[-1] % dtype.block_elements:
        raise cursor.error("gguf-row", f"{what} has rows of {shape[-1]} elements",
                           f"{dtype.name} takes multiples of {dtype.block_elements}")  # fmt: skip
    size = n_elements // dtype.block_elements * dtype.block_bytes
    offset = cursor.u64(f"the offset of {what}")
    if size >= MAX_SIZE or offset >= MAX_SIZE:
        raise cursor.error("gguf-bounds", f"{what} has {size} bytes at offset {offset}",
                           f"both below {MAX_SIZE}")  # fmt: skip
    return SourceTensor(name, dtype, shape, size, path, offset)


def _place(
    path: Path, rows: list[SourceTensor], data_offset: int, alignment: int, file_size: int
) -> dict[str, SourceTensor]:
    declared = sum(-(-row.size // alignment) * alignment for row in rows)
    tensors: dict[str, SourceTensor] = {}
    for row in rows:
        where = f"{path}: tensor {row.name!r}"
        if row.name in tensors:
            raise SourceError("gguf-duplicate-tensor", where, "is there twice", "each name once")
        if row.offset % alignment:
            raise SourceError("gguf-misaligned", where, f"starts at {row.offset} of the data",
                              f"a multiple of {alignment}")  # fmt: skip
        if row.offset + row.size > declared:
            raise SourceError("gguf-bounds", where,
                              f"ends at {row.offset + row.size} of the data",
                              f"all tensors together have {declared} bytes")  # fmt: skip
        if data_offset + row.offset + row.size > file_size:
            raise SourceError(
                "gguf-truncated",
                where,
                f"ends at byte {data_offset + row.offset + row.size}, "
                f"the file has {file_size} bytes",
                "the whole file is required",
                "the file is cut short: fetch it again",
            )
        tensors[row.name] = row._replace(offset=data_offset + row.offset)
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.size)):
        if tensor.offset < end:
            raise SourceError("gguf-overlap", f"{path}: tensor {tensor.name!r}",
                              f"starts at byte {tensor.offset}, inside {last!r}",
                              "tensors share no bytes")  # fmt: skip
        if tensor.size:
            end, last = tensor.offset + tensor.size, tensor.name
    return tensors
