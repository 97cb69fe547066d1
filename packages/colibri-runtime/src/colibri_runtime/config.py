"""The knobs of a run and their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from colibri_format import UsageError

from .backend import AUTO
from .disk import EngineName
from .disk_choice import MAX_IO_THREADS
from .disk_ring import MAX_DEPTH
from .disk_threads import DEFAULT_IO_THREADS
from .policies import DEFAULT_POLICY, POLICY_NAMES
from .prefetch import AUTO_LOOK_AHEAD, MAX_LOOK_AHEAD, PrefetchSource

KV_DTYPE_NAMES: Final = {"f16": "float16", "f32": "float32"}
"""What `--kv-dtype` takes, and what NumPy calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a model is loaded.

    Args:
        memory_bytes: the budget, a hard ceiling; None takes what suits the machine.
        cache_bytes: the most of it that the pool of blocks takes; None: all that is left.
        context: positions that the KV cache holds; None takes 2048 or the model's own limit,
            whichever is less.
        prefetch_depth: layers ahead whose experts are read before they are asked for, 0 to 2;
            None finds out by trial whether one pays, and if so, two.
        prefetch_from: what foresees them: the next layer's router, what the layer asked for
            last, or what was asked for most.
        policy: which blocks leave the pool first, one of `POLICY_NAMES`.
        lfu_weight: of the policy hybrid, 0 (recency) to 1 (frequency); None: its own default.
        history: where counts of asks are kept from run to run; None keeps none.
        io: name of the disk engine, or `auto`.
        io_threads: threads that read, of engines that have any, 1 to 64; None: the engine's own.
        io_depth: requests in flight, of engines that queue them; None: the engine's own.
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
    cache_bytes: int | None = None
    context: int | None = None
    prefetch_depth: int | None = None
    prefetch_from: str = PrefetchSource.ROUTER
    policy: str = DEFAULT_POLICY
    lfu_weight: float | None = None
    history: Path | None = None
    io: str = EngineName.AUTO
    io_threads: int | None = None
    io_depth: int | None = None
    batch_size: int | None = None
    is_verified: bool = True
    is_direct: bool = True
    backend: str = AUTO
    threads: int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        _require("--memory", self.memory_bytes, 1, None)
        _require("--context", self.context, 1, None)
        _require("--cache-size (cache_bytes)", self.cache_bytes, 1, None)
        _require("--prefetch-depth", self.prefetch_depth, 0, MAX_LOOK_AHEAD)
        _require("--io-threads", self.io_threads, 1, MAX_IO_THREADS)
        _require("--io-depth", self.io_depth, 1, MAX_DEPTH)
        _choose("--io", self.io, list(EngineName))
        _choose("--prefetch-from", self.prefetch_from, list(PrefetchSource))
        _choose("--policy", self.policy, POLICY_NAMES)
        _require("--batch-size", self.batch_size, 1, None)
        _require("--threads", self.threads, 1, 256)
        if self.kv_dtype not in (None, *KV_DTYPE_NAMES):
            names = " or ".join(KV_DTYPE_NAMES)
            raise UsageError("bad-option", "--kv-dtype (kv_dtype)", f"is {self.kv_dtype!r}", names)

    @property
    def look_ahead(self) -> int:
        """Layers ahead for which there must be room: the most of a trial where a trial decides."""
        return AUTO_LOOK_AHEAD if self.prefetch_depth is None else self.prefetch_depth

    @property
    def n_io_threads(self) -> int:
        """Threads to reckon with before the engine is chosen."""
        return DEFAULT_IO_THREADS if self.io_threads is None else self.io_threads


def _choose(option: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        knob = option.removeprefix("--").replace("-", "_")
        raise UsageError("bad-option", f"{option} ({knob})", f"is {value}", " or ".join(names))


def _require(option: str, value: int | None, least: int, most: int | None) -> None:
    if value is None or (value >= least and (most is None or value <= most)):
        return
    span = f"{least} to {most}" if most is not None else f"at least {least}"
    if "(" not in option:
        knob = option.removeprefix("--").replace("-", "_")
        option = f"{option} ({knob})"
    raise UsageError("bad-option", option, f"is {value}", span)
