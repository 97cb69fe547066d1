"""`colibri bench decode`: tokens a second under memory limits, against llama.cpp if asked."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import colibri_format
from colibri_format import UsageError, format_size, parse_model
from colibri_format.command import EXIT_OK, run_command

from .decode_plan import N_PROMPT, Arm, Limit, parse_limits, peer_arms, plan_prompts, plan_runs
from .decode_run import Outcome, Work, run_all
from .decode_summary import Row, same_tokens, summarise
from .machine_facts import describe_machine
from .read_ahead import read_ahead
from .results import Results, save_results

_LIMITS = "none,75%,50%,35%,25%,15%"
_PEER_READ_AHEAD_KB = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.warm, arguments.tokens = 1, 4, 8
    needed = N_PROMPT + arguments.warm + arguments.tokens
    if arguments.context < needed:
        raise UsageError(
            "bad-context",
            "--context",
            f"{arguments.context} positions",
            f"at least {needed}: prompt, --warm and --tokens",
        )
    if arguments.peer is not None:
        _check_peer(arguments)
    ours = Arm("colibri", "colibri_bench.decode_worker", _config(arguments), is_ours=True)
    with colibri_format.open(arguments.file) as reader:
        model = parse_model(reader.read_file(colibri_format.MODEL_FILE), str(reader.path))
        limits = parse_limits(arguments.budgets, reader.file_size)
    arms = [[ours, *_peers(arguments, limit)] for limit in limits]
    runs = plan_runs(limits, arms, plan_prompts(arguments.rounds, model.vocab_size))
    work = Work(
        file=arguments.file,
        gguf=arguments.gguf,
        n_warm=arguments.warm,
        n_tokens=arguments.tokens,
        n_context=arguments.context,
    )
    console = Console(stderr=True, highlight=False, markup=False)
    outcomes: list[Outcome] = []
    machine = describe_machine(arguments.file).as_dict()
    command = ["colibri", "bench", "decode", *(sys.argv[2:] if argv is None else argv)]

    def results() -> Results:
        return Results(
            kind="decode",
            command=command,
            machine=machine,
            rows=[row.as_dict() for row in summarise(outcomes)],
            notes=_notes(outcomes),
            is_complete=len(outcomes) == len(runs),
            extra={"file": str(arguments.file), "runs": [o.as_dict() for o in outcomes]},
        )

    started = time.monotonic()
    try:
        with read_ahead(arguments.file, _PEER_READ_AHEAD_KB) as state:
            console.print(f"read-ahead of the disk: {state}")
            for outcome in run_all(runs, work):
                outcomes.append(outcome)
                console.print(_progress(outcome, len(outcomes), len(runs), started))
                # After each run: whatever ends this, what was measured is there.
                if arguments.out is not None:
                    save_results(results(), arguments.out)
    except KeyboardInterrupt:
        if not outcomes:
            raise
        console.print(f"interrupted after {len(outcomes)} of {len(runs)} runs: what there is")
    if arguments.json:
        print(json.dumps(results().as_dict()))
        return EXIT_OK
    _print(summarise(outcomes), results().notes)
    return EXIT_OK


def _progress(outcome: Outcome, n_done: int, n_runs: int, started: float) -> str:
    speed = outcome.answer.get("tokens_per_s")
    told = f"{speed:.2f} tokens/s" if speed else outcome.failure
    left = (time.monotonic() - started) / n_done * (n_runs - n_done)
    return f"{n_done}/{n_runs} limit {outcome.limit}, {outcome.arm}: {told}; {left:.0f} s left"


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    states = sorted({outcome.cache_state for outcome in outcomes})
    notes = [f"before each run: {'; '.join(states)}"]
    if not all(outcome.is_cold for outcome in outcomes if outcome.limit_bytes is not None):
        notes.append("the starts were not surely cold: run as root for that")
    is_same = same_tokens(outcomes)
    same = "all engines made the same tokens" if is_same else "the engines made different tokens"
    return [*notes, same]


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of RunConfig by name, from `--set name=value`."""
    config: dict[str, Any] = {}
    for text in arguments.set:
        name, sign, value = text.partition("=")
        if not sign:
            raise UsageError("bad-option", f"--set {text}", "has no =", "NAME=VALUE")
        try:
            config[name] = json.loads(value)
        except json.JSONDecodeError:
            config[name] = value
    return config


def _peers(arguments: argparse.Namespace, limit: Limit) -> list[Arm]:
    return [] if arguments.peer is None else peer_arms(limit, arguments.peer_threads)


def _check_peer(arguments: argparse.Namespace) -> None:
    if find_spec("xllamacpp") is None:
        raise UsageError(
            "no-peer", "llama.cpp", "the package xllamacpp is not installed",
            "it carries llama.cpp", "pip install xllamacpp",
        )  # fmt: skip
    if arguments.gguf is None:
        raise UsageError("no-gguf", "--peer", "no GGUF is named", "the same model: --gguf FILE")
    if not arguments.gguf.is_file():
        raise UsageError("no-gguf", arguments.gguf, "is no file", "the same model as a GGUF")


def _print(rows: Sequence[Row], notes: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("limit")
    table.add_column("engine")
    for name in ("tokens/s", "spread", "ratio", "MiB/token", "hits", "stall", "faults", "peak"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.tokens_per_s is None:
            table.add_row(row.limit, row.arm, "-", row.failure.splitlines()[-1][:40])
            continue
        table.add_row(
            row.limit,
            row.arm,
            f"{row.tokens_per_s:.2f}",
            f"{row.slowest:.2f}-{row.fastest:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f} x",
            "" if row.mib_per_token is None else f"{row.mib_per_token:.1f}",
            "" if row.hit_rate is None else f"{row.hit_rate:.0%}",
            "" if row.stall_share is None else f"{row.stall_share:.0%}",
            "" if row.faults_per_token is None else f"{row.faults_per_token:.1f}",
            "" if row.peak_bytes is None else format_size(row.peak_bytes),
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from error
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("thread counts are at least 1")
    return counts


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri bench decode",
        description="Generates tokens in one process after the other, each started with an empty "
        "page cache under the same cgroup memory limit, which counts page cache as well; engines "
        "take turns, and each round has another prompt.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.colibri")
    parser.add_argument("--peer", choices=("llama.cpp",), help="compare with it (needs xllamacpp)")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same model for the peer")
    parser.add_argument(
        "--budgets",
        default=_LIMITS,
        metavar="LIST",
        help="limits of the whole process: shares of the file's size, sizes, none "
        f"(default: {_LIMITS.replace('%', '%%')})",
    )
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--warm", type=_positive, default=16, metavar="N",
        help="tokens generated before time is taken (default: 16)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=_positive, default=48, metavar="N", help="tokens measured (default: 48)"
    )
    parser.add_argument(
        "--context", type=_positive, default=512, metavar="N", help="positions (default: 512)"
    )
    parser.add_argument(
        "--peer-threads", type=_counts, default=[2, 4], metavar="LIST", help="default: 2,4"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a knob of our runtime, as colibri_runtime.RunConfig names it; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="one round of 8 tokens: under a minute, and rough"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    return parser
