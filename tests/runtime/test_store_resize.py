"""Slots that are lent to a store: taken, given up with their blocks, and their memory with them."""

from dataclasses import replace

import numpy as np
import pytest

import colibri_runtime.store as store_module
from colibri_format import UsageError
from colibri_runtime._native import native
from colibri_runtime.blocks import BlockTable
from colibri_runtime.config import RunConfig
from colibri_runtime.native_core import native_core
from colibri_runtime.opening import open_pool
from colibri_runtime.pool import Pool, can_give_back
from colibri_runtime.pool_plan import plan_pool, pool_cost
from helpers.blocks import ask, make_source, small_layout

N_SLOTS, N_LENT = 6, 4
CORES = ["plain", pytest.param("native", marks=pytest.mark.skipif(
    native().library is None, reason="no C library"))]  # fmt: skip


@pytest.fixture(params=CORES)
def core(request, monkeypatch):
    made = native_core if request.param == "native" else lambda *arguments: None
    monkeypatch.setattr(store_module, "native_core", made)
    return request.param


@pytest.fixture
def source(tmp_path):
    layouts = [small_layout(), small_layout(10, 20), small_layout()]
    return make_source(tmp_path / "a.colibri", layouts=layouts, n_experts=8)


def open_store(source, policy="recall", n_lent=N_LENT, io="auto"):
    config = RunConfig(io=io, policy=policy, prefetch_depth=1)
    census = BlockTable([source]).census()
    largest = max(size for layer in census for size in layer)
    plan = plan_pool(pool_cost(N_SLOTS, largest), census, top_k=2, max_classes=1)
    assert plan.n_slots == N_SLOTS
    return open_pool([source], replace(plan, n_lent=n_lent), config)


@pytest.fixture
def store(core, source):
    with open_store(source) as store:
        yield store


def fill(source, store):
    """Asks for more blocks than there are slots."""
    for layer in range(3):
        for first in range(0, 8, 2):
            ask(source, store, layer, [first, first + 1])


def test_a_store_begins_with_the_slots_that_were_planned(store, source):
    fill(source, store)

    assert store.n_open == store.cache.n_resident == N_SLOTS
    assert max(store.cache.owners()) == N_SLOTS - 1
    assert not np.concatenate([store.pool.view(N_SLOTS + i) for i in range(N_LENT)]).any()


def test_slots_that_are_lent_keep_blocks_and_are_given_up_with_them(store, source):
    store.resize(N_SLOTS + N_LENT)
    fill(source, store)
    before = store.cache.owners()
    assert store.cache.n_resident == N_SLOTS + N_LENT

    store.resize(N_SLOTS + 1)

    assert store.cache.owners() == {s: k for s, k in before.items() if s <= N_SLOTS}
    assert store.cache.n_free == 0
    fill(source, store)
    assert store.cache.n_resident == N_SLOTS + 1


@pytest.mark.skipif(not can_give_back(), reason="this system takes no memory back")
def test_the_memory_of_slots_that_were_given_up_is_given_back(store, source):
    store.resize(N_SLOTS + N_LENT)
    fill(source, store)
    assert all(store.pool.view(slot).any() for slot in range(N_SLOTS + N_LENT))

    store.resize(N_SLOTS)

    assert all(store.pool.view(slot).any() for slot in range(N_SLOTS))
    assert not any(store.pool.view(N_SLOTS + i).any() for i in range(N_LENT))
    fill(source, store)


def test_slots_that_are_free_come_and_go(store, source):
    for n_open in (N_SLOTS + N_LENT, N_SLOTS + 1, N_SLOTS + 3, N_SLOTS):
        store.resize(n_open)
        assert store.cache.n_free == store.n_open == n_open
    ask(source, store, 0, [1, 2])
    assert store.cache.n_resident == 2


def test_reads_into_slots_that_are_given_up_are_waited_for(store, source):
    for step in range(20):
        store.resize(N_SLOTS + N_LENT)
        fill(source, store)
        store.prefetch(step % 3, [step % 8, (step + 3) % 8])
        store.resize(N_SLOTS)
        owners = store.cache.owners()
        assert max(owners) < N_SLOTS
        assert store.cache.n_free + store.cache.n_resident + store.cache.n_loading == N_SLOTS
        ask(source, store, step % 3, [step % 8, (step + 5) % 8])


def test_what_is_read_for_a_fetch_that_was_left_is_waited_for(store, source):
    store.resize(N_SLOTS + N_LENT)
    fill(source, store)
    for step in range(10):
        store.fetch(0, [step % 8, (step + 1) % 8, (step + 4) % 8]).close()
        store.resize(N_SLOTS)
        assert max(store.cache.owners(), default=-1) < N_SLOTS
        store.resize(N_SLOTS + N_LENT)
    fill(source, store)


