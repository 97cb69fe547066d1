"""What a GGUF file said before its data, from the embedded file `gguf.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import ExportError
from ..sources.gguf_header import DEFAULT_ALIGNMENT, KeyValue

_ALIGNMENT: Final = "general.alignment"
_INTEGERS: Final = {"u8": (0, 2**8), "u16": (0, 2**16), "u32": (0, 2**32), "u64": (0, 2**64),
                    "i8": (-(2**7), 2**7), "i16": (-(2**15), 2**15), "i32": (-(2**31), 2**31),
                    "i64": (-(2**63), 2**63)}  # fmt: skip
_FLOATS: Final = {"f32": np.dtype("<f4"), "f64": np.dtype("<f8")}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a GGUF: `shape` in C order."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GgufRecord:
    """Key-values and tensor table; `tensors` is None where the record has none."""

    version: int
    alignment: int
    key_values: tuple[KeyValue, ...]
    tensors: tuple[TensorEntry, ...] | None


def parse_gguf_record(data: bytes, where: str) -> GgufRecord:
    """The record that `encode_gguf_json` wrote.

    Raises:
        ExportError: `bad-gguf-record`, naming what is not as it is written there.
    """
    try:
        record: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _error(where, f"is no JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get("kv"), list):
        raise _error(where, "is no object with an array kv")
    version = record.get("version")
    if version not in (2, 3):
        raise _error(where, f"has version {str(version)[:40]}")
    pairs = tuple(_pair(item, where) for item in record["kv"])
    by_key = {pair.key: pair for pair in pairs}
    if len(by_key) != len(pairs):
        raise _error(where, "has a key twice")
    alignment: Any = DEFAULT_ALIGNMENT
    if _ALIGNMENT in by_key:
        alignment = by_key[_ALIGNMENT].value
        is_power = by_key[_ALIGNMENT].type == "u32" and alignment > 0
        if not is_power or alignment & (alignment - 1):
            raise _error(where, f"has {_ALIGNMENT} {alignment!r}")
    tensors = record.get("tensors")
    if tensors is None:
        return GgufRecord(version, alignment, pairs, None)
    if not isinstance(tensors, list):
        raise _error(where, "has tensors that are no array")
    entries = tuple(_entry(item, where) for item in tensors)
    if len({entry.name for entry in entries}) != len(entries):
        raise _error(where, "has a tensor twice")
    return GgufRecord(version, alignment, pairs, entries)


def _pair(item: Any, where: str) -> KeyValue:
    if not (isinstance(item, list) and len(item) == 3 and all(type(t) is str for t in item[:2])):
        raise _error(where, f"has no [key, type, value] but {str(item)[:60]}")
    key, kind, value = item
    if not kind.startswith("arr:"):
        if not _is_of(value, kind):
            raise _error(where, f"has {key!r} of type {kind[:20]} with value {str(value)[:40]}")
        return KeyValue(key, kind, value)
    kind = kind.removeprefix("arr:")
    if not isinstance(value, list) or not all(_is_of(element, kind) for element in value):
        raise _error(where, f"has {key!r}, which is no array of {kind[:20]}")
    return KeyValue(key, f"arr:{kind}", value)


def _is_of(value: Any, kind: str) -> bool:
    if kind == "str":
        return type(value) is str and not any(0xD800 <= ord(c) < 0xDC80 for c in value)
    if kind == "bool":
        return type(value) is bool
    if kind in _FLOATS:
        return type(value) in (int, float)
    least, beyond = _INTEGERS.get(kind, (0, 0))
    return type(value) is int and least <= value < beyond


def _entry(item: Any, where: str) -> TensorEntry:
    is_entry = isinstance(item, list) and len(item) == 3 and type(item[0]) is str
    if is_entry and isinstance(item[2], list) and 1 <= len(item[2]) <= 4:
        name, _, shape = item
        if all(type(n) is int and 0 <= n < 2**62 for n in shape):
            return TensorEntry(name, tuple(shape))
    raise _error(where, f"has no [name, type, shape] but {str(item)[:60]}")


def _error(where: str, found: str) -> ExportError:
    return ExportError("bad-gguf-record", where, found,
                       "what colibri repack writes of a GGUF file",
                       "repack the source again")  # fmt: skip
