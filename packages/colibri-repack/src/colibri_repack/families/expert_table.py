"""The experts of a layer, role by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from colibri_format import Role

from ..decoding import Slice


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """The experts of one layer, of which all have the same roles.

    `columns` are in order of role, with one slice an expert; `table[expert]` is one row of them.
    """

    columns: Mapping[Role, tuple[Slice, ...]]

    def __len__(self) -> int:
        """How many experts there are."""
        return len(next(iter(self.columns.values())))

    def __getitem__(self, expert: int) -> Mapping[Role, Slice]:
        """The slices of one expert by role."""
        return {role: column[expert] for role, column in self.columns.items()}

    def __iter__(self) -> Iterator[Mapping[Role, Slice]]:
        return map(self.__getitem__, range(len(self)))
