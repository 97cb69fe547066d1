"""The tensor table of one safetensors file, checked against the file's size.

Layout: github.com/huggingface/safetensors, section Format: u64 length of the header, the header
as a JSON object, then the data, which the tensors cover without hole or overlap.
"""

from __future__ import annotations

import re
from itertools import accumulate, repeat
from math import prod
from operator import add, attrgetter
from pathlib import Path
from typing import Final

from colibri_format import DTYPES, DType

from ..errors import SourceError
from .files import InputFiles
from .json_object import MAX_CONFIG_VALUES, MAX_HEADER_VALUES, parse_object
from .tensor import SourceTensor

MAX_HEADER_BYTES: Final = 100_000_000
MAX_SIZE: Final = 2**62
MAX_RANK: Final = 16
_MEMBERS: Final = {"dtype", "shape", "data_offsets"}
_METADATA: Final = "__metadata__"
_JSON_SPACE: Final = " \t\r\n"
_MAX_DIGITS: Final = 19
_COMPACT: Final = re.compile(
    r'"([^"\\\x00-\x1f]+)":\{"dtype":"(\w+","shape":\[[0-9,]*)\],'
    r'"data_offsets":\[([0-9]+),([0-9]+)\]\}([,}])'
)
_COMPACT_SHAPE: Final = '","shape":['
_COMPACT_CHARS: Final = len('"":{"dtype":"],"data_offsets":[,]}')
_PLACE: Final = attrgetter("offset", "size")

# Types without a name of ours are known by their size alone, so that they may stand unused.
_DTYPES: Final = {
    "F64": DTYPES["f64"],
    "F32": DTYPES["f32"],
    "F16": DTYPES["f16"],
    "BF16": DTYPES["bf16"],
    "I64": DTYPES["i64"],
    "I32": DTYPES["i32"],
    "I16": DTYPES["i16"],
    "I8": DTYPES["i8"],
    "U8": DTYPES["u8"],
    "F8_E4M3": DTYPES["f8_e4m3"],
    "F8_E5M2": DTYPES["f8_e5m2"],
    "F8_E8M0": DTYPES["e8m0"],
    "BOOL": DType("bool", None, 1, 1),
    "U16": DType("u16", None, 1, 2),
    "U32": DType("u32", None, 1, 4),
    "U64": DType("u64", None, 1, 8),
    "C64": DType("c64", None, 1, 8),
}


def looks_like_safetensors(head: bytes, file_size: int) -> bool:
    """Whether `head`, a file's first 9 bytes, can start a safetensors file of `file_size` bytes."""
    return (
        len(head) >= 9
        and 2 <= int.from_bytes(head[:8], "little") <= file_size - 8
        and (head[8:9] == b"{")
    )


def parse_safetensors_header(files: InputFiles, path: Path) -> dict[str, SourceTensor]:
    """Every tensor of the safetensors file `path` by name, in the order of their bytes.

    Raises:
        SourceError: `safetensors-header` (length), `-json`, `-entry`, `-dtype`, `-shape`,
            `-size`, `-offsets` (hole, overlap, or bytes left over), `-truncated`.
    """
    file_size = files.add(path)
    if file_size < 8:
        raise SourceError("safetensors-truncated", path, f"has {file_size} bytes",
                          "a header length of 8 bytes", "fetch it again")  # fmt: skip
    length = int.from_bytes(files.read(path, 0, 8), "little")
    if length > MAX_HEADER_BYTES or length < 2:
        raise SourceError("safetensors-header", path, f"announces a header of {length} bytes",
                          f"2 to {MAX_HEADER_BYTES} bytes", "fetch it again")  # fmt: skip
    if length > file_size - 8:
        raise SourceError(
            "safetensors-truncated",
            path,
            f"announces a header of {length} bytes, the file has {file_size}",
            "the whole file is required",
            "it is cut short: fetch it again",
        )
    text = files.read(path, 8, length)
    if not text.startswith(b"{"):
        raise SourceError("safetensors-json", path, "the header does not start with '{'",
                          "a JSON object")  # fmt: skip
    data_offset = 8 + length
    tensors = parse_compact(path, text, data_offset)
    if tensors is None:
        record = parse_object(text, f"{path}: header", "safetensors-json", MAX_HEADER_VALUES)
        record.pop(_METADATA, None)
        tensors = [_tensor(path, name, entry, data_offset) for name, entry in record.items()]
        tensors.sort(key=_PLACE)
    del text
    ends = list(accumulate((tensor.size for tensor in tensors), initial=data_offset))
    if [tensor.offset for tensor in tensors] != ends[:-1]:
        tensor, due = next((t, end) for t, end in zip(tensors, ends, strict=False)
                           if t.offset != end)  # fmt: skip
        what = "overlaps the one before" if tensor.offset < due else "leaves a hole before it"
        raise SourceError("safetensors-offsets", f"{path}: tensor {tensor.name!r}",
                          f"starts at byte {tensor.offset} and {what}",
                          f"it starts at {due}")  # fmt: skip
    end = ends[-1]
    if end > file_size:
        raise SourceError("safetensors-truncated", path, f"has {file_size} bytes",
                          f"its tensors end at byte {end}",
                          "it is cut short: fetch it again")  # fmt: skip
    if end < file_size:
        raise SourceError("safetensors-offsets", path, f"has {file_size} bytes",
                          f"its tensors end at byte {end} and nothing follows them",
                          "fetch it again")  # fmt: skip
    return {tensor.name: tensor for tensor in tensors}


