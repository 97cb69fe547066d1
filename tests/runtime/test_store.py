"""Leases, rounds, prefetch and accounting of the store, over engines real and fake."""

import gc
import os
import threading
import weakref

import numpy as np
import pytest

from colibri_format import FormatError, StorageError, UsageError
from colibri_runtime.blocks import block_slot_bytes
from colibri_runtime.disk_files import open_blocks
from colibri_runtime.disk_threads import ThreadsEngine
from colibri_runtime.errors import BudgetError
from colibri_runtime.policies import POLICY_NAMES, make_policy
from colibri_runtime.policy_lru import LayerLru
from colibri_runtime.pool import Pool
from colibri_runtime.pool_plan import PoolPlan, SlotClass, equal_slots
from colibri_runtime.slots import SlotPlan
from colibri_runtime.store import Store
from helpers.blocks import (
    StepEngine,
    ask,
    assert_lease_is_right,
    assert_nothing_is_held,
    counts,
    make_source,
    small_layout,
)

LAYOUTS = [small_layout(), small_layout(10, 20), small_layout(), small_layout()]


def make_plan(source, n_slots, *, top_k=2, prefetch_depth=1):
    counts = [int(n) for n in (source.index["size"] > 0).sum(axis=1)]
    return equal_slots(block_slot_bytes(source), counts, n_slots, top_k, prefetch_depth)


def step_store(n_slots, *, n_experts=4, layouts=LAYOUTS, plan=None, absent=(), **options):
    """A store over an engine that the test steps; gives source, engine and store."""
    source = make_source(layouts=layouts, n_experts=n_experts, absent=absent)
    engine = StepEngine(source)
    if plan is None:
        plan = make_plan(source, n_slots, **options)
    elif isinstance(plan, SlotPlan):
        plan = PoolPlan(
            (SlotClass(block_slot_bytes(source), (n_experts,) * len(layouts), plan),), 2, 1
        )
    store = Store(source, Pool(plan.n_slots, block_slot_bytes(source)), engine, plan)
    return source, engine, store


def file_store(path, n_slots, *, read=os.preadv, n_experts=4, **options):
    source = make_source(path, layouts=LAYOUTS, n_experts=n_experts)
    file = open_blocks(path, probe=None, direct=False)
    engine = ThreadsEngine([file], read=read, sleep=lambda seconds: None)
    plan = make_plan(source, n_slots, **options)
    return source, Store(source, Pool(n_slots, block_slot_bytes(source)), engine, plan)


# Leases


@pytest.mark.parametrize("n_slots", [1, 2, 3, 5, 16])
def test_every_expert_comes_once_with_its_own_bytes(tmp_path, n_slots):
    source, store = file_store(tmp_path / "a.colibri", n_slots)

    with store:
        for _ in range(2):
            for layer in range(4):
                assert sorted(ask(source, store, layer, [3, 0, 2, 1, 0])) == [0, 1, 2, 3]
        assert_nothing_is_held(store)


def test_misses_are_submitted_at_the_call():
    _, engine, store = step_store(8)

    leases = store.fetch(1, [2, 0])

    assert engine.submitted == [(1, 2, False), (1, 0, False)]
    leases.close()


def test_residents_come_first():
    source, _, store = step_store(16)
    ask(source, store, 0, [3])

    assert ask(source, store, 0, [1, 3, 2]) == [3, 1, 2]


def test_what_arrives_first_is_given_first():
    _, engine, store = step_store(8)
    leases = store.fetch(0, [0, 1, 2])
    engine.begin()
    engine.begin()
    engine.begun.reverse()

    assert [lease.expert for lease in leases] == [1, 0, 2]


def test_nothing_wanted_gives_nothing():
    source, _, store = step_store(2)

    assert ask(source, store, 0, []) == []


