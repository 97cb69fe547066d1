"""A model made ready to run inside its memory budget: planned, then loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

import colibri_format
from colibri_format import (
    MODEL_FILE,
    FormatCode,
    FormatError,
    ModelSpec,
    Reader,
    format_size,
    parse_model,
)

from .backend import Backend
from .blocks import BlockTable
from .budget import MemoryNeeds, MemoryPlan, default_budget, index_bytes, plan_memory, usage_bytes
from .choices import describe_untouched, describe_working, make_backend, settle
from .config import KV_DTYPE_NAMES, RunConfig
from .decoder import Decoder, RoutingObserver
from .history import History, read_history, write_history
from .kv_cache import KvCache, kv_cache_bytes
from .machine import available_bytes
from .opening import open_pool
from .prefetch import PrefetchSource
from .reserve import Lender, Reserve
from .store import Store
from .timeline import Timeline
from .weights import (
    Layouts,
    TensorFacts,
    Weights,
    check_weights,
    load_weights,
    resident_bytes,
)

Progress = Callable[[int, int], None]
"""Told of bytes loaded and bytes to load."""


def read_model(reader: Reader) -> ModelSpec:
    """The model that the file describes.

    Raises:
        FormatError: `bad-model`, also when the file describes none.
    """
    if MODEL_FILE not in reader.files:
        raise FormatError(
            FormatCode.BAD_MODEL,
            reader.path,
            f"has no embedded file {MODEL_FILE}",
            "a description of its model",
            "repack the source again",
        )
    return parse_model(reader.read_file(MODEL_FILE), f"{reader.path}: {MODEL_FILE}")


def describe_needs(
    reader: Reader, model: ModelSpec, backend: Backend, config: RunConfig
) -> MemoryNeeds:
    """What the model needs of memory with this configuration, which is settled first. Allocates
    nothing.

    Raises:
        ModelError: the file lacks what the model needs, or the backend cannot compute with it.
        UsageError: `bad-context` when the context is longer than the model's own.
    """
    layouts = check_weights(reader, model, backend)
    settled = settle(reader, model, backend, config)
    context = settled.context or 1
    kv_dtype = KV_DTYPE_NAMES[settled.kv_dtype or "f32"]
    census = BlockTable([reader]).census()
    reserve = _reserve(reader, model, layouts, backend, settled)
    return MemoryNeeds(
        where=str(reader.path),
        dense_bytes=resident_bytes(reader.tensors, model, layouts),
        kv_bytes=kv_cache_bytes(model, context, kv_dtype),
        working_bytes=describe_working(
            reader, model, layouts, backend, settled.batch_size or 1, context, kv_dtype
        ),
        index_bytes=index_bytes(reader.index.shape)
        + usage_bytes(
            reader.index.shape,
            is_recalling=config.policy == "recall",
            keeps_history=config.history is not None,
        ),
        census=census,
        top_k=model.moe.top_k if model.moe else 1,
        idle_bytes=reserve.idle_bytes(1, 1),
    )


def _reserve(
    reader: Reader, model: ModelSpec, layouts: Layouts, backend: Backend, settled: RunConfig
) -> Reserve:
    return Reserve(
        model,
        settled.context or 1,
        KV_DTYPE_NAMES[settled.kv_dtype or "f32"],
        describe_untouched(reader, model, layouts, backend, settled.batch_size or 1),
    )


def plan_run(
    needs: MemoryNeeds,
    config: RunConfig,
    available: Callable[[], int | None] = available_bytes,
    *,
    history: History | None = None,
) -> MemoryPlan:
    """How the budget is divided; without one, a budget that suits the machine is chosen.

    `history` tells what share of hits to expect.

    A budget above what is available is kept, and noted in the plan.

    Raises:
        BudgetError: `budget-too-small`.
        UsageError: `no-memory-figure`.
    """
    free = available()
    budget = config.memory_bytes
    if budget is None:
        budget = default_budget(needs, free, io_threads=config.n_io_threads)
    plan = plan_memory(
        budget,
        needs,
        prefetch_depth=config.look_ahead,
        io_threads=config.n_io_threads,
        cache_bytes=config.cache_bytes,
        counts=None if history is None else history.counts(),
    )
    if free is None or plan.total_bytes <= free:
        return plan
    note = (
        f"{format_size(plan.total_bytes)} are planned and only {format_size(free)} of memory "
        "are available: the system may end the run"
    )
    return replace(plan, notes=(*plan.notes, note))


def _nothing() -> None:
    """What a backend that holds nothing needs to be closed."""


class Runtime:
    """A loaded model: `decoder` computes, `store` serves its experts; a context manager.

    Owns reader, store and threads, and gives all back on `close`. One thread uses it.

    Raises:
        ColibriError: from planning (`describe_needs`, `plan_run`), before anything is allocated,
            or from loading.
    """

    def __init__(
        self,
        reader: Reader,
        config: RunConfig,
        *,
        progress: Progress | None = None,
        observer: RoutingObserver | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.reader = reader
        self.config = config
        with ExitStack() as stack:
            stack.callback(reader.close)
            self.model = read_model(reader)
            self.backend = make_backend(config)
            stack.callback(getattr(self.backend, "close", _nothing))
            self.config = config = settle(reader, self.model, self.backend, config)
            self.context = config.context or 1
            needs = describe_needs(reader, self.model, self.backend, config)
            self.history = open_history(reader, config)
            self.plan = plan_run(needs, config, history=self.history)
            file = _Counted(reader, needs.dense_bytes, progress) if progress else reader
            self.weights: Weights = load_weights(file, self.model, self.backend)
            self.kv_cache = KvCache(
                self.model, self.context, KV_DTYPE_NAMES[config.kv_dtype or "f32"]
            )
            self.store = stack.enter_context(
                open_store(reader, self.plan, config, self.history, timeline=timeline)
            )
            layouts = check_weights(reader, self.model, self.backend)
            reserve = _reserve(reader, self.model, layouts, self.backend, config)
            lender = Lender(reserve, self.store, self.kv_cache)
            self.decoder = Decoder(
                self.model,
                self.weights,
                self.store,
                self.backend,
                self.kv_cache,
                config.look_ahead if config.prefetch_from == PrefetchSource.ROUTER else 0,
                batch_size=config.batch_size or 1,
                observer=observer,
                timeline=timeline,
                make_room=lender.make_room if self.plan.n_lent else None,
            )
            self._owned = stack.pop_all()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: RunConfig | None = None,
        *,
        volumes: Sequence[str | os.PathLike[str]] = (),
        progress: Progress | None = None,
        observer: RoutingObserver | None = None,
        timeline: Timeline | None = None,
    ) -> Self:
        """The model in the file `path`, planned and loaded; `volumes` are folders to look for the
        volumes of a striped file in, after its own. `timeline` is told of every read and step."""
        config = config or RunConfig()
        reader = colibri_format.open(path, verify=config.is_verified, volumes=volumes)
        return cls(reader, config, progress=progress, observer=observer, timeline=timeline)

    def save_history(self) -> None:
        """Keeps what was counted, for later runs; does nothing where no history is to be kept.

        Raises:
            StorageError: what the kernel refused; an older history stays as it was.
        """
        if self.history is not None and self.config.history is not None:
            write_history(self.config.history, self.history)

    def close(self) -> None:
        """Ends all reads and gives memory and files back; a second call does nothing."""
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_store(
    reader: Reader,
    plan: MemoryPlan,
    config: RunConfig,
    history: History | None = None,
    *,
    timeline: Timeline | None = None,
) -> Store:
    """The store of the file's blocks with the plan's slots; raises as `open_pool`."""
    return open_pool([reader], plan.slots, config, history=history, timeline=timeline)


def open_history(reader: Reader, config: RunConfig) -> History | None:
    """What was counted in earlier runs, nothing yet where there is no such file, None where no
    history is to be kept.

    Raises:
        FormatError: as `read_history`.
        StorageError: the file cannot be read.
    """
    n_layers, n_experts = reader.index.shape
    if config.history is None or not (n_layers and n_experts):
        return None
    if not config.history.exists():
        return History(reader.uuid, n_layers, n_experts)
    return read_history(config.history, uuid=reader.uuid, n_layers=n_layers, n_experts=n_experts)


class _Counted:
    """A reader whose dense tensors tell how far loading is."""

    def __init__(self, reader: Reader, total: int, progress: Progress) -> None:
        self._reader = reader
        self._total = total
        self._progress = progress
        self._done = 0
        self.path = reader.path
        self.tensors: Any = reader.tensors
        self.index = reader.index
        self.layout = reader.layout
        self.is_mixed = reader.is_mixed
        self.layouts = reader.layouts
        self.expert_layouts = reader.expert_layouts

    def tensor(self, name: str) -> _CountedTensor:
        return _CountedTensor(self._reader.tensor(name), self._tell)

    def _tell(self, facts: TensorFacts) -> None:
        self._done = min(self._total, self._done + facts.size)
        self._progress(self._done, self._total)


class _CountedTensor:
    def __init__(self, tensor: Any, tell: Callable[[Any], None]) -> None:
        self._tensor = tensor
        self._tell = tell

    def read(self) -> NDArray[Any]:
        data: NDArray[Any] = self._tensor.read()
        self._tell(self._tensor)
        return data

    def read_into(self, buffer: Any) -> object:
        result: object = self._tensor.read_into(buffer)
        self._tell(self._tensor)
        return result

    def __getattr__(self, name: str) -> Any:
        """Facts, and reads that load nothing: those of the tensor."""
        return getattr(self._tensor, name)
