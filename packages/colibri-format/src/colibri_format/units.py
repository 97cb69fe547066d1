"""Sizes as people write them: `512M`, `6G`, `1.5GiB`."""

from __future__ import annotations

import re
from typing import Final

from .errors import UsageError

_FACTORS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """The number of bytes that `text` names; `K`, `M`, `G`, `T` are powers of 1024.

    `512M`, `512MB` and `512MiB` mean the same: memory budgets and alignments are binary.

    >>> parse_size("512M"), parse_size("1.5 GiB"), parse_size("4096")
    (536870912, 1610612736, 4096)

    Raises:
        UsageError: `bad-size` when `text` is no such size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError("bad-size", text, "is not a size", "a size is like 512M, 6G or 4096")
    number, unit, _ = match.groups()
    factor = _FACTORS[unit.upper()]
    # int() and float() of thousands of digits are slow, or infinite.
    size = 2**62
    if len(number) <= 20:
        size = int(float(number) * factor) if "." in number else int(number) * factor
    if size >= 2**62:
        raise UsageError("bad-size", text[:40], "is out of range", "less than 4 EiB")
    return size


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people, in binary units with three figures.

    >>> format_size(536870912), format_size(208896), format_size(12)
    ('512 MiB', '204 KiB', '12 B')
    """
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000 or (unit == "B" and abs(value) < 1024):
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB" if value < 1000 else f"{value:.0f} TiB"
