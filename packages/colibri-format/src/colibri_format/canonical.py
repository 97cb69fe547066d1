"""Canonical JSON: equal values have equal bytes (spec, section 10)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from .errors import FormatCode, FormatError, UsageError

MAX_BYTES: Final = 2**24
MAX_DEPTH: Final = 32
MAX_INTEGER: Final = 2**53 - 1

# Matches wherever there is a quote, up to the end of the text at worst: a string that does not end
# is not scanned again from each quote in it.
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.?)*(?:"|\Z)', re.DOTALL)
_BRACKET: Final = re.compile(rb"[\[\]{}]")


def encode_canonical(value: Mapping[str, Any]) -> bytes:
    """The one text of `value`: sorted members, no white space, UTF-8.

    Raises:
        UsageError: `bad-metadata` for a float, a large integer, a key that is no string, a text
            that UTF-8 cannot hold, or too much or too deep a value.
    """
    _check_value(value, 0)
    try:
        data = json.dumps(
            value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
        ).encode()
    except UnicodeEncodeError as error:
        raise UsageError("bad-metadata", "metadata", str(error), "text must be UTF-8") from error
    if len(data) > MAX_BYTES:
        raise UsageError(
            "bad-metadata", "metadata", f"{len(data)} bytes", f"at most {MAX_BYTES} are allowed"
        )
    return data


def parse_canonical(data: bytes, where: str) -> dict[str, Any]:
    """The object that `data` is the canonical text of.

    Raises:
        FormatError: `metadata-invalid` if it is no such JSON object, `metadata-not-canonical` if
            another text of the same object is the canonical one.
    """

    def refuse(found: str, required: str = "a JSON object as section 10 defines") -> FormatError:
        return FormatError(FormatCode.METADATA_INVALID, f"{where}: metadata", found, required)

    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8 ({error})") from error
    if (depth := _depth(data)) > MAX_DEPTH:
        raise refuse(f"nested {depth} deep", f"at most {MAX_DEPTH} is allowed")
    try:
        value = json.loads(
            text,
            parse_int=_parse_int,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
            object_pairs_hook=_parse_object,
        )
    except (ValueError, RecursionError) as error:
        raise refuse(f"is no JSON text ({error})") from error
    if not isinstance(value, dict):
        raise refuse(f"is a JSON {type(value).__name__}")
    try:
        canonical = encode_canonical(value)
    except UsageError as error:
        raise refuse(error.found, error.required) from error
    if canonical != data:
        place = next(
            (n for n, (a, b) in enumerate(zip(data, canonical, strict=False)) if a != b),
            min(len(data), len(canonical)),
        )
        raise FormatError(
            FormatCode.METADATA_NOT_CANONICAL,
            f"{where}: metadata",
            f"differs from the canonical text of the same object at byte {place}",
            "sorted members, no white space, minimal escapes",
        )
    return value


def _parse_int(text: str) -> int:
    # A bound before int(): converting a million digits takes quadratic time.
    if len(text) > 17 or abs(number := int(text)) > MAX_INTEGER:
        raise ValueError(f"number {text[:20]} is out of range")
    return number


def _refuse_number(text: str) -> None:
    raise ValueError(f"{text[:20]} is no whole number")


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A member that stands twice is dropped here; what is wrong in it would go unseen.
    for pair in pairs:
        json.dumps(pair, ensure_ascii=False).encode()
    return dict(pairs)


def _depth(data: bytes) -> int:
    """How deep brackets nest in `data`, those inside strings left out."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):
        depth += 1 if bracket in b"{[" else -1
        deepest = max(deepest, depth)
    return deepest


def _check_value(value: object, depth: int) -> None:
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise UsageError("bad-metadata", "metadata", f"number {value}", "at most 2^53 - 1")
        return
    if depth == MAX_DEPTH:
        raise UsageError(
            "bad-metadata", "metadata", f"nested over {MAX_DEPTH} deep", "less is required"
        )
    if isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, str):
                raise UsageError("bad-metadata", "metadata", f"key {key!r}", "keys are strings")
            _check_value(member, depth + 1)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _check_value(member, depth + 1)
    else:
        raise UsageError(
            "bad-metadata",
            "metadata",
            f"a {type(value).__name__} ({value!r})",
            "strings, whole numbers, true, false, null, lists and objects",
        )
