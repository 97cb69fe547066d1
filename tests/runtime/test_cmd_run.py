"""`colibri run` from the outside: text, figures, exit codes."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from colibri_runtime.cmd_run import main
from colibri_runtime.live import LiveLines
from colibri_runtime.pool_plan import SLOT_OVERHEAD
from helpers.random_colibri import make_model, write_random_colibri

MIB = 2**20


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """Four layers of nine experts of 41 KiB each."""
    path = tmp_path_factory.mktemp("run") / "moe.colibri"
    model = make_model(n_layers=4, hidden=96, width=128, n_experts=9, top_k=3)
    write_random_colibri(path, model)
    return path


@pytest.fixture(scope="module")
def dense_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "dense.colibri"
    write_random_colibri(path, make_model(n_layers=5, hidden=96, width=192))
    return path


def run_json(capsys, path, *options, memory="64M", prompt="Hello", n=12):
    status = main(
        [
            str(path),
            "--prompt",
            prompt,
            "--memory",
            memory,
            "--max-tokens",
            str(n),
            "--json",
            *options,
        ]
    )
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return json.loads(out)


def smallest(capsys, path):
    assert main([str(path), "--dry-run", "--json", "--memory", "1G", "--context", "32"]) == 0
    return json.loads(capsys.readouterr().out)["plan"]


def fails(capsys, *arguments):
    """Exit status and code of the error on stderr."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error[")
    return status, err[6 : err.index("]")]


def test_text_goes_to_stdout_and_figures_to_stderr(capsys, model_file):
    record = run_json(capsys, model_file)

    status = main([str(model_file), "--prompt", "Hello", "--memory", "64M", "--max-tokens", "12"])
    out, err = capsys.readouterr()

    assert status == 0
    assert out.rstrip("\n") == record["text"].rstrip("\n")
    for word in ("hit rate", "per token", "stalled", "tokens/s", "budget of 64 MiB"):
        assert word in err


def test_the_record_has_every_figure(capsys, model_file):
    record = run_json(capsys, model_file)

    assert len(record["tokens"]) == 12
    assert record["prompt_tokens"] == list(b"Hello")
    assert record["stop"] == "max-tokens"
    assert record["backend"] in ("native", "numpy")
    assert record["tokens_per_s"] > 0
    assert record["prefill_tokens_per_s"] > 0
    assert 0 <= record["hit_rate"] <= 1
    assert 0 <= record["stall_share"] <= 1
    assert record["bytes_per_token"] >= 0
    assert record["prefetch"]["depth"] == "auto"
    assert record["prefetch"]["from"] == "router"
    assert record["prefetch"]["auto"]["verdict"].startswith("not tried yet")
    assert record["budget_bytes"] == 64 * MIB
    assert record["peak_memory"]["counted_bytes"] == record["plan"]["total_bytes"] <= 64 * MIB
    assert record["io_report"]["mode"] in ("direct", "buffered")
    assert (record["io_report"]["mode"] == "direct") == (record["io_report"]["reason"] == "")
    assert "layers" not in record


@pytest.mark.parametrize("depth", ["0", "1", "2"])
def test_the_text_is_the_same_whatever_the_pool_holds(capsys, model_file, depth):
    roomy = run_json(capsys, model_file)
    plan = smallest(capsys, model_file)
    tight = plan["smallest_bytes"] + 4 * plan["slot_bytes"]

    record = run_json(
        capsys, model_file, "--prefetch-depth", depth, "--context", "32", memory=str(tight)
    )

    assert record["plan"]["n_slots"] < 6
    assert record["tokens"] == roomy["tokens"]


@pytest.mark.parametrize(
    "options",
    [
        ("--io", "threads", "--io-threads", "3"),
        ("--io", "mmap"),
        ("--io", "auto", "--io-depth", "3"),
        ("--policy", "hybrid", "--lfu-weight", "0.3"),
        ("--policy", "lru"),
        ("--prefetch-from", "last", "--prefetch-depth", "2"),
        ("--prefetch-from", "history"),
        ("--cache-size", "200K"),
    ],
)
def test_knobs_change_the_speed_and_not_the_text(capsys, model_file, options):
    expected = run_json(capsys, model_file)["tokens"]

    record = run_json(capsys, model_file, *options)

    assert record["tokens"] == expected
    if options[0] == "--io" and options[1] != "auto":
        assert record["io_report"]["engine"] == options[1]
    if options[0] == "--cache-size":
        assert record["plan"]["pool_bytes"] < 200 * 1024
        assert record["plan"]["n_slots"] == 4


def test_a_history_is_kept_beside_the_model_and_tells_what_hits_to_expect(
    capsys, tmp_path, model_file
):
    path = tmp_path / "moe.colibri"
    path.write_bytes(model_file.read_bytes())
    run_json(capsys, path, "--history", "on")
    assert (tmp_path / "moe.colibri.history").exists()

    options = ["--dry-run", "--memory", "64M", "--history", str(tmp_path / "moe.colibri.history")]
    assert main([str(path), *options]) == 0

    assert "hits to expect" in capsys.readouterr().out


