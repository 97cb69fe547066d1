"""The line a second."""

from colibri_runtime.live import HEADER_EVERY, LiveLines, header
from colibri_runtime.stats import LayerStats


def test_a_line_comes_each_second_with_what_happened_in_it():
    total = [LayerStats()]
    now = [0.0]
    live = LiveLines(lambda: total[0], clock=lambda: now[0])
    now[0] = 0.9
    assert live.token() == []

    total[0] = LayerStats(
        n_hits=6,
        n_lates=1,
        n_misses=3,
        demand_bytes=9_000_000,
        prefetch_bytes=3_000_000,
        wasted_bytes=1_000_000,
        stall_ns=500_000_000,
        n_waits=4,
        queue_depth=10,
    )
    now[0] = 2.0
    lines = live.token()

    assert lines[0] == header()
    assert lines[1].split() == ["1.0", "6.0", "60", "10", "25", "2.5", "1.5", "0.5"]
    assert len(lines[0]) == len(lines[1])
    now[0] = 2.5
    assert live.token() == []
    now[0] = 3.0
    assert live.token()[0].split() == ["2.0", "0.0", "0", "0", "0", "-", "0.0", "0.0"]


def test_the_header_is_repeated():
    now = [0.0]
    live = LiveLines(LayerStats, clock=lambda: now[0])
    lines = []
    for i in range(HEADER_EVERY + 1):
        now[0] = i + 1.0
        lines += live.token()

    assert lines.count(header()) == 2
    assert len(lines) == HEADER_EVERY + 3
