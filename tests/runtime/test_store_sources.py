"""One pool and one engine for mixed layers, striped files and several models."""

import os
from uuid import UUID

import numpy as np
import pytest

from colibri_format import FormatError, StorageError, UsageError
from colibri_runtime.blocks import BlockTable, block_files
from colibri_runtime.config import RunConfig
from colibri_runtime.history import History
from colibri_runtime.opening import open_pool
from colibri_runtime.policies import POLICY_NAMES
from colibri_runtime.pool_plan import SLOT_OVERHEAD, plan_pool
from colibri_runtime.prefetch import FrequentExperts, PrefetchSource
from helpers.blocks import assert_lease_is_right, make_source, small_layout

SMALL, LARGE = small_layout(16, 32), small_layout(64, 96)


def open_store(sources, n_bytes=10**9, *, top_k=2, history=None, **options):
    config = RunConfig(io="threads", **options)
    plan = plan_pool(
        n_bytes, BlockTable(sources).census(), top_k=top_k, prefetch_depth=config.look_ahead
    )
    return open_pool(sources, plan, config, history=history)


def ask(source, store, layer, experts):
    seen = []
    for lease in store.fetch(layer, experts):
        assert_lease_is_right(source, lease)
        seen.append(lease.expert)
    return sorted(seen)


def mixed_source(path, **options):
    """Two layers of small blocks, the second with three large ones among them; one of large."""
    return make_source(
        path,
        layouts=[SMALL, SMALL, LARGE],
        n_experts=8,
        mixed={(1, 1): LARGE, (1, 4): LARGE, (1, 6): LARGE},
        **options,
    )


@pytest.mark.parametrize("n_bytes", [10**9, 500_000, 90_000])
def test_experts_of_a_mixed_layer_come_with_their_own_layouts(tmp_path, n_bytes):
    source = mixed_source(tmp_path / "a.colibri")
    with open_store([source], n_bytes) as store:
        for _ in range(2):
            for layer in range(3):
                assert ask(source, store, layer, range(8)) == list(range(8))
        assert store.fetch(1, [1]).take()[0].layout == LARGE
        store.fetch(0, []).close()


def test_blocks_stay_in_slots_of_their_class(tmp_path):
    source = mixed_source(tmp_path / "a.colibri")
    with open_store([source], 500_000, prefetch_depth=1) as store:
        small, large = (c.slot_bytes for c in store.slots.classes)
        assert small < large
        for layer in (0, 1, 2, 1, 0):
            for lease in store.fetch(layer, range(8)):
                assert store.pool.sizes[lease.slot] == (large if lease.layout == LARGE else small)


def test_blocks_striped_over_volumes_are_read(tmp_path):
    source = mixed_source(tmp_path / "a.colibri", n_volumes=2)
    with open_store([source]) as store:
        assert len(block_files([source])) == 3
        for layer in range(3):
            assert ask(source, store, layer, range(8)) == list(range(8))


def test_damage_in_a_volume_names_the_volume(tmp_path):
    source = mixed_source(tmp_path / "a.colibri", n_volumes=1)
    layer, expert = map(int, np.argwhere(source.block_index.volumes == 1)[0])
    path = source.volume_paths[0]
    with open(path, "r+b") as file:
        file.seek(int(source.index[layer, expert]["offset"]))
        file.write(bytes([int(source.payload[layer, expert][0]) ^ 1]))
    with open_store([source]) as store, pytest.raises(FormatError) as caught:
        ask(source, store, layer, [expert])

    assert caught.value.code == "block-checksum"
    assert f"{path}: block L{layer}/E{expert}" in str(caught.value)


def test_a_striped_file_opened_without_its_volumes_is_refused(tmp_path):
    source = mixed_source(tmp_path / "a.colibri", n_volumes=1)
    source.volume_paths = ()

    with pytest.raises(UsageError) as caught:
        open_store([source])

    assert caught.value.code == "no-such-volume"


def test_a_volume_that_shrank_is_refused(tmp_path):
    source = mixed_source(tmp_path / "a.colibri", n_volumes=1)
    os.truncate(source.volume_paths[0], 4096)

    with pytest.raises(StorageError) as caught:
        open_store([source])

    assert caught.value.code == "file-changed"


def test_no_source_is_refused():
    with pytest.raises(UsageError) as caught:
        BlockTable([])

    assert caught.value.code == "no-source"


@pytest.mark.parametrize("n_bytes", [10**9, 120_000])
def test_two_models_share_a_pool_and_an_engine(tmp_path, n_bytes):
    first = make_source(tmp_path / "a.colibri", layouts=[SMALL, None, SMALL], n_experts=4)
    second = make_source(
        tmp_path / "b.colibri", layouts=[LARGE, SMALL], n_experts=6, seed=1, n_volumes=1
    )
    with open_store([first, second], n_bytes) as store:
        parts = [store.part(0), store.part(1)]
        for _ in range(2):
            for source, part, layers, n_experts in (
                (first, parts[0], (0, 2), 4),
                (second, parts[1], (0, 1), 6),
            ):
                for layer in layers:
                    for lease in part.fetch(layer, range(n_experts)):
                        assert lease.layer == part.first_layer + layer
                        lease_of_source(source, lease, layer)
        assert store.cache.n_resident <= store.slots.n_slots
        assert store.stats.layers[3].n_asks == 12
        assert store.stats.layers[1].n_asks == 0


