"""Cache curves: what they are measured on, where they bend, what a wanted hit rate needs."""

import json
import signal
from itertools import chain, islice

import pytest

from colibri_bench.cache_grid import (
    CachePoint,
    count_tokens,
    curve,
    find_knee,
    measure,
    parse_shares,
    size_for,
)
from colibri_bench.cmd_bench import main
from colibri_bench.demo_model import demo_trace
from colibri_bench.results import load_results
from colibri_format import UsageError
from colibri_format.command import Terminated
from colibri_runtime.trace import make_trace, read_trace


@pytest.fixture(scope="module")
def trace():
    with demo_trace() as path:
        return read_trace(path)


@pytest.fixture(scope="module")
def points(trace):
    sizes = measure(trace, [0.2, 0.4, 1.0], ("lru", "recall"), block_bytes=4096)
    return list(chain.from_iterable(sizes))


def test_nothing_beats_knowing_the_future(points):
    for share in (0.2, 0.4, 1.0):
        best = next(p for p in points if p.policy == "belady" and p.share == share)
        assert all(p.hit_rate <= best.hit_rate for p in points if p.share == share)
        assert best.of_belady == 1.0


def test_bytes_are_misses_times_the_blocks_size(points, trace):
    for point in points:
        assert point.bytes_per_token == pytest.approx(4096 * point.misses_per_token)
        assert point.pool_bytes == 4096 * point.n_slots
    assert count_tokens(trace) > 10


def test_sizes_are_unknown_where_the_trace_states_none(trace):
    (found,) = measure(trace, [0.5], ("lru",))

    assert {point.bytes_per_token for point in found} == {None}


def test_a_model_with_more_experts_than_were_met_has_more_room(trace):
    most = next(measure(trace, [0.5], ("lru",), n_blocks=2 * trace.n_blocks))[0]

    assert most.n_slots == trace.n_blocks


def test_trace_without_events_is_refused():
    with pytest.raises(UsageError) as caught:
        list(measure(make_trace([]), [0.5]))

    assert caught.value.code == "trace-empty"


def test_knee_is_where_the_curve_bends():
    assert find_knee([(0.1, 0.2), (0.2, 0.8), (0.6, 0.9), (1.0, 1.0)]) == 0.2


@pytest.mark.parametrize(
    "points", [[], [(0.1, 0.5), (0.2, 0.6)], [(0, 0), (0.5, 0.5), (1, 1)], [(0, 1), (1, 1), (2, 1)]]
)
def test_line_or_too_few_points_have_no_knee(points):
    assert find_knee(points) is None


def test_wanted_rate_is_found_between_sizes():
    line = [(0.1, 0.4), (0.3, 0.8)]

    assert size_for(line, 0.6) == pytest.approx(0.2)
    assert size_for(line, 0.1) == 0.1
    assert size_for(line, 0.9) is None


def test_shares_are_sorted_and_named_once():
    assert parse_shares("20%, 5%,20%") == [0.05, 0.2]


@pytest.mark.parametrize("text", ["", "x", "0%", "101%", "-1%"])
def test_sizes_that_cannot_be_are_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_shares(text)

    assert caught.value.code == "bad-sizes"


def test_curve_is_of_one_policy(points):
    assert [share for share, _ in curve(points, "lru")] == [0.2, 0.4, 1.0]
    assert all(isinstance(point, CachePoint) for point in points)


def test_command_replays_the_demo_models_trace(demo_file, tmp_path, capsys):
    options = ["--blocks", str(demo_file), "--quick", "--policies", "lru,recall"]

    assert main(["cache", *options, "--out", str(tmp_path)]) == 0

    out = capsys.readouterr().out
    assert "the knee is at" in out
    record = json.loads((tmp_path / "cache.json").read_text())
    assert {row["policy"] for row in record["rows"]} == {"belady", "lru", "recall"}
    assert record["rows"][0]["pool_bytes"] % 4096 == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--want", "100"], "bad-option"),
        (["--policies", "none"], "unknown-policy"),
        (["--sizes", "0%"], "bad-sizes"),
    ],
)
def test_command_refuses_what_cannot_be_replayed(options, code, capsys):
    assert main(["cache", *options]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_command_says_when_no_size_is_enough(capsys):
    assert main(["cache", "--sizes", "3%,5%", "--want", "99"]) == 0
    assert "none of these sizes reaches 99%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (Terminated(signal.SIGTERM), 143)]
)
def test_interrupted_command_keeps_what_it_has(error, status, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        yield from islice(measure(*arguments, **options), 2)
        raise error

    monkeypatch.setattr("colibri_bench.cmd_cache.measure", interrupted)
    monkeypatch.setattr("colibri_bench.cmd_cache._TELL_S", -1.0)

    assert main(["cache", "--quick", "--policies", "lru", "--out", str(tmp_path)]) == status

    told = capsys.readouterr()
    assert "1/5: room for 5%" in told.err
    assert "interrupted after 2 of 5 sizes: what there is" in told.err
    results = load_results(tmp_path / "cache.json")
    assert not results.is_complete
    assert {row["share"] for row in results.rows} == {0.05, 0.1}