def parse_compact(
    path: Path, text: bytes | bytearray, data_offset: int
) -> list[SourceTensor] | None:
    """The tensors of a header as safetensors writes it: no spaces, no escapes, in order of bytes.

    None for any other `text`, valid or not: then it is to be read as JSON. Three times as fast as
    that, since no objects are made of what is checked together.
    """
    try:
        header = text.decode()
    except UnicodeDecodeError:
        return None
    first = _COMPACT.search(header)
    if first is None:
        return None
    rows: list[tuple[str, ...]] = _COMPACT.findall(header, first.start())
    names, kinds, starts, stops, marks = zip(*rows, strict=True)
    # As long as its entries together: nothing stands between them.
    end = first.start() + len(rows) * _COMPACT_CHARS + sum(map(len, map("".join, rows)))
    is_covered = (
        header[end:].strip(_JSON_SPACE) == ""
        and marks.count(",") == len(rows) - 1
        and marks[-1] == "}"
        and len({_METADATA, *names}) == len(rows) + 1
        and _is_head(header[: first.start()])
    )
    if not is_covered:
        return None
    facts = {kind: _fact(*kind.split(_COMPACT_SHAPE)) for kind in set(kinds)}
    if None in facts.values():
        return None
    of_dtype, of_shape, sizes = zip(*map(facts.__getitem__, kinds), strict=True)
    ends = list(accumulate(sizes, initial=0))
    bounds = tuple(map(str, ends))
    if ends[-1] >= MAX_SIZE or starts != bounds[:-1] or stops != bounds[1:]:
        return None
    places = map(add, ends, repeat(data_offset))
    found = zip(names, of_dtype, of_shape, sizes, repeat(path), places, strict=False)
    return list(map(SourceTensor._make, found))


def _is_head(text: str) -> bool:
    """Whether `text`, up to the first tensor, opens the object and says nothing else of it."""
    if text == "{":
        return True
    try:
        record = parse_object(text[:-1].encode() + b"}", "", "", MAX_CONFIG_VALUES)
    except SourceError:
        return False
    return text.endswith(",") and record.keys() == {_METADATA}


def _fact(dtype_name: str, lengths: str) -> tuple[DType, tuple[int, ...], int] | None:
    """Type, shape and bytes of tensors so described; None where that cannot be."""
    dtype = _DTYPES.get(dtype_name)
    texts = lengths.split(",") if lengths else []
    if dtype is None or len(texts) > MAX_RANK or max(map(len, texts), default=0) > _MAX_DIGITS:
        return None
    if any(not text.isdigit() or str(int(text)) != text for text in texts):
        return None
    shape = tuple(map(int, texts))
    size = prod(shape) * dtype.block_bytes
    return (dtype, shape, size) if max(shape, default=0) < MAX_SIZE and size < MAX_SIZE else None


def _tensor(path: Path, name: str, entry: object, data_offset: int) -> SourceTensor:
    """One tensor, everything said of it checked."""
    where = f"{path}: tensor {name!r}"
    if not name or not isinstance(entry, dict) or entry.keys() != _MEMBERS:
        raise SourceError("safetensors-entry", where, f"is described by {str(entry)[:80]!r}",
                          "a name, and the members dtype, shape and data_offsets")  # fmt: skip
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise SourceError("safetensors-dtype", where, f"has dtype {str(dtype_name)[:40]!r}",
                          f"one of {', '.join(_DTYPES)}")  # fmt: skip
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise SourceError("safetensors-shape", where, f"has shape {str(shape)[:80]}",
                          f"at most {MAX_RANK} lengths below {MAX_SIZE}")  # fmt: skip
    n_elements = 1
    for n in shape:
        n_elements *= n
    size = n_elements * dtype.block_bytes
    if size >= MAX_SIZE:
        raise SourceError("safetensors-shape", where, f"has shape {shape}",
                          f"fewer than {MAX_SIZE} bytes")  # fmt: skip
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise SourceError("safetensors-offsets", where, f"has data_offsets {str(offsets)[:80]}",
                          f"two offsets below {MAX_SIZE}")  # fmt: skip
    if offsets[1] - offsets[0] != size:
        raise SourceError("safetensors-size", where,
                          f"has {offsets[1] - offsets[0]} bytes",
                          f"shape {shape} of {dtype_name} takes {size}")  # fmt: skip
    return SourceTensor(name, dtype, tuple(shape), size, path, data_offset + offsets[0])


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_SIZE