def test_more_than_the_pool_holds_comes_in_rounds():
    source, engine, store = step_store(2)
    leases = store.fetch(0, [0, 1, 2, 3])
    assert len(engine.submitted) == 2

    seen = []
    for lease in leases:
        assert_lease_is_right(source, lease)
        seen.append(lease.expert)

    assert seen == [0, 1, 2, 3]
    assert_nothing_is_held(store)


def test_a_leased_block_stays_while_others_come_and_go():
    source, _, store = step_store(3)
    leases = store.fetch(0, [0])
    lease = next(leases)

    store.prefetch(1, [0, 1, 2, 3])
    store.prefetch(2, [0, 1, 2, 3])

    assert_lease_is_right(source, lease)
    leases.close()


def test_closing_early_gives_all_back_and_calls_queued_reads_off():
    source, engine, store = step_store(8)
    leases = store.fetch(0, [0, 1, 2])
    next(leases)

    leases.close()

    assert not engine.demands
    assert_nothing_is_held(store)
    assert sorted(ask(source, store, 0, [0, 1, 2])) == [0, 1, 2]
    assert counts(store, 0) == (1, 0, 5)


def test_closing_before_the_first_lease_gives_all_back():
    source, engine, store = step_store(4)
    ask(source, store, 0, [0])

    store.fetch(0, [0, 1]).close()

    assert not engine.demands
    assert_nothing_is_held(store)


def test_a_dropped_iterator_is_closed():
    _, _, store = step_store(4)
    for _ in store.fetch(0, [0, 1]):
        break

    gc.collect()

    assert_nothing_is_held(store)
    store.fetch(0, [0]).close()


def test_a_read_under_way_when_its_fetch_is_closed_lands_for_later():
    source, engine, store = step_store(16)
    leases = store.fetch(0, [0, 1])
    engine.begin()
    leases.close()

    assert ask(source, store, 0, [0]) == [0]
    assert counts(store, 0) == (0, 1, 2)
    assert ask(source, store, 0, [0]) == [0]
    assert counts(store, 0) == (1, 1, 2)


def test_a_second_fetch_beside_an_open_one_is_refused():
    _, _, store = step_store(4)
    leases = store.fetch(0, [0])

    with pytest.raises(UsageError) as caught:
        store.fetch(1, [0])

    assert caught.value.code == "fetch-open"
    leases.close()


# Taking what is ready at once


def test_take_gives_all_that_is_resident_then_what_arrives():
    source, engine, store = step_store(16)
    ask(source, store, 0, [1, 3])
    with store.fetch(0, [0, 1, 2, 3]) as fetch:
        taken = [[lease.expert for lease in fetch.take()]]
        engine.finish(2)
        taken.append([lease.expert for lease in fetch.take()])

        assert taken == [[1, 3], [0, 2]]
        assert fetch.take() == []
        assert fetch.take() == []
    assert_nothing_is_held(store)


def test_all_that_was_taken_stays_leased_until_the_next_take():
    source, engine, store = step_store(3, prefetch_depth=0)
    fetch = store.fetch(0, [0, 1, 2, 3])
    engine.finish(3)

    taken = fetch.take()

    assert store.cache.n_pinned == 3
    for lease in taken:
        assert_lease_is_right(source, lease)
    assert [lease.expert for lease in fetch.take()] == [3]
    assert store.cache.n_pinned == 1
    fetch.close()
    assert_nothing_is_held(store)


def test_steps_and_takes_may_be_mixed():
    source, _, store = step_store(16)
    ask(source, store, 0, [0, 1, 2])
    fetch = store.fetch(0, [0, 1, 2])

    first = next(fetch)
    rest = fetch.take()

    assert [first.expert, *(lease.expert for lease in rest)] == [0, 1, 2]
    assert store.cache.n_pinned == 2
    assert list(fetch) == []


def test_a_fetch_that_ended_cannot_end_the_next():
    _, _, store = step_store(16)
    old = store.fetch(0, [0])
    old.close()
    new = store.fetch(0, [1])

    old.close()
    assert list(old) == []
    assert old.take() == []
    del old

    assert [lease.expert for lease in new] == [1]


