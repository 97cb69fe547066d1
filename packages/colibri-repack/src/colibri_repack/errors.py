"""Errors of repacking: a source that cannot be trusted, or a request that cannot be met."""

from __future__ import annotations

from colibri_format import ColibriError


class SourceError(ColibriError, ValueError):
    """A checkpoint is damaged, incomplete, or of a kind that is not understood."""


class RepackError(ColibriError, ValueError):
    """A repack that was asked for cannot be done with this source and these options."""


class ExportError(ColibriError, ValueError):
    """A `.colibri` file cannot be written as GGUF."""


class MemoryBudgetError(ColibriError, MemoryError):
    """A repack needs more memory than it was allowed."""
