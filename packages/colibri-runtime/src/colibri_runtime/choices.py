"""What a configuration leaves open: which backend, how many positions, how large a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from colibri_format import ModelSpec, Reader, UsageError

from .backend import Backend, load_backend
from .config import KV_DTYPE_NAMES, RunConfig
from .decoder import DEFAULT_BATCH_SIZE
from .machine import available_bytes
from .steps import StepsBackend
from .weights import Layouts, check_weights
from .working_memory import working_bytes

DEFAULT_CONTEXT: Final = 2048
"""Positions of the KV cache where none are asked for."""


def make_backend(config: RunConfig) -> Backend:
    """A new backend as the configuration asks.

    Raises:
        UsageError: as `load_backend`.
    """
    options = {} if config.threads is None else {"n_threads": config.threads}
    return load_backend(config.backend, options)


def settle(
    reader: Reader,
    model: ModelSpec,
    backend: Backend,
    config: RunConfig,
    available: Callable[[], int | None] = available_bytes,
) -> RunConfig:
    """The configuration with context, batch size and dtype of keys and values chosen.

    A batch is halved, down to 32 positions, until its working memory is at most a sixteenth of
    the budget, or of what is available: below that larger batches gain more than what they take
    from the pool.

    Raises:
        ModelError: as `check_weights`.
        UsageError: `bad-context`.
    """
    context = choose_context(model, config.context, str(reader.path))
    short = {value: key for key, value in KV_DTYPE_NAMES.items()}
    kv_dtype = config.kv_dtype or short[getattr(backend, "kv_dtype", "float32")]
    batch_size = config.batch_size
    if batch_size is None:
        batch_size = min(context, getattr(backend, "batch_size", DEFAULT_BATCH_SIZE))
        layouts = check_weights(reader, model, backend)
        limit = (config.memory_bytes or available() or 0) // 16
        while batch_size > DEFAULT_BATCH_SIZE:
            size = describe_working(
                reader, model, layouts, backend, batch_size, context, KV_DTYPE_NAMES[kv_dtype]
            )
            if size <= limit:
                break
            batch_size = max(DEFAULT_BATCH_SIZE, batch_size // 2)
    return replace(config, context=context, kv_dtype=kv_dtype, batch_size=min(batch_size, context))


def describe_working(
    reader: Reader,
    model: ModelSpec,
    layouts: Layouts,
    backend: Backend,
    batch_size: int,
    context: int,
    kv_dtype: str,
) -> int:
    """Upper bound in bytes of what a decoder holds beside weights, experts and KV cache."""
    if isinstance(backend, StepsBackend):
        return backend.working_bytes(
            model,
            reader.tensors,
            layouts,
            batch_size=batch_size,
            context=context,
            kv_dtype=kv_dtype,
        )
    return working_bytes(model, batch_size, context, backend, kv_dtype)


def describe_untouched(
    reader: Reader, model: ModelSpec, layouts: Layouts, backend: Backend, batch_size: int
) -> int:
    """Bytes of `describe_working` that passes of one token leave to others."""
    untouched = getattr(backend, "untouched_bytes", None)
    if untouched is None:
        return 0
    n_bytes: int = untouched(model, reader.tensors, layouts, batch_size)
    return n_bytes


def choose_context(model: ModelSpec, context: int | None, where: str) -> int:
    """Positions of the KV cache: what was asked for, or 2048 within the model's own limit.

    Raises:
        UsageError: `bad-context` above the model's own limit.
    """
    if context is None:
        return min(DEFAULT_CONTEXT, model.context_length)
    if context > model.context_length:
        raise UsageError(
            "bad-context",
            where,
            f"a context of {context} positions was asked for",
            f"at most {model.context_length}, for which the model was trained",
            "shorten the prompt or generate fewer tokens",
        )
    return context