def test_a_lease_keeps_what_is_put_beside_it_while_its_block_stays():
    source, _, store = step_store(2, n_experts=4, top_k=1, prefetch_depth=0)
    for lease in store.fetch(0, [0]):
        lease.cache = "prepared"
    assert [lease.cache for lease in store.fetch(0, [0])] == ["prepared"]

    ask(source, store, 1, [0])
    ask(source, store, 2, [0])

    assert [lease.cache for lease in store.fetch(0, [0])] == [None]


# Being called


def test_a_callback_is_given_each_block_in_order_of_arrival_in_the_callers_thread():
    source, _, store = step_store(16)
    ask(source, store, 0, [2])
    seen = []

    def compute(lease):
        assert_lease_is_right(source, lease)
        assert store.cache.n_pinned >= 1
        seen.append((lease.expert, threading.current_thread()))

    store.on_ready(compute)
    fetch = store.fetch(0, [0, 1, 2])
    store.prefetch(1, [0])

    assert fetch.run() == 3
    assert seen == [(expert, threading.main_thread()) for expert in (2, 0, 1)]
    assert_nothing_is_held(store)


def test_a_callback_that_raises_ends_the_fetch():
    source, _, store = step_store(16)

    def fail(lease):
        raise RuntimeError("kernel")

    store.on_ready(fail)
    with pytest.raises(RuntimeError, match="kernel"):
        store.fetch(0, [0, 1]).run()

    assert_nothing_is_held(store)
    assert sorted(ask(source, store, 0, [0, 1])) == [0, 1]


def test_running_without_a_callback_is_refused():
    _, _, store = step_store(4)
    store.on_ready(print)
    store.on_ready(None)
    fetch = store.fetch(0, [0])

    with pytest.raises(UsageError) as caught:
        fetch.run()

    assert caught.value.code == "no-callback"
    fetch.close()


@pytest.mark.parametrize(("layer", "expert"), [(0, 4), (0, -1), (4, 0), (-1, 0), (1, 2)])
def test_an_expert_that_is_not_there_is_refused(layer, expert):
    source, engine, store = step_store(4, absent={(1, 2)})

    for call in (store.fetch, store.prefetch):
        with pytest.raises(UsageError) as caught:
            call(layer, [expert])

        assert caught.value.code == "no-such-expert"
    assert engine.submitted == []
    assert ask(source, store, 0, [0]) == [0]


def test_a_layer_without_experts_is_refused():
    _, _, store = step_store(4, layouts=[None, small_layout()])

    with pytest.raises(UsageError) as caught:
        store.fetch(0, [0])

    assert caught.value.code == "no-such-expert"


def test_a_closed_store_says_so():
    _, engine, store = step_store(4)
    leases = store.fetch(0, [0, 1])
    next(leases)
    store.close()
    store.close()

    assert engine.is_closed
    for call in (lambda: next(leases), lambda: store.fetch(0, [0]), lambda: store.prefetch(0, [0])):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == "store-closed"


def test_a_closed_store_that_is_held_lets_go_of_its_pools_memory(tmp_path):
    source, store = file_store(tmp_path / "f", 4)
    ask(source, store, 0, [0, 1])
    memory = weakref.ref(store.pool._map)
    store.close()
    gc.collect()
    assert memory() is None


def test_a_pool_smaller_than_its_plan_is_refused():
    source = make_source(layouts=LAYOUTS, n_experts=4)
    plan = make_plan(source, 4)

    for pool in (Pool(3, block_slot_bytes(source)), Pool(4, 4096)):
        with pytest.raises(UsageError) as caught:
            Store(source, pool, StepEngine(source), plan)
        assert caught.value.code == "bad-slots"


