"""Counts and what is derived from them."""

from colibri_runtime.stats import LayerStats, Stats


def test_a_late_block_is_no_hit():
    stats = LayerStats(n_hits=3, n_lates=1, n_misses=4)

    assert stats.n_asks == 8
    assert stats.hit_rate == 3 / 8


def test_nothing_asked_for_gives_no_rate_and_no_recall():
    assert LayerStats().hit_rate == 0
    assert LayerStats().recall is None


def test_recall_counts_only_asks_that_had_a_prediction():
    assert LayerStats(n_foretold=8, n_recalled=6, n_hits=20).recall == 0.75


def test_totals_add_layers_and_differences_undo_sums():
    stats = Stats(2)
    stats.layers[0].demand_bytes = 5
    stats.layers[1].prefetch_bytes = 7

    total = stats.total()
    stats.layers[0].demand_bytes = 9

    assert total.read_bytes == 12
    assert stats.total().minus(total) == LayerStats(demand_bytes=4)
    assert total.plus(total).read_bytes == 24
    assert total.as_dict()["prefetch_bytes"] == 7


def test_bytes_that_were_needed_leave_out_the_share_of_prefetches_in_vain():
    assert LayerStats(demand_bytes=10).needed_bytes == 10
    some = LayerStats(demand_bytes=10, prefetch_bytes=80, n_prefetched=8, n_prefetch_used=6)
    assert some.needed_bytes == 70
    earlier = LayerStats(prefetch_bytes=80, n_prefetched=8, n_prefetch_used=9)
    assert earlier.needed_bytes == 80
