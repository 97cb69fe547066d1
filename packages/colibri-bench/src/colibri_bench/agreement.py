"""Whether figures of two runs agree within their spreads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .picture import size_label

Rows = Sequence[dict[str, Any]]
Figure = tuple[float, float, float]
"""Median, least and largest."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same figure of two runs."""

    name: str
    a: Figure
    b: Figure

    @property
    def agrees(self) -> bool:
        """Whether the spreads overlap. Of two runs of 4 rounds each that drew from the same
        distribution 2.9 % would not, of 5 rounds 0.8 % (2 (n!)^2 / (2n)!)."""
        return self.a[1] <= self.b[2] and self.b[1] <= self.a[2]


def pair_rows(kind: str, first: Rows, second: Rows) -> list[Pair]:
    """What both have, in the order of the first: rows that lack a figure are left out."""
    name_of, figure_of = _READERS[kind]
    others = {name_of(row): figure_of(row) for row in second}
    pairs = []
    for row in first:
        name = name_of(row)
        a, b = figure_of(row), others.get(name)
        if a is not None and b is not None:
            pairs.append(Pair(name, a, b))
    return pairs


def _io_name(row: Mapping[str, Any]) -> str:
    depth = "" if row.get("depth") is None else f" {row['depth']}"
    phase = row.get("phase") or ""
    return f"{row['engine']}{depth}, {size_label(row['block_bytes'])}, {phase}: GB/s"


def _decode_name(row: Mapping[str, Any]) -> str:
    return f"{row['arm']}, limit {row['limit']}: tokens/s"


def _cache_name(row: Mapping[str, Any]) -> str:
    return f"{row['policy']}, room for {row['share']:.4g}: hit rate"


def _spread(name: str) -> Callable[[Mapping[str, Any]], Figure | None]:
    def read(row: Mapping[str, Any]) -> Figure | None:
        values = (row.get(name), row.get("slowest"), row.get("fastest"))
        return None if None in values else values  # type: ignore[return-value]

    return read


def _hit_rate(row: Mapping[str, Any]) -> Figure:
    # A replay has no spread: the same trace gives the same hits.
    rate = float(row["hit_rate"])
    return (rate, rate, rate)


_READERS: Final = {
    "io": (_io_name, _spread("gb_per_s")),
    "decode": (_decode_name, _spread("tokens_per_s")),
    "cache": (_cache_name, _hit_rate),
}
