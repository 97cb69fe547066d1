"""Which runs a decode benchmark makes, and what they come to."""

import json
import signal

import pytest

from colibri_bench.cmd_bench import main
from colibri_bench.decode_plan import (
    ALLOWANCE,
    Arm,
    Limit,
    parse_limits,
    peer_arms,
    plan_prompts,
    plan_runs,
)
from colibri_bench.decode_run import Outcome
from colibri_bench.decode_summary import same_tokens, summarise
from colibri_bench.results import load_results
from colibri_bench.token_time import SHARES
from colibri_format import UsageError
from colibri_format.command import Terminated

OURS = Arm("colibri", "ours", is_ours=True)
PEER = Arm("llama.cpp", "peer")
GIB = 2**30


def outcome(round_number, arm, speed, tokens=(1, 2, 3), **changes):
    answer = {
        "tokens": list(tokens),
        "n_tokens": 4,
        "tokens_per_s": speed,
        "read_bytes": 8 * 2**20,
        "n_major_faults": 2,
    }
    if arm.is_ours:
        answer |= {
            "needed_bytes": 6 * 2**20,
            "hit_rate": 0.5,
            "stall_s": 0.25,
            "times_s": [0.5, 0.5],
        }
    values = {
        "round": round_number, "limit": "50%", "limit_bytes": GIB, "arm": arm.name,
        "is_ours": arm.is_ours, "is_cold": True, "cache_state": "dropped", "peak_bytes": 7,
        "n_killed": 0, "answer": answer,
    }  # fmt: skip
    return Outcome(**(values | changes))


def test_limits_are_shares_sizes_or_none():
    assert parse_limits("none, 50%,1G", 4 * GIB) == [
        Limit("none", None),
        Limit("50%", 2 * GIB),
        Limit("1G", GIB),
    ]


@pytest.mark.parametrize("text", ["", "x%", "1X", "0%", str(ALLOWANCE)])
def test_limits_that_cannot_be_are_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_limits(text, GIB)

    assert caught.value.code == "bad-limit"


def test_peer_repacks_its_weights_only_where_memory_allows():
    assert [a.options["use_repack"] for a in peer_arms(Limit("none", None), [2])] == [False, True]
    assert [a.options["use_repack"] for a in peer_arms(Limit("1G", GIB), [2, 4])] == [False, False]


def test_repacking_can_be_left_out_or_asked_for_alone():
    unlimited = Limit("none", None)

    assert [a.options["use_repack"] for a in peer_arms(unlimited, [2], [True])] == [True]
    assert [a.name for a in peer_arms(unlimited, [2], [False])] == ["llama.cpp 2 threads"]


def test_arms_take_turns_and_rounds_begin_with_another():
    limits = [Limit("none", None), Limit("1G", GIB)]
    runs = plan_runs(limits, [[OURS, PEER], [OURS, PEER]], plan_prompts(2, 1000))

    assert [(r.round, r.limit.name, r.arm.name) for r in runs] == [
        (0, "none", "colibri"), (0, "none", "llama.cpp"),
        (0, "1G", "colibri"), (0, "1G", "llama.cpp"),
        (1, "none", "llama.cpp"), (1, "none", "colibri"),
        (1, "1G", "llama.cpp"), (1, "1G", "colibri"),
    ]  # fmt: skip


def test_prompts_differ_and_fit_the_vocabulary():
    prompts = plan_prompts(5, 300)

    assert len(set(prompts)) == 5
    assert all(0 <= token < 300 for prompt in prompts for token in prompt)


def test_ratio_is_to_the_best_peer_round_by_round():
    slow = Arm("slow", "peer")
    rows = summarise(
        [
            *(outcome(i, OURS, speed) for i, speed in enumerate((10.0, 12.0, 30.0))),
            *(outcome(i, PEER, speed) for i, speed in enumerate((5.0, 4.0, 6.0))),
            *(outcome(i, slow, 1.0) for i in range(3)),
        ]
    )

    ours = rows[0]
    assert (ours.tokens_per_s, ours.slowest, ours.fastest) == (12.0, 10.0, 30.0)
    assert (ours.ratio, ours.ratio_least, ours.ratio_most) == (3.0, 2.0, 5.0)
    assert (ours.mib_per_token, ours.stall_share, ours.faults_per_token) == (2.0, 0.25, 0.5)
    assert [row.needed_mib_per_token for row in rows] == [1.5, None, None]
    assert [row.ratio for row in rows[1:]] == [None, None]


def test_killed_runs_are_counted_and_named():
    killed = outcome(0, PEER, 1.0, answer={}, failure="killed: memory ran out", n_killed=1)
    row = summarise([killed, outcome(1, PEER, 2.0)])[0]

    assert (row.n_runs, row.n_failed, row.tokens_per_s) == (2, 1, 2.0)
    assert row.failure == "killed: memory ran out"


