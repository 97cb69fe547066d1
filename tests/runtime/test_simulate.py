"""Replays: fused events, Belady's optimum, and policies in their order."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_format import UsageError
from colibri_runtime.cmd_simulate import main
from colibri_runtime.policies import POLICY_NAMES, make_policy
from colibri_runtime.simulate import belady, replay
from colibri_runtime.slots import plan_slots
from colibri_runtime.trace import Event, Trace, TracePhase, make_trace, read_trace

DEMO = (
    Path(__file__).parents[2]
    / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.route.csv"
)


def trace_of(*events):
    return make_trace(
        Event(0, TracePhase.DECODE, i, layer, tuple(experts), (1.0,) * len(experts))
        for i, (layer, experts) in enumerate(events)
    )


def test_lru_by_hand():
    trace = trace_of((0, [1, 2]), (0, [1, 3]), (0, [2, 3]), (0, [1, 3]))

    result = replay(trace, make_policy("lru", n_layers=1, n_slots=2), 2)

    assert result.event_hits.tolist() == [0, 1, 1, 1]
    assert (result.n_hits, result.n_misses, result.hit_rate) == (3, 5, 3 / 8)
    assert result.hits_within(0.5, 1.0) == 2


def test_no_expert_of_an_event_makes_room_for_another():
    """One at a time, 3 would evict 1 before its turn comes."""
    trace = trace_of((0, [1, 2]), (0, [3, 1]))

    result = replay(trace, make_policy("lru", n_layers=1, n_slots=2), 2)

    assert result.event_hits.tolist() == [0, 1]


def test_belady_by_hand():
    trace = trace_of((0, [1]), (0, [2]), (0, [3]), (0, [1]), (0, [2]))

    assert belady(trace, 2).event_hits.tolist() == [0, 0, 0, 1, 0]
    assert belady(trace, 3).event_hits.tolist() == [0, 0, 0, 1, 1]


def best_by_search(trace, n_slots):
    """Hits of the best of all choices of victims."""
    states = {frozenset(): 0}
    for event in trace.events:
        keys = frozenset((event.layer, expert) for expert in event.experts)
        following = {}
        for held, hits in states.items():
            gained = hits + len(held & keys)
            over = len(held | keys) - n_slots
            for evicted in itertools.combinations(sorted(held - keys), max(over, 0)):
                state = (held | keys) - frozenset(evicted)
                following[state] = max(following.get(state, -1), gained)
        states = following
    return max(states.values())


small_traces = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=60)
@given(events=small_traces, n_slots=st.integers(2, 4))
def test_belady_is_the_best_that_is_possible(events, n_slots):
    trace = trace_of(*events)

    assert belady(trace, n_slots).n_hits == best_by_search(trace, n_slots)


@settings(deadline=None, max_examples=40)
@given(
    events=small_traces,
    n_slots=st.integers(1, 6),
    name=st.sampled_from(POLICY_NAMES),
    per_layer=st.booleans(),
)
def test_no_policy_beats_belady_nor_gets_stuck(events, n_slots, name, per_layer):
    trace = trace_of(*events)
    quotas = None
    if per_layer:
        plan = plan_slots(n_slots=n_slots, blocks_per_layer=[4, 4], top_k=2, prefetch_depth=0)
        quotas = plan.quotas

    policy = make_policy(name, n_layers=2, n_slots=n_slots, quotas=quotas)
    result = replay(trace, policy, n_slots)

    assert result.n_hits + result.n_misses == trace.n_picks
    if n_slots >= 2:
        assert result.n_hits <= belady(trace, n_slots).n_hits


def test_an_event_larger_than_the_pool_is_served_in_rounds():
    trace = trace_of((0, [1, 2, 3, 4]), (0, [4]))

    result = replay(trace, make_policy("lru", n_layers=1, n_slots=2), 2)

    assert result.event_hits.tolist() == [0, 1]


def test_preloaded_blocks_hit():
    trace = trace_of((0, [1, 2]))

    result = replay(
        trace, make_policy("lru", n_layers=1, n_slots=3), 3, resident=[(0, 2), (0, 5), (0, 6)]
    )

    assert result.event_hits.tolist() == [1]


def test_missed_bytes_go_by_layer():
    events = trace_of((0, [1]), (1, [1, 2]), (0, [1])).events
    trace = Trace("t", events, 2, 3, (10, 100))

    assert replay(trace, make_policy("lru", n_layers=2, n_slots=9), 9).missed_bytes == 210


@pytest.mark.parametrize("call", [belady, lambda trace, n: replay(trace, None, n)])
def test_no_slots_are_refused(call):
    with pytest.raises(UsageError) as error:
        call(trace_of((0, [1])), 0)

    assert error.value.code == "bad-slots"


def test_belady_needs_room_for_the_largest_event():
    with pytest.raises(UsageError) as error:
        belady(trace_of((0, [1, 2])), 1)

    assert error.value.code == "bad-slots"


def test_a_policy_that_protects_everything_is_an_error():
    trace = trace_of((0, [1]), (0, [2]))

    with pytest.raises(UsageError) as error:
        replay(trace, make_policy("lfu", n_layers=1, n_slots=1, quotas=(1,)), 1)

    assert error.value.code == "no-slot"


@pytest.mark.parametrize("share", [0.25, 0.4])
def test_policies_stand_in_their_order_on_the_demo_models_trace(share):
    trace = read_trace(DEMO).only(TracePhase.DECODE)
    n_slots = int(trace.n_blocks * share)

    hits = {
        name: replay(trace, make_policy(name, n_layers=6, n_slots=n_slots), n_slots).n_hits
        for name in POLICY_NAMES
    }

    assert hits["recall"] > hits["cadence"] > hits["lru"]
    assert hits["hybrid"] > hits["lru"]


def test_the_command_gives_a_row_for_each_policy_and_size(capsys):
    status = main([str(DEMO), "--sizes", "25%,40", "--policies", "recall,lru", "--json"])

    assert status == 0
    record = json.loads(capsys.readouterr().out)
    assert record["n_blocks"] == 96
    assert [(row["n_slots"], row["policy"]) for row in record["results"]] == [
        (24, "belady"), (24, "recall"), (24, "lru"),
        (40, "belady"), (40, "recall"), (40, "lru"),
    ]  # fmt: skip
    assert all(0 < row["of_belady_second_half"] <= 1 for row in record["results"] if row["hits"])


def test_the_command_prints_a_table(capsys):
    status = main([str(DEMO), "--sizes", "30", "--per-layer", "--experts", "20", "--phase", "all"])

    assert status == 0
    out = capsys.readouterr().out
    assert "120 experts" in out
    assert all(name in out for name in ("belady", *POLICY_NAMES))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--sizes", "x"], "bad-option"),
        (["--sizes", "0"], "bad-option"),
        (["--sizes", "inf%"], "bad-option"),
        (["--experts", "3"], "bad-option"),
        (["--policies", "arc"], "unknown-policy"),
        (["--policies", "hybrid", "--lfu-weight", "2"], "bad-lfu-weight"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(capsys, options, code):
    assert main([str(DEMO), *options]) == 2

    assert f"error[{code}]" in capsys.readouterr().err


def test_the_command_says_when_a_phase_has_no_events(capsys, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("turn,phase,step,layer,slot,expert,weight\n0,0,0,0,0,1,1\n")

    assert main([str(path)]) == 2
    assert "error[trace-empty]" in capsys.readouterr().err