def test_live_lines_come_while_it_runs(capsys, monkeypatch, model_file):
    now = [0.0]

    def clock():
        now[0] += 0.6
        return now[0]

    monkeypatch.setattr(
        "colibri_runtime.cmd_run.LiveLines", lambda total: LiveLines(total, clock=clock)
    )
    arguments = ["--prompt", "Hello", "--memory", "64M", "--max-tokens", "12", "--live"]
    assert main([str(model_file), *arguments]) == 0

    assert capsys.readouterr().err.count("hit%") == 1


def test_exactly_the_smallest_budget_works_and_a_byte_less_does_not(capsys, model_file):
    least = smallest(capsys, model_file)["smallest_bytes"]
    options = ["--prompt", "Hello", "--max-tokens", "12", "--context", "32"]

    record = run_json(capsys, model_file, "--context", "32", memory=str(least))
    assert record["plan"]["n_slots"] == 1
    assert len(record["tokens"]) == 12
    status = main([str(model_file), *options, "--memory", str(least - 1)])
    err = capsys.readouterr().err

    assert status == 2
    assert err.startswith("error[budget-too-small]")
    assert f"at least {least} bytes" in err


def test_a_dense_model_streams_with_fewer_slots_than_layers(capsys, dense_file):
    roomy = run_json(capsys, dense_file)
    plan = smallest(capsys, dense_file)
    tight = plan["smallest_bytes"] + plan["slot_bytes"] + SLOT_OVERHEAD

    record = run_json(capsys, dense_file, "--context", "32", memory=str(tight))

    assert record["plan"]["n_slots"] == 2
    assert record["tokens"] == roomy["tokens"]
    assert record["prefetch"]["recall"] == 1


def test_without_a_budget_one_is_chosen_and_told(capsys, model_file):
    assert main([str(model_file), "--prompt", "Hello", "--max-tokens", "2"]) == 0

    assert "no --memory given: a budget of" in capsys.readouterr().err


def test_the_prompt_may_come_from_stdin(capsys, monkeypatch, model_file):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))

    assert run_json(capsys, model_file, prompt="-")["prompt_tokens"] == list(b"Hello")


@pytest.mark.parametrize("prompt", ["-", "\udcff"])
def test_a_prompt_that_is_no_text_exits_with_2(capsys, monkeypatch, model_file, prompt):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))

    assert fails(capsys, model_file, "--prompt", prompt) == (2, "bad-prompt")


def test_a_dry_run_prints_the_plan_and_runs_nothing(capsys, model_file):
    assert main([str(model_file), "--dry-run", "--memory", "16M", "--prompt", "Hello"]) == 0

    out, err = capsys.readouterr()
    assert "KV cache" in out
    assert "smallest" in out
    assert "69 positions" in out
    assert "tokens/s" not in out + err


def test_a_dry_run_says_what_works_badly(capsys, model_file):
    least = smallest(capsys, model_file)["smallest_bytes"]

    main([str(model_file), "--dry-run", "--memory", str(least), "--context", "32"])

    assert "note: 1 slots are fewer than" in capsys.readouterr().err


def test_a_profile_has_a_row_for_each_layer(capsys, model_file):
    main([str(model_file), "--prompt", "Hello", "--memory", "64M", "--profile"])
    err = capsys.readouterr().err
    record = run_json(capsys, model_file, "--profile")

    rows = [line.split()[0] for line in err.splitlines() if line[:5].strip().isdigit()]
    assert rows == ["0", "1", "2", "3"]
    assert [layer["n_fetches"] > 0 for layer in record["layers"]] == [True] * 4
    # The last pass is still open: nothing came after it.
    assert len(record["passes"]) == 11
    assert {p["n_asks_most"] for p in record["passes"][1:]} == {3}
    assert all(p["total_ns"] > p["stall_ns"] >= 0 for p in record["passes"])


def test_sampling_repeats_with_its_seed(capsys, model_file):
    options = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", "7")

    first = run_json(capsys, model_file, *options)
    second = run_json(capsys, model_file, *options)

    assert first["tokens"] == second["tokens"]
    assert first["tokens"] != run_json(capsys, model_file)["tokens"]