def test_tokens_that_the_peer_does_not_name_make_no_difference():
    assert same_tokens([outcome(0, OURS, 1, (1, 2, 3, 4)), outcome(0, PEER, 1, (1, 3, 4))])
    assert not same_tokens([outcome(0, OURS, 1, (1, 2, 3)), outcome(0, PEER, 1, (1, 4))])
    assert same_tokens([outcome(0, OURS, 1, (1, 2)), outcome(1, PEER, 1, (5, 6))])


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--context", "8"], "bad-context"),
        (["--peer", "llama.cpp"], "no-gguf"),
        (["--peer", "llama.cpp", "--gguf", "absent.gguf"], "no-gguf"),
        (["--set", "threads"], "bad-option"),
        (["--set", "no_such_knob=1"], "bad-option"),
        (["--set", "threads=0"], "bad-option"),
        (["--budgets", "1e9999%"], "bad-limit"),
        (["--budgets", "1%"], "bad-limit"),
    ],
)
def test_command_refuses_what_cannot_be_measured(options, code, demo_file, capsys, monkeypatch):
    monkeypatch.setattr("colibri_bench.cmd_decode.find_spec", lambda name: object())

    assert main(["decode", str(demo_file), *options]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_command_without_the_peers_package_says_what_to_install(demo_file, capsys, monkeypatch):
    monkeypatch.setattr("colibri_bench.cmd_decode.find_spec", lambda name: None)

    assert main(["decode", str(demo_file), "--peer", "llama.cpp"]) == 2
    assert "pip install xllamacpp" in capsys.readouterr().err


def test_command_measures_without_limit(demo_file, tmp_path, capsys, monkeypatch):
    # The page cache of the machine is no test's to empty.
    monkeypatch.setattr("colibri_bench.decode_run.drop_caches", lambda *files: _Kept())
    monkeypatch.setattr("colibri_bench.cmd_decode.read_ahead", _no_read_ahead)
    out = tmp_path / "results"
    options = ["--budgets", "none", "--rounds", "1", "--warm", "1", "--tokens", "2"]

    assert main(["decode", str(demo_file), *options, "--context", "64", "--out", str(out)]) == 0

    record = json.loads((out / "decode.json").read_text())
    assert record["rows"][0]["n_failed"] == 0, record
    assert record["rows"][0]["tokens_per_s"] > 0
    assert record["command"][:3] == ["colibri", "bench", "decode"]
    assert "model read into memory beforehand" in capsys.readouterr().out


def test_child_that_fails_is_an_outcome(demo_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("colibri_bench.decode_run.drop_caches", lambda *files: _Kept())
    monkeypatch.setattr("colibri_bench.cmd_decode.read_ahead", _no_read_ahead)
    options = ["--budgets", "none", "--rounds", "1", "--set", "memory_bytes=1000", "--json"]

    assert main(["decode", str(demo_file), *options]) == 1

    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["n_failed"] == 1
    assert "budget" in row["failure"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (Terminated(signal.SIGTERM), 143)]
)
def test_interrupted_command_keeps_what_it_has(
    error, status, demo_file, tmp_path, capsys, monkeypatch
):
    def interrupted(runs, work):
        yield outcome(0, OURS, 3.0)
        raise error

    monkeypatch.setattr("colibri_bench.cmd_decode.run_all", interrupted)
    monkeypatch.setattr("colibri_bench.cmd_decode.read_ahead", _no_read_ahead)
    options = ["--budgets", "none", "--rounds", "2", "--out", str(tmp_path)]

    assert main(["decode", str(demo_file), *options]) == status

    assert "interrupted after 1 of 2 runs: what there is" in capsys.readouterr().err
    results = load_results(tmp_path / "decode.json")
    assert not results.is_complete
    assert results.rows[0]["tokens_per_s"] == 3.0


def test_timeline_is_recorded_beside_the_figures(demo_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("colibri_bench.decode_run.drop_caches", lambda *files: _Kept())
    monkeypatch.setattr("colibri_bench.cmd_decode.read_ahead", _no_read_ahead)
    options = ["--budgets", "none", "--rounds", "1", "--warm", "2", "--tokens", "4", "--timeline"]

    assert main(["decode", str(demo_file), *options, "--out", str(tmp_path)]) == 0

    assert load_results(tmp_path / "decode.json").rows[0]["n_runs"] == 1
    found = load_results(tmp_path / "timeline.json")
    assert found.is_complete
    assert {row["layer"] for row in found.rows} == {None, *range(6)}
    assert {"attention", "experts", "dense"} <= {row["kind"] for row in found.rows}
    (sums,) = found.extra["tokens"]
    assert sums["n_tokens"] == 4
    assert sums["total"] == pytest.approx(sum(sums[name] for name in SHARES))
    assert "while timed" in found.notes[0]


class _Kept:
    is_cold = False
    how = "not dropped"


class _no_read_ahead:  # noqa: N801
    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return "left"

    def __exit__(self, *arguments):
        pass
