"""The knobs of a run and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from colibri_format import UsageError

from .backend import AUTO
from .decoder import DEFAULT_PREFETCH_DEPTH, MAX_PREFETCH_DEPTH
from .disk_threads import DEFAULT_IO_THREADS

KV_DTYPE_NAMES: Final = {"f16": "float16", "f32": "float32"}
"""What `--kv-dtype` takes, and what NumPy calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a model is loaded.

    Args:
        memory_bytes: the budget, a hard ceiling; None takes what suits the machine.
        context: positions that the KV cache holds; None takes 2048 or the model's own limit,
            whichever is less.
        prefetch_depth: layers ahead whose experts are read before they are asked for, 0 to 2.
        io_threads: threads that read, 1 to 64.
        batch_size: positions of a prompt that pass the layers together; None takes as many as
            the backend is fast with and a sixteenth of the memory holds.
        is_verified: whether checksums are checked as blocks are read.
        is_direct: whether direct reads are tried.
        backend: name of the backend that computes; `auto` is the native one where it can be.
        threads: threads that compute, 1 to 256; None leaves it to the backend.
        kv_dtype: `f16` or `f32`, of keys and values; None leaves it to the backend.

    Raises:
        UsageError: `bad-option` naming the first knob out of its range.
    """

    memory_bytes: int | None = None
    context: int | None = None
    prefetch_depth: int = DEFAULT_PREFETCH_DEPTH
    io_threads: int = DEFAULT_IO_THREADS
    batch_size: int | None = None
    is_verified: bool = True
    is_direct: bool = True
    backend: str = AUTO
    threads: int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        _require("--memory", self.memory_bytes, 1, None)
        _require("--context", self.context, 1, None)
        _require("--prefetch-depth", self.prefetch_depth, 0, MAX_PREFETCH_DEPTH)
        _require("--io-threads", self.io_threads, 1, 64)
        _require("--batch-size", self.batch_size, 1, None)
        _require("--threads", self.threads, 1, 256)
        if self.kv_dtype not in (None, *KV_DTYPE_NAMES):
            names = " or ".join(KV_DTYPE_NAMES)
            raise UsageError("bad-option", "--kv-dtype (kv_dtype)", f"is {self.kv_dtype!r}", names)


def _require(option: str, value: int | None, least: int, most: int | None) -> None:
    if value is None or (value >= least and (most is None or value <= most)):
        return
    span = f"{least} to {most}" if most is not None else f"at least {least}"
    knob = option.removeprefix("--").replace("-", "_")
    raise UsageError("bad-option", f"{option} ({knob})", f"is {value}", span)
