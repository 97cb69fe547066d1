"""The store's core in C: the same as the one in Python, over a real ring with a real thread."""

import errno
import gc
import os
import signal
import weakref
from uuid import UUID

import numpy as np
import pytest

import colibri_runtime.native_core as native_core_module
import colibri_runtime.policies as policies_module
import colibri_runtime.store as store_module
from colibri_format import FormatError, StorageError, UsageError
from colibri_runtime._native import native
from colibri_runtime.blocks import BlockTable
from colibri_runtime.config import RunConfig
from colibri_runtime.decoder_errors import ModelError
from colibri_runtime.fetch import Fetch
from colibri_runtime.history import History
from colibri_runtime.native_core import NativeCore
from colibri_runtime.opening import open_pool
from colibri_runtime.plain_core import PlainCore
from colibri_runtime.policy_native import NativePolicy
from colibri_runtime.pool_plan import plan_pool, pool_cost
from colibri_runtime.timeline import SpanKind, Timeline
from helpers.blocks import (
    ask,
    assert_lease_is_right,
    assert_nothing_is_held,
    counts,
    make_source,
    small_layout,
)

pytestmark = pytest.mark.skipif(native().library is None, reason="no C library")

LAYOUTS = [small_layout(), small_layout(10, 20), small_layout(), small_layout()]
SMALL, LARGE = small_layout(16, 32), small_layout(64, 96)
ALL = 10**9


def open_store(
    sources, n_bytes=ALL, *, top_k=2, io="uring", history=None, timeline=None, **options
):
    """A store over io_uring, or where the system has none over Linux AIO."""
    config = RunConfig(io=io, **options)
    table = BlockTable(sources)
    plan = plan_pool(n_bytes, table.census(), top_k=top_k, prefetch_depth=config.look_ahead)
    try:
        return open_pool(sources, plan, config, history=history, timeline=timeline)
    except StorageError as error:
        if io != "uring":
            pytest.skip(str(error))
        options |= {"io": "aio", "history": history, "timeline": timeline}
        return open_store(sources, n_bytes, top_k=top_k, **options)


def slot_bytes(source, n_slots):
    """A budget for `n_slots` slots of the largest block, or a few more of smaller ones."""
    census = BlockTable([source]).census()
    return pool_cost(n_slots, max(size for layer in census for size in layer))


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "a.colibri", layouts=LAYOUTS, n_experts=4)


@pytest.fixture
def store(source):
    with open_store([source]) as store:
        assert store.is_native
        yield store


def drain(store):
    """Waits until nothing is being read."""
    while store.cache.n_loading:
        store.fetch(0, [0]).close()


def flip(source, key, place=77):
    with open(source.path, "r+b") as file:
        file.seek(int(source.index[key]["offset"]) + place)
        file.write(bytes([int(source.payload[key][place]) ^ 1]))


# The same as in Python


@pytest.mark.parametrize("policy", ["recall", "cadence"])
@pytest.mark.parametrize("mixed", [False, True])
def test_both_cores_keep_the_same_blocks(tmp_path, monkeypatch, policy, mixed):
    source = make_source(
        tmp_path / "a.colibri",
        layouts=[SMALL, SMALL, LARGE if mixed else SMALL],
        n_experts=24,
        mixed={(1, 3): LARGE, (1, 9): LARGE} if mixed else {},
        absent={(0, 23)},
    )
    rng = np.random.default_rng(3)
    n_bytes = slot_bytes(source, 34)
    kinds = []
    histories = []
    for core in (store_module.native_core, lambda *arguments: None):
        monkeypatch.setattr(store_module, "native_core", core)
        with open_store([source], n_bytes, policy=policy, prefetch_depth=0) as store:
            kinds.append(type(store._core))
            assert len(store.slots.classes) == 1 + mixed
            found = []
            rng = np.random.default_rng(3)
            for step in range(240):
                layer = step % 3
                n_tokens = 1 + (step % 5 == 0)
                experts = np.minimum(rng.geometric(0.1, (n_tokens, 2)) - 1, 22)
                experts[:, 1] = (experts[:, 0] + 1 + experts[:, 1]) % 23
                weights = rng.random((n_tokens, 2), np.float32)
                if step % 7:
                    store.observe(layer, experts, weights if step % 11 else None)
                with store.fetch(layer, np.unique(experts)) as fetch:
                    while fetch.take():
                        pass
                cache = store.cache
                found.append((sorted(cache.owners().values()), cache.n_evicted, cache.n_resident))
            total = store.stats.total()
            found.append((total.n_hits, total.n_misses, total.read_bytes, total.n_fetches))
            histories.append(found)
    assert kinds == [NativeCore, PlainCore]
    assert histories[0] == histories[1]
    assert histories[0][-1][1] > 50


