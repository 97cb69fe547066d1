"""Errors of this package."""

from colibri_format import ColibriError


class BenchError(ColibriError, ValueError):
    """A file of results, or what was to be measured, is not what it should be."""
