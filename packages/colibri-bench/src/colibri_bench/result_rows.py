"""What the rows of each kind of results must hold, so that pictures can be made of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from .token_time import SHARES

MOST_ROWS: Final = 100_000
_MOST: Final = 1e15

Check = Callable[[object], bool]


def is_number(value: object) -> bool:
    """A finite number that a picture can show."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and abs(value) <= _MOST  # type: ignore[arg-type]


def is_count(value: object) -> bool:
    """A whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) < 1000


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_OPTIONAL: Final = _or_none(is_number)
_ROWS: Final[Mapping[str, Mapping[str, Check]]] = {
    "io": {
        "engine": _is_text, "block_bytes": is_count, "depth": _or_none(is_count),
        "gb_per_s": is_number, "slowest": is_number, "fastest": is_number,
    },
    "decode": {
        "limit": _is_text, "arm": _is_text, "tokens_per_s": _OPTIONAL, "slowest": _OPTIONAL,
        "fastest": _OPTIONAL,
    },
    "cache": {"policy": _is_text, "share": is_number, "hit_rate": is_number},
    "timeline": {"limit": _is_text, "kind": _is_text, "start_ms": is_number, "end_ms": is_number},
}  # fmt: skip
KINDS: Final = tuple(_ROWS)
_MEDIANS: Final = ("gb_per_s", "tokens_per_s")
_TOKENS: Final = {"limit": _is_text, **dict.fromkeys((*SHARES, "total"), is_number)}


def find_fault(kind: object, rows: object, extra: object) -> str:
    """What is wrong with rows and further parts of results; empty when nothing is."""
    if kind not in _ROWS:
        return f"has the kind {str(kind)[:40]!r}"
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        return f"has no list of at most {MOST_ROWS} rows"
    fault = _fault_of_rows(rows, _ROWS[str(kind)], "row")
    if not fault and not isinstance(extra, dict):
        return "has an extra that is no object"
    if not fault and kind == "timeline" and isinstance(extra, dict):
        tokens = extra.get("tokens", [])
        if not isinstance(tokens, list):
            return "has no list of tokens"
        return _fault_of_rows(tokens, _TOKENS, "token")
    return fault


def _fault_of_rows(rows: list[Any], checks: Mapping[str, Check], what: str) -> str:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            return f"{what} {number} is no object"
        for name, check in checks.items():
            if not check(row.get(name)):
                return f"{what} {number} has {str(row.get(name))[:40]!r} as {name}"
        if not _is_spread(row):
            return f"{what} {number} has a median outside its spread"
    return ""


def _is_spread(row: Mapping[str, Any]) -> bool:
    """Whether the median lies between slowest and fastest, above 0, where a row has them."""
    for name in _MEDIANS:
        if row.get(name) is not None:
            low, high = row.get("slowest"), row.get("fastest")
            return is_number(low) and is_number(high) and 0 < low <= row[name] <= high  # type: ignore[operator]
    return True
