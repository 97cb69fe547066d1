"""Many named tuples at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, TypeVar, cast

_T = TypeVar("_T", bound=tuple[Any, ...])


def tuples_of(kind: type[_T], rows: Iterable[tuple[Any, ...]]) -> Iterator[_T]:
    """A named tuple of `kind` for each of `rows`, which have every field in order.

    Without a call of Python code for each, as a plan has a hundred thousand: three times as fast.
    """
    return cast(Iterator[_T], map(tuple.__new__, repeat(kind), rows))