def observed_store(told):
    class Curious(LayerLru):
        def observe(self, layer, experts, weights=None):
            told.append((layer, experts, weights))

    source = make_source(layouts=LAYOUTS, n_experts=4)
    plan = make_plan(source, 4)
    pool = Pool(4, block_slot_bytes(source))
    return Store(
        source, pool, StepEngine(source), plan, make_policy=lambda c: Curious(c.plan.quotas)
    )


def test_policies_are_told_how_tokens_were_routed():
    told = []
    store = observed_store(told)

    store.observe(1, np.array([[2, 0]]), np.array([[0.75, 0.25]]))
    store.fetch(1, [0, 2]).close()
    store.observe(2, np.array([[3, 1], [1, 0]]), np.array([[0.5, 0.25], [0.75, 0.25]]))
    store.fetch(2, [0, 1, 3]).close()

    assert told == [(1, [2, 0], [0.75, 0.25]), (2, [0, 1, 3], [0.25, 1.0, 0.5])]


def test_policies_are_told_of_each_fetch_without_routing_too():
    told = []
    store = observed_store(told)

    for _ in range(2):
        store.fetch(1, [3, 1, 3]).close()

    assert told == [(1, [3, 1], None)] * 2


def test_where_every_block_has_a_slot_no_policy_is_asked_and_in_the_end_nothing_read_ahead():
    made = []
    source = make_source(layouts=LAYOUTS, n_experts=4)
    plan = make_plan(source, 16)
    pool = Pool(plan.n_slots, block_slot_bytes(source))
    store = Store(source, pool, StepEngine(source), plan, make_policy=made.append)
    before = store.look_ahead
    for layer in range(4):
        assert sorted(ask(source, store, layer, range(4))) == [0, 1, 2, 3]

    assert made == []
    assert (before, store.look_ahead) == (1, 0)
    assert store.cache.n_resident == 16


def test_a_fetch_that_fails_as_it_opens_is_closed(monkeypatch):
    source, engine, store = step_store(4)

    def fail():
        raise StorageError("io", "engine", "its queue is gone", "a queue")

    monkeypatch.setattr(engine, "poll", fail)
    with pytest.raises(StorageError):
        store.fetch(0, [0, 1])
    monkeypatch.undo()

    assert_nothing_is_held(store)
    assert sorted(ask(source, store, 1, [2, 3])) == [2, 3]


def test_a_policy_that_gives_nothing_up_is_an_error_and_no_hang():
    class Miser:
        def pin(self, key): ...
        def release(self, key): ...
        def admit(self, key): ...
        def touch(self, key): ...
        def expire(self, key): ...
        def observe(self, layer, experts, weights=None): ...
        def victim(self, *, is_prefetch):
            return None

    source = make_source(layouts=LAYOUTS, n_experts=4)
    pool = Pool(1, block_slot_bytes(source))
    store = Store(
        source, pool, StepEngine(source), make_plan(source, 1), make_policy=lambda slots: Miser()
    )
    ask(source, store, 0, [0])

    with pytest.raises(UsageError) as caught:
        ask(source, store, 0, [1])

    assert caught.value.code == "no-slot"


# Prefetch


def test_a_block_read_ahead_is_a_hit():
    source, engine, store = step_store(16)
    store.prefetch(1, [2, 3])
    engine.finish(2)

    assert sorted(ask(source, store, 1, [2, 3])) == [2, 3]
    stats = store.stats.layers[1]
    assert counts(store, 1) == (2, 0, 0)
    assert (stats.n_prefetched, stats.n_prefetch_used) == (2, 2)
    assert stats.demand_bytes == 0
    assert stats.prefetch_bytes > 0
    assert stats.recall == 1


def test_a_block_still_being_read_ahead_is_late_and_goes_to_the_front():
    source, engine, store = step_store(16, prefetch_depth=2)
    store.prefetch(1, [0])
    store.prefetch(2, [0])
    leases = store.fetch(2, [0])

    assert [(read.layer, read.expert) for read in engine.demands] == [(2, 0)]
    assert [lease.expert for lease in leases] == [0]
    assert counts(store, 2) == (0, 1, 0)
    assert store.stats.layers[2].n_prefetch_used == 1
    assert store.stats.layers[2].prefetch_bytes > 0
    assert ask(source, store, 1, [0]) == [0]


