"""Typed access to the members of a checkpoint's description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from colibri_format import is_float32

from ..errors import SourceError

MAX_LAYERS: Final = 65_535
MAX_EXPERTS: Final = 1_048_576
MAX_COUNT: Final = 2**31 - 1


class Members:
    """Members of `config.json`, or a GGUF file's keys; every getter checks type and range.

    A getter takes alternative names, the first present one counts; a member that is null counts as
    absent. Without a default an absent member is `bad-config`.
    """

    def __init__(self, values: Mapping[str, object], where: Path, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix

    @property
    def where(self) -> Path:
        """The source that errors name."""
        return self._where

    def has(self, name: str) -> bool:
        """Whether the member is there and not null."""
        return self._values.get(self._prefix + name) is not None

    def is_said(self, name: str) -> bool:
        """Whether the member is there, null or not: null may mean "none" where absence does not."""
        return self._prefix + name in self._values

    def raw(self, name: str) -> object:
        """The member as it is, None when absent."""
        return self._values.get(self._prefix + name)

    def scalar(self, name: str) -> object:
        """The member as it is, None when absent; `bad-config` for an array or an object."""
        value = self.raw(name)
        if isinstance(value, (list, dict, np.ndarray)):
            raise self.bad(name, value, "a single value")
        return value

    def count(
        self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT
    ) -> int:
        """A whole number from `least` to `most`. An array of equal numbers counts as one of them.

        Raises:
            SourceError: `bad-config`; `unsupported-model` for an array of unequal numbers.
        """
        name, value = self._find(names, default)
        value = self._uniform(name, value)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A number above 0 within float32's range."""
        name, value = self._find(names, default)
        if not is_float32(value) or value <= 0:  # type: ignore[operator]
            raise self.bad(name, value, "a number above 0 within float32's range")
        return float(value)  # type: ignore[arg-type]

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        name, value = self._find(names, default)
        if type(value) is not bool:
            raise self.bad(name, value, "true or false")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """An array of whole numbers of at least 0; empty when absent."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            type(v) is int and 0 <= v <= MAX_COUNT for v in value
        ):
            raise self.bad(name, value, "an array of whole numbers")
        return tuple(value)

    def bad(self, name: str, value: object, required: str) -> SourceError:
        """The error for a member that is not what it must be."""
        if value is None:
            return SourceError("bad-config", self._where, f"{self._prefix}{name} is missing",
                               required)  # fmt: skip
        return SourceError("bad-config", self._where,
                           f"{self._prefix}{name} is {str(value)[:80]}", required)  # fmt: skip

    def unsupported(self, name: str, value: object, required: str) -> SourceError:
        """The error for a member that asks for arithmetic which no engine here has."""
        return SourceError("unsupported-model", self._where,
                           f"{self._prefix}{name} is {str(value)[:80]}", required)  # fmt: skip

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, object]:
        for name in names:
            if self.has(name):
                return name, self.raw(name)
        return names[0], default

    def _uniform(self, name: str, value: object) -> object:
        if not isinstance(value, (list, np.ndarray)) or not len(value):
            return value
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if any(item != items[0] for item in items):
            raise self.unsupported(name, items, "the same number in every layer")
        return items[0]