def test_what_c_cannot_do_is_done_in_python(source, monkeypatch):
    for options in ({"io": "threads"}, {"policy": "lru"}):
        few = slot_bytes(source, 8)
        with open_store([source], few, **options) as store:
            assert not store.is_native
            assert ask(source, store, 0, [1]) == [1]
    monkeypatch.setattr(native_core_module, "MAX_REQUEST", 4096)
    with open_store([source]) as store:
        assert not store.is_native
        assert ask(source, store, 0, [1]) == [1]


def test_a_policy_derived_from_one_in_c_is_asked_itself(source, monkeypatch):
    asked = []

    class Curious(NativePolicy):
        def victim(self, *, is_prefetch):
            asked.append(is_prefetch)
            return super().victim(is_prefetch=is_prefetch)

    monkeypatch.setattr(policies_module, "NativePolicy", Curious)
    with open_store([source], slot_bytes(source, 4)) as store:
        assert not store.is_native
        for layer in range(4):
            assert sorted(ask(source, store, layer, [0, 1])) == [0, 1]
    assert asked


def test_blocks_that_do_not_suit_the_disk_are_read_in_python(source, monkeypatch):
    row = BlockTable.row

    def shifted(self, layer):
        found = row(self, layer)
        found.offsets[:] += 8
        return found

    monkeypatch.setattr(BlockTable, "row", shifted)
    with open_store([source]) as store:
        is_direct = store.io_report.mode == "direct"
        assert store.is_native is not is_direct


def test_structs_that_differ_are_refused(source, monkeypatch):
    monkeypatch.setattr(native_core_module, "_CLASS", np.dtype("i4"))
    with pytest.raises(ModelError) as caught:
        open_store([source])
    assert caught.value.code == "native-records"


# Leases


@pytest.mark.parametrize("n_slots", [1, 2, 3, 5, 16])
def test_every_expert_comes_once_with_its_own_bytes(source, n_slots):
    with open_store([source], slot_bytes(source, n_slots)) as store:
        for _ in range(2):
            for layer in range(4):
                assert sorted(ask(source, store, layer, [3, 0, 2, 1, 0])) == [0, 1, 2, 3]
                assert_nothing_is_held(store)


def test_residents_come_first(source, store):
    ask(source, store, 0, [3])

    assert ask(source, store, 0, [1, 3, 2])[0] == 3


def test_nothing_wanted_gives_nothing(source, store):
    assert ask(source, store, 0, []) == []
    assert store.fetch(0, np.array([], np.int32)).take() == []


def test_any_iterable_of_any_integers_is_taken(source, store):
    assert sorted(ask(source, store, 0, np.array([1, 3], np.int64))) == [1, 3]
    assert sorted(ask(source, store, 0, (e for e in (0, 2, 2)))) == [0, 2]
    assert sorted(ask(source, store, 0, [0, 1, 2, 3] * 5)) == [0, 1, 2, 3]
    assert sorted(ask(source, store, 0, np.array([3, 1], np.uint8))) == [1, 3]
    assert sorted(ask(source, store, 0, np.array([2.0, 1.0]))) == [1, 2]
    assert sorted(ask(source, store, 0, np.array([True, False]))) == [0, 1]


