"""The tensor table of one safetensors file, checked against the file's size.

Layout: github.com/huggingface/safetensors, section Format: u64 length of the header, the header
as a JSON object, then the data, which the tensors cover without hole or overlap.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from math import prod
from operator import add, attrgetter
from pathlib import Path
from typing import Final

import numpy as np

from colibri_format import DTYPES, DType

from ..errors import SourceError
from ..tuples import tuples_of
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
# Of a type and a shape with their names; a longer one would be cut into far more memory than it is.
_MAX_KIND: Final = 64 + MAX_RANK * (_MAX_DIGITS + 1)
# Of an entry `"NAME":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},` what follows the name.
_FIRST: Final = re.compile(r'"[^"]+":\{"dtype":"')
_KIND: Final = re.compile(r'":\{"dtype":"(\w+)","shape":\[([0-9,]*)\],')
_N_QUOTES: Final = 10
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
        _check_places(path, tensors, data_offset)
    del text
    end = tensors[-1].offset + tensors[-1].size if tensors else data_offset
    if end > file_size:
        raise SourceError("safetensors-truncated", path, f"has {file_size} bytes",
                          f"its tensors end at byte {end}",
                          "it is cut short: fetch it again")  # fmt: skip
    if end < file_size:
        raise SourceError("safetensors-offsets", path, f"has {file_size} bytes",
                          f"its tensors end at byte {end} and nothing follows them",
                          "fetch it again")  # fmt: skip
    return {tensor.name: tensor for tensor in tensors}


def _check_places(path: Path, tensors: list[SourceTensor], data_offset: int) -> None:
    """Raise unless each tensor starts where the one before it ends."""
    due = data_offset
    for tensor in tensors:
        if tensor.offset != due:
            what = "overlaps the one before" if tensor.offset < due else "leaves a hole before it"
            raise SourceError("safetensors-offsets", f"{path}: tensor {tensor.name!r}",
                              f"starts at byte {tensor.offset} and {what}",
                              f"it starts at {due}")  # fmt: skip
        due += tensor.size


def parse_compact(
    path: Path, text: bytes | bytearray, data_offset: int
) -> list[SourceTensor] | None:
    """The tensors of a header as safetensors writes it: no spaces, no escapes, in order of bytes.

    None for any other `text`, valid or not: then it is to be read as JSON. Several times as fast as
    that: names and kinds are taken from where they should stand, and what safetensors would write
    for them is compared with `text` as a whole.
    """
    try:
        header = text.decode("ascii")
    except UnicodeDecodeError:
        return None
    first = _FIRST.search(header)
    if first is None:
        return None
    head, body = header[: first.start()], header[first.start() :].rstrip(_JSON_SPACE)
    codes = np.frombuffer(body.encode(), np.uint8)
    is_quote = codes == ord('"')
    n_quotes = np.count_nonzero(is_quote)
    if n_quotes % _N_QUOTES or n_quotes > 2 * MAX_HEADER_VALUES:
        return None
    if codes.min() < ord(" ") or "\\" in body or not _is_head(head):
        return None
    quotes = np.flatnonzero(is_quote)
    starts, stops, ends_of_kind = (quotes[at::_N_QUOTES].tolist() for at in (0, 1, 8))
    names = [body[start + 1 : stop] for start, stop in zip(starts, stops, strict=True)]
    kinds = [body[start:stop] for start, stop in zip(stops, ends_of_kind, strict=True)]
    if max(map(len, kinds)) > _MAX_KIND:
        return None
    facts = {kind: _fact(kind) for kind in set(kinds)}
    if None in facts.values() or len({_METADATA, "", *names}) < len(names) + 2:
        return None
    of_dtype, of_shape, sizes = zip(*map(facts.__getitem__, kinds), strict=True)
    ends = list(accumulate(sizes, initial=0))
    bounds = map(str, ends)
    due = [
        f'"{name}{kind}"data_offsets":[{offset},{end}]}}'
        for name, kind, (offset, end) in zip(names, kinds, pairwise(bounds), strict=True)
    ]
    if ends[-1] >= MAX_SIZE or ",".join(due) + "}" != body:
        return None
    places = map(add, ends, repeat(data_offset))
    rows = zip(names, of_dtype, of_shape, sizes, repeat(path), places, strict=False)
    return list(tuples_of(SourceTensor, rows))


def _is_head(text: str) -> bool:
    """Whether `text`, up to the first tensor, opens the object and says nothing else of it."""
    if text == "{":
        return True
    try:
        record = parse_object(text[:-1].encode() + b"}", "", "", MAX_CONFIG_VALUES)
    except SourceError:
        return False
    return text.endswith(",") and record.keys() == {_METADATA}


@lru_cache(maxsize=4096)
def _fact(kind: str) -> tuple[DType, tuple[int, ...], int] | None:
    """Type, shape and bytes of tensors so described; None where that cannot be."""
    match = _KIND.fullmatch(kind)
    dtype = _DTYPES.get(match[1]) if match is not None else None
    if match is None or dtype is None:
        return None
    texts = match[2].split(",") if match[2] else []
    if len(texts) > MAX_RANK or max(map(len, texts), default=0) > _MAX_DIGITS:
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