def test_a_stale_prefetch_that_has_not_begun_is_cancelled():
    source, engine, store = step_store(16)
    store.prefetch(1, [0, 1])

    assert ask(source, store, 1, [1]) == [1]

    assert not engine.prefetches
    assert store.stats.layers[1].n_prefetch_cancelled == 1
    assert (1, 0, False) not in engine.submitted


def test_a_changed_prediction_calls_the_former_off():
    _, engine, store = step_store(16)
    store.prefetch(1, [0, 1])

    store.prefetch(1, [1, 2])

    assert [read.expert for read in engine.prefetches] == [1, 2]


def test_a_prefetch_never_takes_a_slot_from_an_open_demand():
    _, engine, store = step_store(2)
    leases = store.fetch(0, [0, 1, 2])

    store.prefetch(1, [0])

    assert not engine.prefetches
    assert store.stats.layers[1].n_prefetch_dropped == 1
    leases.close()


def test_a_demand_takes_the_slot_of_a_queued_prefetch():
    source, engine, store = step_store(2)
    ask(source, store, 0, [0])
    store.prefetch(1, [0])
    assert len(engine.prefetches) == 1

    assert sorted(ask(source, store, 0, [1, 2, 3])) == [1, 2, 3]

    assert store.stats.layers[1].n_prefetch_cancelled == 1


def test_a_demand_waits_for_a_prefetch_that_has_begun_and_takes_its_slot():
    plan = SlotPlan(n_slots=1, quotas=(0, 0, 0, 0), n_transit=1, n_prefetch=1)
    source, engine, store = step_store(1, plan=plan)
    store.prefetch(1, [0])
    engine.begin()

    assert ask(source, store, 0, [3]) == [3]

    stats = store.stats.layers[1]
    assert (stats.n_prefetched, stats.n_prefetch_wasted) == (1, 1)
    assert stats.wasted_bytes == stats.prefetch_bytes
    assert store.stats.layers[0].stall_ns > 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_reading_ahead_evicts_nothing_that_is_in_use_or_foreseen(policy):
    source = make_source(layouts=LAYOUTS, n_experts=4)
    engine = StepEngine(source)
    n_slots = 4
    plan = SlotPlan(n_slots=n_slots, quotas=(0, 0, 0, 0), n_transit=4, n_prefetch=4)
    plan = PoolPlan((SlotClass(block_slot_bytes(source), (4,) * 4, plan),), 2, 1)
    store = Store(
        source,
        Pool(n_slots, block_slot_bytes(source)),
        engine,
        plan,
        make_policy=lambda c: make_policy(
            policy,
            n_layers=4,
            n_slots=n_slots,
            quotas=c.plan.quotas if policy == "lru" else None,
        ),
    )
    ask(source, store, 1, [0, 1])
    ask(source, store, 3, [0])
    leases = store.fetch(0, [2])
    lease = next(leases)
    store.prefetch(1, [0, 1])

    store.prefetch(2, [0, 1, 2, 3])
    engine.finish(4)
    store.prefetch(2, [0, 1, 2, 3])

    assert_lease_is_right(source, lease)
    assert (1, 0) in store.cache
    assert (1, 1) in store.cache
    leases.close()


def test_prefetches_are_bounded():
    _, engine, store = step_store(12, top_k=2, prefetch_depth=1)

    store.prefetch(1, [0, 1, 2, 3])
    engine.finish(2)
    store.prefetch(2, [0])

    assert len([s for s in engine.submitted if s[2]]) == store.slots.n_prefetch
    assert store.stats.layers[2].n_prefetch_dropped == 1


