"""The index of a checkpoint in several safetensors files: which tensor is in which of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import SourceError
from .files import InputFiles
from .json_object import (
    MAX_CONFIG_VALUES,
    MAX_INDEX_VALUES,
    MAX_JSON_BYTES,
    count_sign,
    parse_object,
)

_WEIGHT_MAP: Final = "weight_map"
_MAP: Final = re.compile(r'"weight_map":[ \n]*\{[ \n]*"')
_GAP: Final = re.compile(r",[ \n]*")
_TAIL: Final = re.compile(r'"[ \n]*\}[ \n]*\}[ \n]*')


def read_weight_map(files: InputFiles, path: Path) -> dict[str, str]:
    """The name of each tensor's file, from the index at `path`, which becomes one of `files`.

    Raises:
        SourceError: `safetensors-index`.
        StorageError: it cannot be read.
    """
    size = files.add(path)
    if size > MAX_JSON_BYTES:
        raise SourceError("safetensors-index", path, f"has {size} bytes",
                          f"at most {MAX_JSON_BYTES}")  # fmt: skip
    data = files.read(path, 0, size)
    found = parse_plain_map(data)
    if found is None:
        record = parse_object(data, path, "safetensors-index", MAX_INDEX_VALUES)
        found = record.get(_WEIGHT_MAP)
    if not isinstance(found, dict) or not found:
        raise SourceError("safetensors-index", path, "has no weight_map",
                          "an object of tensor and file names")  # fmt: skip
    _check_names(path, found)
    return found


def _check_names(path: Path, weight_map: dict[str, Any]) -> None:
    # Many tensors, few files: each name of one is looked at once.
    is_text = set(map(type, weight_map.values())) == {str}
    for shard in set(weight_map.values()) if is_text else weight_map.values():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            name = next(name for name, other in weight_map.items() if other is shard)
            raise SourceError("safetensors-index", path,
                              f"tensor {name!r} is in {str(shard)[:80]!r}",
                              "the name of a file in the same folder")  # fmt: skip


def parse_plain_map(data: bytes | bytearray) -> dict[str, str] | None:
    """The `weight_map` of an index as huggingface_hub writes it: last, indented, without escapes.

    None for any other `data`, valid or not: then it is to be read as JSON. Twice as fast as that,
    as it is cut at its quotes, and all that stands between names is compared together.
    """
    if not data.isascii() or b"\\" in data or count_sign(data, '"') > 4 * MAX_INDEX_VALUES:
        return None
    text = data.decode()
    start, end = _MAP.search(text), text.rfind('"')
    if start is None or end <= start.end() or not _TAIL.fullmatch(text, end):
        return None
    texts = text[start.end() : end].split('"')
    names, marks, shards, gaps = (texts[at::4] for at in range(4))
    gap = gaps[0] if gaps else ","
    n_low = np.count_nonzero(np.frombuffer(data, np.uint8)[start.end() : end] < ord(" "))
    is_plain = (
        len(names) == len(shards) == len(gaps) + 1
        and marks.count(": ") == len(marks)
        and gaps.count(gap) == len(gaps)
        and _GAP.fullmatch(gap) is not None
        # No other control characters, which no string may have.
        and n_low == gap.count("\n") * len(gaps)
        and _is_head(text[: start.start()])
    )
    found = dict(zip(names, shards, strict=False))
    return found if is_plain and len(found) == len(names) else None


def _is_head(text: str) -> bool:
    """Whether `text` opens an object and says other things in it, or nothing."""
    head = text.rstrip(" \n")
    if head == "{":
        return True
    if not head.endswith(","):
        return False
    try:
        record = parse_object(head[:-1].encode() + b"}", "", "", MAX_CONFIG_VALUES)
    except SourceError:
        return False
    # Nothing before the comma is no JSON.
    return bool(record) and _WEIGHT_MAP not in record
