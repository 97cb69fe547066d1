"""`colibri bench decode`: tokens a second under memory limits, against llama.cpp if asked."""

from __future__ import annotations

import argparse
import json
import os
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
from colibri_format.command import (
    EXIT_DATA,
    EXIT_OK,
    ends_like_interrupt,
    interrupt_status,
    run_command,
)
from colibri_runtime import RunConfig

from .decode_checks import check_outcomes
from .decode_plan import (
    N_PROMPT,
    Arm,
    Limit,
    Run,
    parse_limits,
    peer_arms,
    plan_prompts,
    plan_runs,
    plan_timed,
)
from .decode_run import Outcome, Work, run_all
from .decode_summary import Row, same_tokens, summarise
from .machine_facts import describe_machine
from .read_ahead import read_ahead
from .results import ResultKeeper, Results
from .same_model import compare_models
from .timeline_results import timeline_results

_LIMITS = "none,75%,50%,35%,25%,15%"
_QUICK_LIMITS = "50%,25%"
_QUICK_LIMITS_WITH_PEER = "50%"
_PEER_READ_AHEAD_KB = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    _settle(arguments)
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
    console = Console(stderr=True, highlight=False, markup=False)
    keeper = ResultKeeper(arguments.out, lambda text: console.print(text, soft_wrap=True))
    prompts = plan_prompts(arguments.rounds, model.vocab_size)
    arms = [[ours, *_peers(arguments, limit)] for limit in limits]
    runs = plan_runs(limits, arms, prompts)
    if arguments.timeline:
        runs += plan_timed(limits, ours, prompts[0])
    work = Work(
        file=arguments.file,
        gguf=arguments.gguf,
        n_warm=arguments.warm,
        n_tokens=arguments.tokens,
        n_context=arguments.context,
    )
    found = [] if arguments.gguf is None else compare_models(arguments.file, arguments.gguf)
    report = _Report(
        ["colibri", "bench", "decode", *(sys.argv[2:] if argv is None else argv)],
        arguments,
        describe_machine(arguments.file).as_dict(),
        found,
        len(runs),
    )
    status = _measure(report, runs, work, console, keeper)
    results = report.results()
    if arguments.json:
        print(json.dumps(results.as_dict()))
    else:
        _print(summarise(report.outcomes), results.notes)
    keeper.finish()
    if status != EXIT_OK:
        return status
    return EXIT_OK if any(outcome.answer for outcome in report.outcomes) else EXIT_DATA


def _settle(arguments: argparse.Namespace) -> None:
    """Fills in what was left to us: quick runs are fewer and shorter."""
    has_peer, is_quick = arguments.peer is not None, arguments.quick
    limits = _LIMITS
    if is_quick:
        limits = _QUICK_LIMITS_WITH_PEER if has_peer else _QUICK_LIMITS
    for name, value, quick in (
        ("rounds", 3, 3 if has_peer else 4), ("warm", 16, 4), ("tokens", 48, 8),
    ):  # fmt: skip
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if is_quick else value)
    if arguments.budgets is None:
        arguments.budgets = limits
    if arguments.peer_threads is None:
        n = len(os.sched_getaffinity(0))
        arguments.peer_threads = [n] if arguments.quick else [n, 2 * n]