def test_blocks_read_ahead_in_vain_do_not_end_prefetching():
    source, engine, store = step_store(16, top_k=1)
    for _ in range(3):
        for layer in range(4):
            store.prefetch(layer, [0])
            engine.finish(4)
            ask(source, store, layer, [1])

    assert store.stats.total().n_prefetch_dropped == 0


def test_without_look_ahead_nothing_is_prefetched():
    _, engine, store = step_store(8, prefetch_depth=0)

    store.prefetch(1, [0, 1])

    assert engine.submitted == []


def test_recall_compares_predicted_with_wanted():
    source, _, store = step_store(16)
    store.prefetch(0, [0, 1])
    ask(source, store, 0, [1, 2])
    ask(source, store, 1, [0])

    total = store.stats.total()
    assert (total.n_predicted, total.n_foretold, total.n_recalled) == (2, 2, 1)
    assert total.recall == 0.5


def test_a_dense_model_streams_layer_by_layer_with_two_slots():
    source, engine, store = step_store(2, n_experts=1, layouts=[small_layout()] * 6, top_k=1)
    for _ in range(2):
        for layer in range(6):
            for lease in store.fetch(layer, [0]):
                store.prefetch((layer + 1) % 6, [0])
                engine.finish(1)
                assert_lease_is_right(source, lease)

    total = store.stats.total()
    assert (total.n_hits, total.n_misses) == (11, 1)
    assert total.n_prefetch_dropped == 0


# Failures


def test_a_failed_demand_raises_and_gives_its_slot_back():
    source, engine, store = step_store(2)
    engine.fail.add((0, 1))

    with pytest.raises(OSError, match="Input/output"):
        ask(source, store, 0, [0, 1, 2])

    assert_nothing_is_held(store)
    assert sorted(ask(source, store, 0, [0, 1, 2, 3])) == [0, 1, 2, 3]


def test_a_failure_seen_while_a_hit_is_leased_is_not_lost():
    source, engine, store = step_store(8)
    ask(source, store, 0, [0])
    engine.fail.add((0, 1))
    leases = store.fetch(0, [0, 1])
    next(leases)
    engine.finish()
    store.prefetch(1, [0])

    with pytest.raises(OSError, match="Input/output"):
        next(leases)


def test_a_failed_prefetch_is_counted_forgotten_and_read_again_on_demand():
    source, engine, store = step_store(8)
    engine.fail.add((1, 0))
    store.prefetch(1, [0])
    engine.finish()

    assert ask(source, store, 1, [0]) == [0]

    assert store.stats.layers[1].n_prefetch_failed == 1
    assert counts(store, 1) == (0, 0, 1)
    assert_nothing_is_held(store)


def test_a_prefetch_that_was_given_up_on_its_way_frees_its_slot():
    source, engine, store = step_store(8)
    store.prefetch(1, [0])
    engine.begin()
    engine.cut.add((1, 0))
    ask(source, store, 1, [1])

    engine.finish()
    ask(source, store, 1, [2])

    stats = store.stats.layers[1]
    assert (stats.n_prefetch_cancelled, stats.n_prefetch_failed) == (1, 0)
    assert stats.prefetch_bytes == 4096
    assert_nothing_is_held(store)


@pytest.mark.parametrize("is_prefetch", [True, False])
def test_a_read_that_was_given_up_and_is_wanted_after_all_begins_again(is_prefetch):
    source, engine, store = step_store(8)
    if is_prefetch:
        store.prefetch(1, [0])
        engine.begin()
    else:
        with store.fetch(1, [0]):
            engine.begin()
    engine.cut.add((1, 0))

    assert ask(source, store, 1, [0]) == [0]
    assert_nothing_is_held(store)


def test_a_late_prefetch_that_fails_is_read_again():
    source, engine, store = step_store(8)
    engine.fail.add((1, 0))
    store.prefetch(1, [0])
    engine.begin()

    assert ask(source, store, 1, [0]) == [0]

    assert counts(store, 1) == (0, 1, 0)
    assert engine.submitted == [(1, 0, True), (1, 0, False)]