@pytest.mark.parametrize("experts", [[4], [-1], [0, 99], [2**40], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_expert_that_is_not_there_is_refused(source, store, layer, experts):
    for call in (store.fetch, store.prefetch):
        with pytest.raises(UsageError) as caught:
            call(layer, experts)
        assert caught.value.code == "no-such-expert"
    with pytest.raises(UsageError) as caught:
        store.preload([(layer, expert) for expert in experts])
    assert caught.value.code == "no-such-expert"
    assert_nothing_is_held(store)
    assert ask(source, store, layer, [0]) == [0]


@pytest.mark.parametrize("layer", [-1, 4, 2**40])
def test_a_layer_that_is_not_there_is_refused(store, layer):
    for call in (store.fetch, store.prefetch):
        with pytest.raises(UsageError) as caught:
            call(layer, [0])
        assert caught.value.code == "no-such-expert"


@pytest.mark.parametrize("expert", [4, -1])
def test_routing_to_an_expert_that_is_not_there_is_refused(source, expert):
    with open_store([source], slot_bytes(source, 8)) as store:
        with pytest.raises(UsageError) as caught:
            store.observe(0, np.array([[0, expert]]))
        assert caught.value.code == "no-such-expert"


def test_steps_and_takes_may_be_mixed(source, store):
    ask(source, store, 0, [0, 1, 2])
    fetch = store.fetch(0, [0, 1, 2])

    first = next(fetch)
    assert store.cache.n_pinned == 3
    rest = fetch.take()

    assert [first.expert, *(lease.expert for lease in rest)] == [0, 1, 2]
    assert store.cache.n_pinned == 2
    assert list(fetch) == []
    assert_nothing_is_held(store)


def test_a_fetch_that_ended_cannot_end_the_next(store):
    old = store.fetch(0, [0])
    old.close()
    new = store.fetch(0, [1])

    old.close()
    assert list(old) == []
    assert old.take() == []
    del old
    gc.collect()

    assert [lease.expert for lease in new] == [1]


def test_a_second_fetch_beside_an_open_one_is_refused(store):
    leases = store.fetch(2, [0])

    with pytest.raises(UsageError) as caught:
        store.fetch(1, [0])

    assert caught.value.code == "fetch-open"
    assert "layer 2" in str(caught.value)
    leases.close()


def test_closing_early_gives_all_back(source, store):
    fetch = store.fetch(0, [0, 1, 2])
    next(fetch)

    fetch.close()

    assert_nothing_is_held(store)
    assert sorted(ask(source, store, 0, [0, 1, 2])) == [0, 1, 2]


def test_a_dropped_fetch_is_closed(store):
    for _ in store.fetch(0, [0, 1]):
        break

    gc.collect()

    assert_nothing_is_held(store)
    store.fetch(0, [0]).close()


def test_a_fetch_outlives_a_store_that_was_dropped(source):
    fetch = open_store([source]).fetch(0, [0, 1, 2])
    gc.collect()

    assert sorted(lease.expert for lease in fetch) == [0, 1, 2]


def test_the_same_lease_comes_again_with_what_was_put_into_it(source):
    with open_store([source], slot_bytes(source, 1)) as store:
        first = store.fetch(0, [0]).take()[0]
        first.cache = "mine"
        with store.fetch(0, [0]) as fetch:
            assert fetch.take()[0] is first
        ask(source, store, 2, [1])
        with store.fetch(0, [0]) as fetch:
            again = fetch.take()[0]
        assert again is not first
        assert again.cache is None


def test_a_lease_that_could_not_be_made_is_made_the_next_time(source, monkeypatch):
    with open_store([source], slot_bytes(source, 1)) as store:
        assert ask(source, store, 0, [1]) == [1]
        lease = native_core_module.Lease

        def interrupt(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(native_core_module, "Lease", interrupt)
        with pytest.raises(KeyboardInterrupt), store.fetch(2, [3]) as fetch:
            fetch.take()
        monkeypatch.setattr(native_core_module, "Lease", lease)

        assert ask(source, store, 2, [3]) == [3]
        assert counts(store, 2) == (1, 0, 1)


def test_the_callback_gets_each_block(source, store):
    seen = []

    def note(lease):
        assert_lease_is_right(source, lease)
        assert store.cache.n_pinned >= 1
        store.prefetch(1, [0])
        seen.append(lease.expert)

    with pytest.raises(UsageError) as caught:
        store.fetch(0, [0]).run()
    assert caught.value.code == "no-callback"
    store._core.close(store._core._number)
    store.on_ready(note)
    assert store.fetch(0, [2, 0, 1]).run() == 3
    assert sorted(seen) == [0, 1, 2]
    assert_nothing_is_held(store)


def test_an_open_fetch_is_void_although_closing_was_interrupted(store, monkeypatch):
    fetch = store.fetch(0, [0, 1])
    end = store._engine.close

    def interrupt():
        end()
        raise KeyboardInterrupt

    monkeypatch.setattr(store._engine, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.close()

    with pytest.raises(UsageError) as caught:
        fetch.take()
    assert caught.value.code == "store-closed"
    fetch.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_refused_and_may_drop_its_fetch(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[small_layout(64, 128)] * 2, n_experts=64)
    with open_store([source], slot_bytes(source, 32)) as store:
        for step in range(8):
            # The thread is at work, and has its lock at some of these forks.
            with store.fetch(step % 2, range(64)) as fetch:
                child = os.fork()
                if child == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(20)
                    fetch.close()
                    try:
                        list(store.fetch(0, range(64)))
                    except StorageError as error:
                        os._exit(error.errno)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                assert os.waitstatus_to_exitcode(status) == errno.ECHILD
            ask(source, store, step % 2, [0])


def test_a_closed_store_says_so_and_lets_go_of_its_memory(source):
    store = open_store([source])
    fetch = store.fetch(0, [0, 1])
    lease = next(fetch)
    arena = weakref.ref(lease._view.base)
    del lease

    store.close()
    store.close()

    for call in (
        fetch.take,
        fetch.__next__,
        lambda: store.fetch(0, [0]),
        lambda: store.prefetch(0, [0]),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == "store-closed"
    fetch.close()
    gc.collect()
    assert arena() is None
    assert store.cache.n_pinned >= 0


# Reading ahead


def test_what_was_read_ahead_is_a_hit_and_counted(source, store):
    store.prefetch(2, [1, 3, 1])
    drain(store)
    before = store.stats.total()

    assert sorted(ask(source, store, 2, [1, 3])) == [1, 3]

    stats = store.stats.layers[2]
    assert counts(store, 2) == (2, 0, 0)
    assert (stats.n_prefetched, stats.n_prefetch_used) == (2, 2)
    assert (stats.n_predicted, stats.n_foretold, stats.n_recalled) == (2, 2, 2)
    assert stats.prefetch_bytes > 0
    assert stats.demand_bytes == 0
    assert store.stats.total().minus(before).n_hits == 2
    assert store.stats.total() == sum_of(store.stats.layers)


def sum_of(layers):
    total = layers[0]
    for layer in layers[1:]:
        total = total.plus(layer)
    return total


def test_recall_compares_predicted_with_wanted(source, store):
    store.prefetch(0, [0, 1])
    ask(source, store, 0, [1, 2])
    ask(source, store, 1, [0])

    total = store.stats.total()
    assert (total.n_predicted, total.n_foretold, total.n_recalled) == (2, 2, 1)


def test_no_more_is_read_ahead_than_the_plan_allows(source):
    with open_store([source], slot_bytes(source, 6), prefetch_depth=1) as store:
        most = store.slots.classes[0].plan.n_prefetch

        store.prefetch(1, [0, 1, 2, 3])

        assert store.stats.layers[1].n_prefetch_dropped == 4 - most
        drain(store)
        assert store.cache.n_waiting == most


def test_what_was_read_ahead_in_vain_is_evicted_and_counted(source):
    with open_store([source], slot_bytes(source, 4), prefetch_depth=1) as store:
        store.prefetch(1, [0])
        drain(store)
        ask(source, store, 1, [1])
        for _ in range(3):
            ask(source, store, 2, [0, 1])
            ask(source, store, 3, [0, 1])

        stats = store.stats.layers[1]
        assert (stats.n_prefetch_wasted, stats.n_prefetch_used) == (1, 0)
        assert stats.wasted_bytes > 0


def test_a_newer_prediction_takes_the_place_of_the_older(source, store):
    store.prefetch(1, [0, 1])
    store.prefetch(1, [2])
    store.prefetch(1, [])
    ask(source, store, 1, [3])
    drain(store)

    total = store.stats.total()
    assert total.n_predicted == 0
    assert total.n_prefetched + total.n_prefetch_cancelled + total.n_prefetch_dropped == 3
    assert_nothing_is_held(store)


def test_without_look_ahead_a_hint_is_only_checked(source):
    with open_store([source], prefetch_depth=0) as store:
        store.prefetch(1, [0])
        with pytest.raises(UsageError):
            store.prefetch(1, [9])
        assert store.stats.total().n_predicted == 0


def test_a_store_that_predicts_by_itself_reads_ahead(source):
    with open_store([source], slot_bytes(source, 9), prefetch_from="last") as store:
        for _ in range(3):
            for layer in range(4):
                ask(source, store, layer, [0, 1])
        assert store.stats.total().n_recalled > 8
        assert store.look_ahead == 0


def test_a_history_fills_free_slots_and_is_told(source):
    history = History(UUID(int=1), 4, 4)
    history.observe(3, [2])
    with open_store([source], history=history) as store:
        drain(store)
        assert (3, 2) in store.cache
        ask(source, store, 0, [1])
    assert history.counts()[0, 1] == 1


def test_preloading_goes_on_with_fetches_and_ends_with_the_last_slot(source):
    with open_store([source], slot_bytes(source, 3)) as store:
        store.preload([(layer, expert) for layer in (1, 2) for expert in range(4)])
        drain(store)
        assert store.cache.n_resident == 3
        assert store.cache.n_evicted <= 1


def test_reads_and_waits_are_written_down(source, monkeypatch):
    timeline = Timeline()
    with open_store([source], timeline=timeline) as store:
        assert store.is_native
        ask(source, store, 3, [1])
        timeline.begin(1)
        store.prefetch(1, [2])
        ask(source, store, 0, [0, 1])
        ask(source, store, 1, [2])
        timeline.end()
        size = store.stats.layers[0].read_bytes // 2

        spans = timeline.passes[0].spans
        reads = {(s.layer, s.expert): s for s in spans if s.kind is SpanKind.READ}
        waits = [s for s in spans if s.kind is SpanKind.WAIT]
        assert set(reads) == {(0, 0), (0, 1), (1, 2)}
        assert all(s.submit_ns <= s.start_ns <= s.end_ns for s in reads.values())
        assert [s.is_prefetch for s in reads.values()].count(True) == reads[1, 2].is_prefetch == 1
        assert reads[0, 0].n_bytes == size
        assert sum(s.end_ns - s.start_ns for s in waits if s.layer == 0) == (
            store.stats.layers[0].stall_ns
        )

    monkeypatch.setattr(native_core_module, "_LEAST_EVENTS", 1)
    small = make_source(source.path.with_name("b"), layouts=[SMALL], n_experts=1)
    with open_store([small], timeline=Timeline()) as store:
        state = store._core._state[0]
        assert state["event_room"] == 2
        ask(small, store, 0, [0])
        state["n_events"] = 2
        state["classes"]["n_free"] = 1
        store._core._arrays["blocks"]["slot"][0] = -1
        ask(small, store, 0, [0])
        assert state["n_events"] == 2


# Failures


def test_a_bit_that_flips_on_its_way_is_read_again(source, store):
    core = store._core
    blocks = core._arrays["blocks"]
    blocks["checksum"][2 * 4 + 1] ^= 1  # what C compares with; the table has the right one

    assert sorted(ask(source, store, 2, [0, 1, 2])) == [0, 1, 2]

    stats = store.stats.layers[2]
    assert stats.n_rereads == 1
    assert counts(store, 2) == (0, 0, 3)
    assert_nothing_is_held(store)


def test_a_bit_that_flipped_on_disk_stops_the_fetch(source, store):
    flip(source, (2, 1))

    with pytest.raises(FormatError) as caught:
        ask(source, store, 2, [0, 1])

    assert caught.value.code == "block-checksum"
    assert "L2/E1" in str(caught.value)
    assert store.stats.layers[2].n_rereads == 1
    assert_nothing_is_held(store)
    assert ask(source, store, 2, [0]) == [0]
    assert_nothing_is_held(store)


def test_without_checking_a_flipped_bit_passes(source):
    flip(source, (2, 1))
    with open_store([source], is_verified=False) as store:
        assert store.is_native
        with store.fetch(2, [1]) as fetch:
            assert len(fetch.take()) == 1


def test_several_that_fail_are_given_back(source, store):
    for expert in range(3):
        flip(source, (2, expert))

    with pytest.raises(FormatError):
        ask(source, store, 2, [0, 1, 2, 3])

    assert_nothing_is_held(store)
    drain(store)
    assert store.cache.n_loading == 0


def test_a_prefetch_that_fails_is_forgotten_and_read_again_on_demand(source, store):
    flip(source, (1, 0))
    store.prefetch(1, [0])
    drain(store)
    assert store.stats.layers[1].n_prefetch_failed == 1

    with pytest.raises(FormatError):
        ask(source, store, 1, [0])
    assert_nothing_is_held(store)


def test_a_late_prefetch_that_fails_is_read_again(source, store):
    blocks = store._core._arrays["blocks"]
    blocks["checksum"][1 * 4 + 0] ^= 1
    store.prefetch(1, [0])

    assert ask(source, store, 1, [0]) == [0]

    stats = store.stats.layers[1]
    assert stats.n_rereads == 1
    assert stats.n_prefetch_failed == 1


def test_a_file_cut_while_open_is_a_short_read(source, store):
    os.truncate(source.path, int(source.index[3, 3]["offset"]) + 4097)

    with pytest.raises(StorageError) as caught:
        ask(source, store, 3, [0, 3])

    assert caught.value.code == "short-read"
    assert_nothing_is_held(store)
    assert ask(source, store, 3, [0]) == [0]


def test_padding_that_the_file_lacks_reads_as_zeros(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=LAYOUTS, n_experts=4, tail=0)
    last = source.index[3, 3]
    os.truncate(source.path, int(last["offset"] + last["size"]))
    source.file_size = source.path.stat().st_size
    with open_store([source]) as store:
        assert ask(source, store, 3, [3]) == [3]


def test_a_fetch_that_is_interrupted_as_it_opens_is_closed(source, store, monkeypatch):
    core = store._core
    fetch = core._fetch

    def interrupt(at, layer, n):
        assert fetch(at, layer, n) == n
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "_fetch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.fetch(0, [0, 1])
    monkeypatch.setattr(core, "_fetch", fetch)

    assert_nothing_is_held(store)
    assert sorted(ask(source, store, 0, [0, 1])) == [0, 1]


def test_an_old_handle_dropped_while_a_fetch_opens_does_not_close_it(source, store, monkeypatch):
    core = store._core
    fetch = core._fetch
    old = [store.fetch(0, [0])]
    assert len(list(old[0])) == 1

    def drop(at, layer, n):
        n_opened = fetch(at, layer, n)
        old.clear()
        gc.collect()
        return n_opened

    monkeypatch.setattr(core, "_fetch", drop)

    assert ask(source, store, 1, [2]) == [2]


def test_a_handle_that_was_half_made_is_dropped_in_silence():
    Fetch.__new__(Fetch).__del__()


def test_what_the_kernel_refuses_is_named(source, store, tmp_path):
    core = store._core
    folder = os.open(tmp_path, os.O_RDONLY)
    core._arrays["blocks"]["fd"][:] = folder
    core._arrays["blocks"]["file"][:] = -1
    try:
        with pytest.raises(StorageError) as caught:
            ask(source, store, 0, [1])
    finally:
        os.close(folder)

    assert caught.value.errno in (errno.EISDIR, errno.EINVAL, errno.EBADF)
    assert "L0/E1" in str(caught.value)
    assert_nothing_is_held(store)


def test_a_queue_that_serves_no_more_is_an_error(source, store, monkeypatch):
    core = store._core
    monkeypatch.setattr(core, "_take", lambda at, most: -errno.EBADF)
    fetch = store.fetch(0, [0])
    with pytest.raises(StorageError) as caught:
        fetch.take()
    assert caught.value.errno == errno.EBADF
    assert not core.is_open
    monkeypatch.setattr(core, "_fetch", lambda at, layer, n: -errno.EBADF)
    with pytest.raises(StorageError):
        store.fetch(0, [0])


def test_a_policy_that_gives_no_slot_is_an_error(source, store, monkeypatch):
    fetch = store.fetch(0, [0])
    monkeypatch.setattr(store._core, "_take", lambda at, most: -errno.ENOSPC)
    with pytest.raises(UsageError) as caught:
        fetch.take()
    assert caught.value.code == "no-slot"


def test_a_signal_ends_a_wait_and_loses_nothing(source, store, monkeypatch):
    core = store._core
    take = core._take
    codes = iter([-errno.EINTR, -errno.EINTR])
    monkeypatch.setattr(core, "_take", lambda at, most: next(codes, None) or take(at, most))

    assert sorted(ask(source, store, 0, [0, 1])) == [0, 1]

    def interrupt(at, most):
        raise KeyboardInterrupt

    fetch = store.fetch(0, [2])
    monkeypatch.setattr(core, "_take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.take()
    monkeypatch.setattr(core, "_take", take)
    assert_nothing_is_held(store)
    assert ask(source, store, 0, [2]) == [2]