class _Report:
    """What was measured so far, as results."""

    def __init__(
        self,
        command: list[str],
        arguments: argparse.Namespace,
        machine: dict[str, Any],
        found: list[str],
        n_runs: int,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.timed: list[Outcome] = []
        self.read_ahead = ""
        self._command = command
        self._arguments = arguments
        self._machine = machine
        self._found = found
        self._n_runs = n_runs

    @property
    def n_done(self) -> int:
        return len(self.outcomes) + len(self.timed)

    @property
    def is_complete(self) -> bool:
        return self.n_done == self._n_runs

    def add(self, run: Run, outcome: Outcome) -> None:
        (self.timed if run.is_timed else self.outcomes).append(outcome)

    def results(self) -> Results:
        arguments = self._arguments
        extra: dict[str, Any] = {
            "file": str(arguments.file),
            "read_ahead": self.read_ahead,
            "runs": [outcome.as_dict() for outcome in self.outcomes],
        }
        if arguments.peer is not None:
            extra["peer"] = {
                "gguf": str(arguments.gguf),
                "threads": arguments.peer_threads,
                "repack": ["on" if repack else "off" for repack in arguments.peer_repack],
            }
        return Results(
            kind="decode",
            command=self._command,
            machine=self._machine,
            rows=[row.as_dict() for row in summarise(self.outcomes)],
            notes=[
                *self._found,
                *_notes(self.outcomes),
                f"read-ahead of the disk: {self.read_ahead}",
            ],
            is_complete=self.is_complete,
            extra=extra,
        )

    def timeline(self) -> Results:
        return timeline_results(
            self.timed, self.outcomes, self._command, self._machine, self.is_complete
        )


def _measure(
    report: _Report, runs: Sequence[Run], work: Work, console: Console, keeper: ResultKeeper
) -> int:
    """0 when all runs were made, else the status to exit with: what there is remains."""
    started = time.monotonic()
    try:
        with ends_like_interrupt(), read_ahead(work.file, _PEER_READ_AHEAD_KB) as state:
            report.read_ahead = state
            console.print(f"read-ahead of the disk: {state}")
            for run, outcome in zip(runs, run_all(runs, work), strict=True):
                report.add(run, outcome)
                left = (time.monotonic() - started) / report.n_done * (len(runs) - report.n_done)
                console.print(
                    f"{report.n_done}/{len(runs)} limit {outcome.limit}, {outcome.arm}"
                    f"{' (timed)' if run.is_timed else ''}: {_told(outcome)}; {left:.0f} s left"
                )
                # After each run: whatever ends this, what was measured is there.
                keeper.save(report.results())
                if report.timed:
                    keeper.save(report.timeline())
    except KeyboardInterrupt as error:
        if not report.outcomes:
            raise
        console.print(f"interrupted after {report.n_done} of {len(runs)} runs: what there is")
        return interrupt_status(error)
    return EXIT_OK


def _told(outcome: Outcome) -> str:
    speed = outcome.answer.get("tokens_per_s")
    return f"{speed:.2f} tokens/s" if speed else outcome.failure


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    states = sorted({outcome.cache_state for outcome in outcomes})
    notes = [*check_outcomes(outcomes), f"before each run: {'; '.join(states)}"]
    if len({outcome.arm for outcome in outcomes if outcome.answer}) > 1:
        is_same = same_tokens(outcomes)
        notes.append(
            "all engines made the same tokens"
            if is_same
            else "OTHER TOKENS: the engines made different tokens, so they did not do the same work"
        )
    return notes


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
    try:
        RunConfig(**config)
    except TypeError as error:
        raise UsageError(
            "bad-option", "--set", str(error), "a knob of colibri_runtime.RunConfig"
        ) from error
    return config


def _peers(arguments: argparse.Namespace, limit: Limit) -> list[Arm]:
    if arguments.peer is None:
        return []
    return peer_arms(limit, arguments.peer_threads, arguments.peer_repack)


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
    names = (
        "tokens/s",
        "spread",
        "ratio",
        "MiB/token",
        "needed",
        "hits",
        "stall",
        "faults",
        "peak",
    )
    for name in names:
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
            ""
            if row.ratio is None
            else f"{row.ratio:.2f} ({row.ratio_least:.2f}-{row.ratio_most:.2f})",
            "" if row.mib_per_token is None else f"{row.mib_per_token:.1f}",
            "" if row.needed_mib_per_token is None else f"{row.needed_mib_per_token:.1f}",
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


def _repacks(text: str) -> list[bool]:
    known = {"off": False, "on": True}
    parts = list(dict.fromkeys(text.split(",")))
    if not set(parts) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r} is not off, on, or off,on")
    return [known[part] for part in parts]


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
        metavar="LIST",
        help="limits of the whole process: shares of the file's size, sizes, none "
        f"(default: {_LIMITS.replace('%', '%%')})",
    )
    parser.add_argument("--rounds", type=_positive, metavar="N", help="default: 3")
    parser.add_argument(
        "--warm", type=_positive, metavar="N",
        help="tokens generated before time is taken (default: 16)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=_positive, metavar="N", help="tokens measured (default: 48)"
    )
    parser.add_argument(
        "--context", type=_positive, default=512, metavar="N", help="positions (default: 512)"
    )
    parser.add_argument(
        "--peer-threads", type=_counts, metavar="LIST",
        help="thread counts, each an arm of its own; the best counts "
        "(default: as many as processors, and twice that)",
    )  # fmt: skip
    parser.add_argument(
        "--peer-repack", type=_repacks, default=[False, True], metavar="off,on",
        help="whether it repacks weights; on is tried only without a limit, as it is killed "
        "under one (default: off,on)",
    )  # fmt: skip
    parser.add_argument(
        "--timeline", action="store_true",
        help="one more run of ours under each limit, whose reads, waits and steps are written "
        "down: timeline.json, and in the page",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a knob of our runtime, as colibri_runtime.RunConfig names it; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help=f"four rounds of 8 tokens at {_QUICK_LIMITS} (with a peer three at "
        f"{_QUICK_LIMITS_WITH_PEER}): "
        "under a minute with a model of 4 GB, and rough".replace("%", "%%"),
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    return parser
