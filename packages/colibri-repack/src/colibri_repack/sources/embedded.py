"""A small file that goes into the output as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmbeddedFile:
    """`name` and `size` in bytes; `read()` gives exactly those bytes."""

    name: str
    size: int
    read: Callable[[], bytes]