def test_a_late_prefetch_that_fails_twice_raises(tmp_path):
    def read(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    _, store = file_store(tmp_path / "a.colibri", 8, read=read)
    with store:
        store.prefetch(1, [0])

        with pytest.raises(StorageError) as caught:
            list(store.fetch(1, [0]))

    assert caught.value.code == "io-error"


def test_no_slot_is_lost_to_failures(tmp_path):
    calls = []

    def read(fd, buffers, offset):
        calls.append(offset)
        if len(calls) % 3 == 0:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    source, store = file_store(tmp_path / "a.colibri", 3, read=read)
    with store:
        n_failed = 0
        for _ in range(20):
            for layer in range(4):
                try:
                    store.prefetch((layer + 1) % 4, [0, 1])
                    ask(source, store, layer, [0, 1, 2, 3])
                except StorageError:
                    n_failed += 1
                assert_nothing_is_held(store)
        assert n_failed > 10


def test_a_flipped_bit_stops_the_fetch(tmp_path):
    source, store = file_store(tmp_path / "a.colibri", 8)
    with open(source.path, "r+b") as file:
        file.seek(int(source.index[2, 1]["offset"]) + 77)
        file.write(bytes([int(source.payload[2, 1][77]) ^ 1]))
    with store:
        with pytest.raises(FormatError) as caught:
            ask(source, store, 2, [0, 1])

        assert caught.value.code == "block-checksum"
        assert "L2/E1" in str(caught.value)
        assert store.stats.layers[2].n_rereads == 1
        assert ask(source, store, 2, [0]) == [0]


def test_a_file_cut_while_open_is_a_short_read(tmp_path):
    source, store = file_store(tmp_path / "a.colibri", 8)
    os.truncate(source.path, int(source.index[3, 3]["offset"]) + 4097)
    with store:
        with pytest.raises(StorageError) as caught:
            ask(source, store, 3, [3])

        assert caught.value.code == "short-read"


# Accounting


def test_a_plan_for_another_budget_changes_nothing():
    source, _, store = step_store(4)
    ask(source, store, 0, [0, 1])
    counts = np.ones((4, 4))

    plan = store.plan(12 * 20_000, counts)

    assert plan.n_slots > store.slots.n_slots
    assert plan.cost_bytes <= 12 * 20_000
    assert sum(plan.quotas) == plan.n_protected
    assert 0 < plan.expected_hit_share <= 1
    assert store.plan(plan.smallest_bytes).n_slots == 1
    with pytest.raises(BudgetError) as caught:
        store.plan(plan.smallest_bytes - 1)
    assert caught.value.code == "budget-too-small"
    assert store.cache.n_resident == 2


def test_hits_lates_and_misses_add_up_to_asks_and_bytes_to_reads():
    source, engine, store = step_store(16, top_k=4)
    ask(source, store, 0, [0, 1])
    store.prefetch(0, [2])
    ask(source, store, 0, [0, 2, 3])

    stats = store.stats.layers[0]
    assert counts(store, 0) == (1, 1, 3)
    assert stats.n_asks == 5
    assert stats.n_fetches == 2
    assert stats.read_bytes == len(engine.submitted) * block_slot_bytes(source)
    assert store.stats.total() == stats


def test_stall_and_compute_are_timed_apart():
    source = make_source(layouts=LAYOUTS, n_experts=4)
    now = [0]
    engine = StepEngine(source)
    wait = engine.wait

    def slow_wait():
        now[0] += 1000
        return wait()

    engine.wait = slow_wait
    plan = make_plan(source, 8)
    store = Store(source, Pool(8, block_slot_bytes(source)), engine, plan, clock=lambda: now[0])
    for _ in store.fetch(0, [0, 1]):
        now[0] += 7

    stats = store.stats.layers[0]
    assert (stats.stall_ns, stats.compute_ns) == (2000, 14)
