"""The error of a model that a file describes but this runtime cannot decode."""

from __future__ import annotations

from colibri_format import ColibriError


class ModelError(ColibriError, ValueError):
    """A well-formed file whose model, tensors or tokenizer this runtime cannot run."""
