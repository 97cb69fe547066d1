"""JSON from a checkpoint: bounded in size, an object at the top, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ..errors import SourceError
from .files import InputFiles

MAX_JSON_BYTES: Final = 100 * 2**20


def parse_object(data: bytes | bytearray, where: object, code: str) -> dict[str, Any]:
    """The object that `data` is.

    Raises:
        SourceError: `code` when it is no JSON, nested too deep, no object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise _DuplicateKeyError(key)
                seen.add(key)
        return record

    try:
        record = json.loads(bytes(data).decode("utf-8"), object_pairs_hook=unique)
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


def read_object(files: InputFiles, path: Path, code: str) -> dict[str, Any]:
    """The object in the file `path`, which becomes one of `files`.

    Raises:
        SourceError: `code`, as `parse_object`, or when the file is larger than 100 MiB.
        StorageError: it cannot be read.
    """
    size = files.add(path)
    if size > MAX_JSON_BYTES:
        raise SourceError(code, path, f"has {size} bytes", f"at most {MAX_JSON_BYTES}")
    return parse_object(files.read(path, 0, size), path, code)


class _DuplicateKeyError(Exception):
    pass
