"""JSON from a checkpoint: bounded in size, an object at the top, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import SourceError
from .files import InputFiles

MAX_JSON_BYTES: Final = 100 * 2**20
MAX_CONFIG_VALUES: Final = 200_000
MAX_INDEX_VALUES: Final = 600_000
MAX_HEADER_VALUES: Final = 3_000_000
"""Brackets and commas in a shard's header: about nine for each of 330,000 tensors.

Parsed values take up to 30 times the bytes of their text: limits on bytes alone let 100 MB of `[],`
take 2.5 GB.
"""


def count_sign(data: bytes | bytearray, sign: str) -> int:
    """How often the ASCII character `sign` is in `data`; five times as fast as `data.count`."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord(sign)))


def parse_object(
    data: bytes | bytearray, where: object, code: str, max_values: int
) -> dict[str, Any]:
    """The object that `data` is.

    Raises:
        SourceError: `code` when it is no JSON, nested too deep, no object, has a key twice, or
            more than about `max_values` values.
    """
    # A value takes a byte at least.
    n_values = 0
    if len(data) > max_values:
        n_values = sum(count_sign(data, sign) for sign in ",[{")
    if n_values > max_values:
        raise SourceError(code, where, f"has about {n_values} values",
                          f"at most {max_values}: no checkpoint has more")  # fmt: skip
    try:
        text = data.decode()
        record = json.loads(text)
        if not _has_each_key_once(data, record):
            # A call for each object: three times as slow.
            record = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise SourceError(code, where, f"key {error.args[0]!r} is there twice",
                          "each key once in an object") from None  # fmt: skip
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise SourceError(code, where, f"is no JSON ({reason})", "a JSON object",
                          "fetch it again") from error  # fmt: skip
    if not isinstance(record, dict):
        raise SourceError(code, where, f"is a JSON {type(record).__name__}", "a JSON object")
    return record


def read_object(
    files: InputFiles, path: Path, code: str, max_values: int = MAX_CONFIG_VALUES
) -> dict[str, Any]:
    """The object in the file `path`, which becomes one of `files`.

    Raises:
        SourceError: `code`, as `parse_object`, or when the file is larger than 100 MiB.
        StorageError: it cannot be read.
    """
    size = files.add(path)
    if size > MAX_JSON_BYTES:
        raise SourceError(code, path, f"has {size} bytes", f"at most {MAX_JSON_BYTES}")
    return parse_object(files.read(path, 0, size), path, code, max_values)


def _has_each_key_once(data: bytes | bytearray, record: object) -> bool:
    """Whether `data`, which was parsed as `record`, certainly has no key twice in an object.

    Each member has a colon and each object a brace in the text: where no more of them are there
    than objects that are members, and their members, none was lost. False says nothing: a colon or
    brace stands in a string, or an object in an array.
    """
    n_members = n_objects = 0
    n_braces = count_sign(data, "{")
    objects = [record] if type(record) is dict else []
    while objects:
        n_objects += len(objects)
        n_members += sum(map(len, objects))
        if n_objects == n_braces:
            return count_sign(data, ":") == n_members
        objects = [value for found in objects for value in found.values() if type(value) is dict]
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return record


class _DuplicateKeyError(Exception):
    pass
