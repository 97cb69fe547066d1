"""Figures of a run and what they advise."""

from dataclasses import replace

import pytest

from colibri_format import parse_size
from colibri_runtime.budget import MemoryNeeds, plan_memory
from colibri_runtime.cmd_progress import ProgressBars
from colibri_runtime.config import RunConfig
from colibri_runtime.disk import IoReport
from colibri_runtime.disk_files import IoMode
from colibri_runtime.figures import Phase, explain_stall, profile_rows
from colibri_runtime.stats import LayerStats

MIB = 2**20
IO = IoReport("threads", IoMode.DIRECT, "", 2, True)
STATS = LayerStats(
    n_fetches=10,
    n_hits=20,
    n_misses=60,
    demand_bytes=60 * MIB,
    stall_ns=500_000_000,
    read_ns=60_000_000,
)


def plan_of(n_slots):
    needs = MemoryNeeds(
        where="a.colibri",
        dense_bytes=MIB,
        kv_bytes=MIB,
        working_bytes=MIB,
        index_bytes=0,
        census=({MIB: 16},) * 2,
        top_k=4,
    )
    return plan_memory((n_slots + 7) * MIB, needs)


def advice(stats=STATS, *, n_slots=8, config=None, io=IO, seconds=1.0):
    sentences = explain_stall(
        Phase(10, seconds, stats), plan_of(n_slots), config or RunConfig(), io
    )
    return " ".join(sentences)


def test_rates_are_per_token_and_per_second():
    phase = Phase(10, 2.0, STATS)

    assert phase.tokens_per_s == 5
    assert phase.bytes_per_token == 6 * MIB
    assert phase.stall_share == 0.25


def test_without_tokens_or_time_there_are_no_rates():
    phase = Phase(0, 0.0, LayerStats())

    assert (phase.tokens_per_s, phase.bytes_per_token, phase.stall_share) == (None, None, None)
    assert phase.as_dict()["hit_rate"] is None


@pytest.mark.parametrize("seconds", [5.0, 100.0, 0.0])
def test_a_stall_of_a_tenth_or_less_needs_no_words(seconds):
    assert advice(seconds=seconds) == ""


def test_a_pool_that_is_too_small_is_named_first():
    text = advice()

    assert text.startswith("75% of the experts asked for had to be read: the pool holds 10 of 32")
    assert "--memory 39M or above" in text


def test_the_budget_advised_holds_every_expert():
    size = parse_size(advice().split("--memory ")[1].split()[0])

    assert plan_of(size // MIB - 7).n_slots == 32


def test_first_reads_are_told_from_too_little_memory():
    assert "first reads" in advice(n_slots=64)


def test_buffered_reads_are_blamed_with_their_reason():
    io = replace(IO, mode=IoMode.BUFFERED, reason="open refused O_DIRECT")

    assert "page cache (open refused O_DIRECT)" in advice(io=io)


def test_reading_ahead_is_suggested_where_it_is_off():
    assert "--prefetch-depth 1" in advice(config=RunConfig(prefetch_depth=0))


def test_reading_ahead_in_vain_is_advised_against():
    stats = replace(STATS, n_prefetched=10, n_prefetch_used=3)

    assert "--prefetch-depth 0" in advice(stats, config=RunConfig(prefetch_depth=1))
    assert "--prefetch-depth" not in advice(replace(stats, n_prefetch_used=8))


def test_costly_checksums_are_named():
    assert "--no-verify" in advice(replace(STATS, checksum_ns=50_000_000))


def test_the_disks_rate_is_told():
    assert "The disk gave 1.95 GiB/s to 2 threads" in advice()


def test_the_profile_leaves_out_layers_that_were_never_asked():
    header, *rows = profile_rows([STATS, LayerStats(), STATS])

    assert [row[0] for row in rows] == ["0", "2"]
    assert all(len(row) == len(header) for row in rows)


# Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_bar_appears_only_for_work_that_lasts(capsys):
    clock = Clock()
    with ProgressBars(64, 4, is_shown=True, clock=clock) as bars:
        bars.loaded(1, 100)
        assert capsys.readouterr().err == ""
        clock.now = 5
        bars.loaded(50, 100)
        bars.loaded(100, 100)
        assert "loading" in capsys.readouterr().err
        bars.routed(0, 0, [0] * 32, None, None)
        assert capsys.readouterr().err == ""
        clock.now = 10
        bars.routed(1, 0, [0] * 32, None, None)
        bars.routed(3, 32, [0] * 32, None, None)

        assert "reading the prompt" in capsys.readouterr().err
        bars.routed(0, 64, [0], None, None)
        assert capsys.readouterr().err == ""


def test_no_bar_is_drawn_where_nobody_looks(capsys):
    clock = Clock()
    bars = ProgressBars(64, 4, clock=clock)
    clock.now = 100

    bars.loaded(5, 10)

    assert capsys.readouterr().err == ""
