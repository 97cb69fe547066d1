"""The knobs of a run and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_format import UsageError

from .decoder import DEFAULT_BATCH_SIZE, DEFAULT_PREFETCH_DEPTH, MAX_PREFETCH_DEPTH
from .disk_threads import DEFAULT_IO_THREADS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a model is loaded.

    Args:
        memory_bytes: the budget, a hard ceiling; None takes what suits the machine.
        context: positions that the KV cache holds; None takes 2048 or the model's own limit,
            whichever is less.
        prefetch_depth: layers ahead whose experts are read before they are asked for, 0 to 2.
        io_threads: threads that read, 1 to 64.
        batch_size: positions of a prompt that pass the layers together.
        is_verified: whether checksums are checked as blocks are read.
        is_direct: whether direct reads are tried.
        backend: name of the backend that computes.

    Raises:
        UsageError: `bad-option` naming the first knob out of its range.
    """

    memory_bytes: int | None = None
    context: int | None = None
    prefetch_depth: int = DEFAULT_PREFETCH_DEPTH
    io_threads: int = DEFAULT_IO_THREADS
    batch_size: int = DEFAULT_BATCH_SIZE
    is_verified: bool = True
    is_direct: bool = True
    backend: str = "numpy"

    def __post_init__(self) -> None:
        _require("--memory", self.memory_bytes, 1, None)
        _require("--context", self.context, 1, None)
        _require("--prefetch-depth", self.prefetch_depth, 0, MAX_PREFETCH_DEPTH)
        _require("--io-threads", self.io_threads, 1, 64)
        _require("--batch-size", self.batch_size, 1, None)


def _require(option: str, value: int | None, least: int, most: int | None) -> None:
    if value is None or (value >= least and (most is None or value <= most)):
        return
    span = f"{least} to {most}" if most is not None else f"at least {least}"
    knob = option.removeprefix("--").replace("-", "_")
    raise UsageError("bad-option", f"{option} ({knob})", f"is {value}", span)
