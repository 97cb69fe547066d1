"""Errors of the runtime beside those of the file format."""

from __future__ import annotations

from colibri_format import ColibriError


class BudgetError(ColibriError, MemoryError):
    """A memory budget is too small for what was asked; `smallest_bytes` is the least that works."""

    def __init__(
        self, where: object, found: str, required: str, remedy: str, *, smallest_bytes: int
    ):
        super().__init__("budget-too-small", where, found, required, remedy)
        self.smallest_bytes = smallest_bytes
