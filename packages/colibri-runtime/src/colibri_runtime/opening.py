"""A store made ready: its pool, its files opened and proven, its policy and predictor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .blocks import BlockSource, BlockTable
from .config import RunConfig
from .disk import BlockRead
from .disk_choice import open_engine
from .disk_files import BlockFile
from .policy import Policy
from .pool import Pool
from .pool_plan import PoolPlan, SlotClass
from .prefetch import FrequentExperts, LastExperts, Predictor, PrefetchGate, PrefetchSource
from .store import Store


def open_pool(
    sources: Sequence[BlockSource],
    plan: PoolPlan,
    config: RunConfig,
    *,
    counts: NDArray[np.floating] | None = None,
    make_policy: Callable[[SlotClass], Policy] | None = None,
) -> Store:
    """A store of all blocks of `sources`, with the slots of `plan` and one disk engine.

    Each file is proven with a read of its first block. `counts[layer, expert]`, how often each was
    asked for in the past, is what prefetch by history begins with; layers are numbered through
    all sources.

    Raises:
        StorageError: a file cannot be opened or has changed; `io-unavailable`; `out-of-memory`.
        UsageError: `no-such-volume`, `bad-slots`, `bad-option`.
    """
    table = BlockTable(sources)
    pool = Pool(*plan.shape[0], *plan.shape[1:])
    try:
        engine = open_engine(
            config.io,
            _files(table, plan, pool),
            arena=pool.arena,
            depth=config.io_depth,
            n_threads=config.io_threads,
            direct=config.is_direct,
            is_verified=config.is_verified,
        )
    except BaseException:
        pool.close()
        raise
    try:
        return Store(
            sources,
            pool,
            engine,
            plan,
            make_policy=make_policy,
            predictor=_predictor(config, table, counts),
            gate=PrefetchGate() if config.prefetch_depth is None else None,
        )
    except BaseException:
        engine.close()
        pool.close()
        raise


def _files(table: BlockTable, plan: PoolPlan, pool: Pool) -> list[BlockFile]:
    """Every file with a block to prove it by, planned into a slot that holds it."""
    files = []
    for file, place in zip(table.files, table.first_of_each_file(), strict=True):
        probe: BlockRead | None = None
        if place is not None:
            number = plan.class_of_bytes(table.padded_bytes(*place))
            slot = sum(n_slots for n_slots, _ in plan.shape[:number])
            probe = table.plan_read(*place, slot=slot, buffer=pool.slot(slot))
            probe.address = pool.addresses[slot]
        files.append(BlockFile(file.path, probe, file.file_size))
    return files


def _predictor(
    config: RunConfig, table: BlockTable, counts: NDArray[np.floating] | None
) -> Predictor | None:
    match config.prefetch_from:
        case PrefetchSource.LAST:
            return LastExperts()
        case PrefetchSource.HISTORY:
            shape = (table.n_layers, table.most_experts)
            if counts is None:
                return FrequentExperts(np.zeros(shape))
            if np.shape(counts) != shape:
                raise UsageError(
                    "bad-history",
                    "history",
                    f"counts of {np.shape(counts)} layers and experts",
                    f"the model's {shape}",
                )
            return FrequentExperts(counts)
        case _:
            return None