def lease_of_source(source, lease, layer):
    data = source.payload[layer, lease.expert]
    for segment in lease.layout.segments:
        expected = data[segment.offset : segment.offset + segment.size]
        assert np.array_equal(lease.segments[segment.role], expected)


def test_a_part_knows_its_own_layers_only(tmp_path):
    first = make_source(tmp_path / "a.colibri", layouts=[SMALL], n_experts=4)
    second = make_source(tmp_path / "b.colibri", layouts=[SMALL], n_experts=4)
    with open_store([first, second]) as store:
        for part in (store.part(0), store.part(1)):
            for call in (part.fetch, part.prefetch):
                for layer in (-1, 1):
                    with pytest.raises(UsageError) as caught:
                        call(layer, [0])

                    assert caught.value.code == "no-such-expert"
        store.part(1).prefetch(0, [1])
        store.part(1).observe(0, np.array([[1]]))
        assert [lease.layer for lease in store.part(1).fetch(0, [1])] == [1]


# Predictions of the store's own


def test_the_store_reads_ahead_what_a_layer_asked_for_last(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 4, n_experts=8)
    with open_store(
        [source], 14 * 9472, prefetch_depth=1, prefetch_from=PrefetchSource.LAST
    ) as store:
        assert store.look_ahead == 0
        for _ in range(5):
            for layer in range(4):
                ask(source, store, layer, [layer, layer + 1])
        total = store.stats.total()

    assert (total.n_foretold, total.recall) == (32, 1.0)


def test_layers_follow_each_other_in_a_circle_within_their_source(tmp_path):
    first = make_source(layouts=[None, SMALL, None, SMALL, SMALL], n_experts=4)
    second = make_source(layouts=[SMALL], n_experts=4)

    following = BlockTable([first, second]).following(2)

    assert following == ((1, 3), (3, 4), (3, 4), (4, 1), (1, 3), ())


def history_of(asks, n_layers=3, n_experts=8):
    history = History(UUID(int=1), n_layers, n_experts)
    for layer, experts in asks:
        history.observe(layer, experts)
    return history


def test_history_says_what_to_read_before_anything_was_asked(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 3, n_experts=8)
    with open_store(
        [source],
        14 * 9472,
        prefetch_depth=1,
        prefetch_from=PrefetchSource.HISTORY,
        history=history_of([(1, [2, 5])] * 7),
    ) as store:
        ask(source, store, 0, [0, 1])
        ask(source, store, 1, [5, 2])

        assert store.stats.layers[1].recall == 1


def test_free_slots_are_filled_with_what_was_asked_for_most(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 3, n_experts=8)
    history = history_of([(0, [1, 2])] * 9 + [(2, [3, 4, 5, 6])] * 5 + [(1, [e]) for e in range(8)])
    with open_store(
        [source], 6 * (8192 + SLOT_OVERHEAD), prefetch_depth=0, history=history
    ) as store:
        assert store.slots.n_slots == 6
        ask(source, store, 0, [1])
        while store.cache.n_free or store.cache.n_loading:
            ask(source, store, 0, [1])
        hits = [store.cache.slot_of(key) is not None for key in ((0, 1), (0, 2), (2, 3), (2, 6))]

        assert all(hits)
        assert (1, 7) not in store.cache
        assert store.stats.layers[0].n_misses == 0
        assert history.n_events > 22


def test_preloading_takes_no_slot_from_anything(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 3, n_experts=8)
    with open_store([source], 6 * (8192 + SLOT_OVERHEAD), prefetch_depth=0) as store:
        ask(source, store, 0, range(6))
        store.preload((1, expert) for expert in range(8))
        ask(source, store, 0, [0])

        assert all((0, expert) in store.cache for expert in range(6))
        with pytest.raises(UsageError) as caught:
            store.preload([(3, 0)])
        assert caught.value.code == "no-such-expert"
    with pytest.raises(UsageError) as caught:
        store.preload([(0, 0)])
    assert caught.value.code == "store-closed"


def test_a_history_of_another_shape_is_refused(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 3, n_experts=8)

    with pytest.raises(UsageError) as caught:
        open_store([source], history=history_of([], 3, 9))

    assert caught.value.code == "bad-history"


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("n_bytes", [10_000, 60_000, 500_000])
def test_every_policy_serves_every_size(tmp_path, policy, n_bytes):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 3, n_experts=8)
    rng = np.random.default_rng(0)
    with open_store([source], n_bytes, policy=policy, prefetch_from=PrefetchSource.LAST) as store:
        for _ in range(20):
            for layer in range(3):
                experts = rng.choice(8, 3, replace=False)
                store.observe(layer, experts[None], rng.random((1, 3)))
                assert ask(source, store, layer, experts) == sorted(experts)
        assert store.cache.n_pinned == 0


def test_a_policy_that_cannot_be_made_is_told_before_memory_is_taken(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 3, n_experts=8)

    with pytest.raises(UsageError) as caught:
        open_store([source], policy="lru", lfu_weight=0.5)

    assert caught.value.code == "bad-lfu-weight"


def test_history_may_begin_with_nothing(tmp_path):
    source = make_source(tmp_path / "a.colibri", layouts=[SMALL] * 3, n_experts=8)
    with open_store([source], prefetch_from=PrefetchSource.HISTORY, prefetch_depth=2) as store:
        for layer in (0, 1, 2, 0, 1, 2):
            assert ask(source, store, layer, [3, 4]) == [3, 4]

    assert FrequentExperts(np.zeros((1, 2))).predict(0) == []