@pytest.mark.parametrize("policy", ["lru", "lfu", "hybrid", "cadence"])
def test_any_policy_gets_on_with_slots_that_come_and_go(core, source, policy):
    with open_store(source, policy) as store:
        for n_more in (4, 0, 2, 1, 4, 0):
            store.resize(N_SLOTS + n_more)
            fill(source, store)
            assert store.cache.n_resident == N_SLOTS + n_more


def test_numbers_that_were_not_planned_are_refused(store):
    for n_open in (N_SLOTS - 1, N_SLOTS + N_LENT + 1, -1):
        with pytest.raises(UsageError) as caught:
            store.resize(n_open)
        assert caught.value.code == "bad-slots"
        assert "6 to 10" in str(caught.value)


def test_an_open_fetch_keeps_its_slots(store, source):
    fetch = store.fetch(1, [0, 1])
    with pytest.raises(UsageError) as caught:
        store.resize(N_SLOTS + 1)
    assert caught.value.code == "fetch-open"
    fetch.close()

    store.resize(N_SLOTS + 1)

    store.close()
    with pytest.raises(UsageError) as caught:
        store.resize(N_SLOTS)
    assert caught.value.code == "store-closed"


@pytest.mark.skipif(native().library is None, reason="no C library")
@pytest.mark.parametrize("policy", ["recall", "cadence"])
def test_both_cores_keep_the_same_blocks_while_slots_come_and_go(source, monkeypatch, policy):
    found = []
    for made in (native_core, lambda *arguments: None):
        monkeypatch.setattr(store_module, "native_core", made)
        rng = np.random.default_rng(5)
        history = []
        with open_store(source, policy) as store:
            for step in range(200):
                if step % 9 == 0:
                    store.resize(N_SLOTS + int(rng.integers(0, N_LENT + 1)))
                experts = np.unique(np.minimum(rng.geometric(0.3, 3) - 1, 7))
                with store.fetch(step % 3, experts) as fetch:
                    while fetch.take():
                        pass
                cache = store.cache
                history.append((sorted(cache.owners().values()), cache.n_evicted, cache.n_free))
        found.append(history)

    assert found[0] == found[1]


def test_a_pool_that_registers_what_is_lent_is_refused(source):
    config = RunConfig(prefetch_depth=1)
    census = BlockTable([source]).census()
    largest = max(size for layer in census for size in layer)
    plan = plan_pool(pool_cost(N_SLOTS, largest), census, top_k=2, max_classes=1)
    lending = replace(plan, n_lent=N_LENT)
    with open_pool([source], plan, config) as store, pytest.raises(UsageError) as caught:
        store_module.Store(source, Pool(*lending.shape[0]), store._engine, lending)
    assert caught.value.code == "bad-slots"
    assert "4 of them lent" in str(caught.value)


def test_a_resize_that_is_broken_off_can_be_made_again(source, monkeypatch):
    monkeypatch.setattr(store_module, "native_core", lambda *arguments: None)
    with open_store(source) as store:
        cache = store.cache
        leave, n_left = cache._leave, [0]

        def broken_off(key):
            n_left[0] += 1
            if n_left[0] == 2:
                raise KeyboardInterrupt
            return leave(key)

        store.resize(N_SLOTS + N_LENT)
        fill(source, store)
        monkeypatch.setattr(cache, "_leave", broken_off)
        with pytest.raises(KeyboardInterrupt):
            store.resize(N_SLOTS)
        monkeypatch.undo()
        store.resize(N_SLOTS)
        for n_more in (N_LENT, 1, N_LENT):
            store.resize(N_SLOTS + n_more)
            free = cache._free[-1]
            assert len(set(free)) == len(free)
            assert not set(free) & set(cache.owners())
            assert cache.n_free + cache.n_resident + cache.n_loading == store.n_open


def test_growth_that_is_broken_off_is_never_more_than_the_store_knows(core, source, monkeypatch):
    with open_store(source) as store:
        resize = store._core.resize

        def broken_off(n_open):
            resize(n_open)
            raise KeyboardInterrupt

        monkeypatch.setattr(store._core, "resize", broken_off)
        with pytest.raises(KeyboardInterrupt):
            store.resize(N_SLOTS + N_LENT)
        monkeypatch.undo()
        assert store.cache.n_free <= store.n_open
        store.resize(N_SLOTS)
        assert store.cache.n_free == N_SLOTS
