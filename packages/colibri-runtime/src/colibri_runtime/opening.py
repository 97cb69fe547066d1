"""A store made ready: its pool, its files opened and proven, its policy and predictor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colibri_format import UsageError

from .blocks import BlockSource, BlockTable
from .config import RunConfig
from .disk import BlockRead
from .disk_choice import open_engine
from .disk_files import BlockFile
from .history import History
from .policies import make_policy
from .policy import Policy
from .pool import Pool
from .pool_plan import PoolPlan, SlotClass
from .prefetch import (
    AUTO_LOOK_AHEAD,
    FrequentExperts,
    LastExperts,
    Predictor,
    PrefetchGate,
    PrefetchSource,
)
from .store import Store
from .timeline import Timeline


def open_pool(
    sources: Sequence[BlockSource],
    plan: PoolPlan,
    config: RunConfig,
    *,
    history: History | None = None,
    timeline: Timeline | None = None,
) -> Store:
    """A store of all blocks of `sources`, with the slots of `plan` and one disk engine.

    Each file is proven with a read of its first block. `history` counts what is asked for; what it
    has counted before tells policy, prefetch and preloading what to expect. Its layers are
    numbered through all sources. `timeline` is told of every read.

    Raises:
        StorageError: a file cannot be opened or has changed; `io-unavailable`; `out-of-memory`.
        UsageError: `no-such-volume`, `bad-slots`, `bad-option`, `bad-history` when it is of other
            layers or experts, `bad-lfu-weight`.
    """
    table = BlockTable(sources)
    if history is not None:
        _check_history(history, table)
    # A policy that cannot be made is told before memory is taken.
    policies = iter([_make_policy(config, table.n_layers, c, history) for c in plan.classes])
    pool = Pool(*plan.shape[0], *plan.shape[1:], n_lent=plan.n_lent)
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
        store = Store(
            sources,
            pool,
            engine,
            plan,
            make_policy=lambda slots: next(policies),
            history=history,
            predictor=_predictor(config, table, history),
            gate=PrefetchGate(AUTO_LOOK_AHEAD) if config.prefetch_depth is None else None,
            timeline=timeline,
        )
    except BaseException:
        engine.close()
        pool.close()
        raise
    if history is not None:
        store.preload(key for key in history.hottest(plan.n_slots) if table.has(*key))
    return store


def _make_policy(
    config: RunConfig, n_layers: int, slots: SlotClass, history: History | None
) -> Policy:
    # Slots shared by all layers gave more hits than slots of their own with every policy but LRU,
    # which keeps nothing at all once a token's blocks outnumber the slots.
    quotas = slots.plan.quotas if config.policy == "lru" else None
    return make_policy(
        config.policy,
        n_layers=n_layers,
        n_slots=slots.plan.n_slots,
        n_blocks=slots.n_blocks,
        quotas=quotas,
        lfu_weight=config.lfu_weight,
        shares=None if history is None else history.shares(),
    )


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


def _check_history(history: History, table: BlockTable) -> None:
    found = (history.n_layers, history.n_experts)
    required = (table.n_layers, table.most_experts)
    if found != required:
        raise UsageError(
            "bad-history",
            "history",
            f"counts {found[0]} layers of {found[1]} experts",
            f"the {required[0]} layers of {required[1]} that there are",
        )


def _predictor(config: RunConfig, table: BlockTable, history: History | None) -> Predictor | None:
    match config.prefetch_from:
        case PrefetchSource.LAST:
            return LastExperts()
        case PrefetchSource.HISTORY:
            if history is None:
                return FrequentExperts(np.zeros((table.n_layers, table.most_experts)))
            return FrequentExperts(history.counts())
        case _:
            return None