def test_generation_ends_when_the_context_is_full(capsys, model_file):
    record = run_json(capsys, model_file, "--context", "8")

    assert record["stop"] == "context"
    assert len(record["tokens"]) == 4


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--context", "3"], "prompt-too-long"),
        (["--context", "100000"], "bad-context"),
        (["--context", "0"], "bad-option"),
        (["--io-threads", "0"], "bad-option"),
        (["--io-depth", "0"], "bad-option"),
        (["--prefetch-depth", "3"], "bad-option"),
        (["--cache-size", "1K"], "budget-too-small"),
        (["--lfu-weight", "0.5"], "bad-lfu-weight"),
        (["--batch-size", "0"], "bad-option"),
        (["--max-tokens", "0"], "bad-option"),
        (["--temperature", "-1"], "bad-sampling"),
        (["--backend", "abacus"], "unknown-backend"),
        (["--memory", "1K"], "budget-too-small"),
    ],
)
def test_wrong_use_exits_with_2(capsys, model_file, arguments, code):
    assert fails(capsys, model_file, "--prompt", "Hello", "--memory", "64M", *arguments) == (
        2,
        code,
    )


def test_a_prompt_longer_than_the_model_allows_is_refused(capsys, model_file):
    found = fails(capsys, model_file, "--memory", "64M", "--prompt", "x" * 513)

    assert found == (2, "prompt-too-long")


@pytest.mark.parametrize(
    "arguments", [["--memory", "lots"], ["--prefetch-depth", "3"], ["--what"], []]
)
def test_arguments_that_do_not_parse_exit_with_2(capsys, model_file, arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(model_file), *arguments])

    assert caught.value.code == 2
    assert "usage: colibri run" in capsys.readouterr().err


def test_a_missing_file_exits_with_1(capsys, tmp_path):
    assert fails(capsys, tmp_path / "no.colibri", "--prompt", "x") == (1, "file-not-found")


def test_a_file_that_is_none_of_ours_exits_with_1(capsys, tmp_path):
    path = tmp_path / "a.colibri"
    path.write_bytes(bytes(100_000))

    assert fails(capsys, path, "--prompt", "x") == (1, "bad-magic")


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"model.json": None}, "bad-model"),
        ({"model.json": b"{}"}, "bad-model"),
        ({"tokenizer.json": None}, "missing-tokenizer"),
        ({"tokenizer.json": b"{}"}, "bad-tokenizer"),
    ],
)
def test_a_file_that_lacks_what_running_needs_exits_with_1(capsys, tmp_path, files, code):
    path = tmp_path / "a.colibri"
    model = make_model(n_layers=1, hidden=64, width=32, n_experts=2)
    write_random_colibri(path, model, files=files)

    assert fails(capsys, path, "--prompt", "x", "--memory", "64M") == (1, code)


def damaged(tmp_path, model_file):
    """A copy in which every block of layer 3 has a flipped bit."""
    import colibri_format

    path = tmp_path / "damaged.colibri"
    data = bytearray(model_file.read_bytes())
    with colibri_format.open(model_file) as reader:
        for offset in reader.index["offset"][3]:
            data[int(offset) + 50] ^= 16
    path.write_bytes(data)
    return path


def test_a_damaged_block_exits_with_1_unless_checks_are_left_out(capsys, tmp_path, model_file):
    path = damaged(tmp_path, model_file)
    options = ["--prompt", "Hello", "--memory", "64M", "--max-tokens", "3"]

    status = main([str(path), *options])
    err = capsys.readouterr().err
    assert status == 1
    assert "error[block-checksum]" in err
    assert f"{path}: block L3/E" in err
    assert main([str(path), *options, "--no-verify"]) == 0


def start(model_file, *options, **streams):
    code = "import sys; from colibri_runtime.cmd_run import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            str(model_file),
            "--prompt",
            "Hello",
            "--memory",
            "64M",
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **streams,
    )


def test_ctrl_c_prints_what_there_is_and_exits_with_130(model_file):
    process = start(model_file, "--max-tokens", "500", "--temperature", "1", "--seed", "1")
    assert process.stdout.read(1)

    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)

    assert process.returncode == 130
    assert b"ended by interrupted" in err
    assert b"hit rate" in err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_early_is_no_crash(model_file):
    process = start(model_file, "--max-tokens", "500")
    process.stdout.read(1)
    process.stdout.close()

    err = process.stderr.read()
    process.stderr.close()

    assert process.wait(timeout=30) == 1
    assert err == b""


def test_a_terminal_without_unicode_gets_replacements(model_file):
    process = start(
        model_file,
        "--max-tokens",
        "20",
        "--temperature",
        "2",
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )

    out, err = process.communicate(timeout=30)

    assert process.returncode == 0, err
    assert out.isascii()


def test_a_run_writes_down_its_routing(capsys, model_file, tmp_path):
    from colibri_runtime.trace import TracePhase, read_trace

    path = tmp_path / "run.csv"

    run_json(capsys, model_file, "--trace", str(path))

    trace = read_trace(path)
    decode = trace.only(TracePhase.DECODE)
    assert trace.n_layers == 4
    assert {len(event.experts) for event in decode.events} == {3}
    assert len(decode.events) == 4 * 11
    status = main([str(model_file), "--prompt", "Hello", "--memory", "64M", "--trace", str(path)])
    assert status == 1
    assert "error[file-exists]" in capsys.readouterr().err
