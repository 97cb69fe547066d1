"""`colibri doctor`: what this machine is good for, and what to change."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import colibri_format
from colibri_format import format_size
from colibri_format.command import EXIT_OK, run_command
from colibri_runtime import RunConfig, load_backend
from colibri_runtime.runtime import describe_needs, plan_run, read_model

from .doctor_plan import Expectation, Finding, ModelCost, advise, expect, judge
from .doctor_probe import probe_machine
from .io_files import Blocks, blocks_of


def main(argv: Sequence[str] | None = None) -> int:
    """Looks and prints; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    blocks = cost = None
    if arguments.file is not None:
        blocks = blocks_of(arguments.file, arguments.volume)
        cost = _cost(arguments.file, blocks, arguments.volume)
    probe = probe_machine(blocks, arguments.folder)
    findings = judge(probe)
    expected: list[Expectation] = []
    words: list[str] = []
    if cost is not None:
        expected = expect(cost, probe)
        words = advise(cost, expected, probe.available_bytes)
    if arguments.json:
        record = {
            "findings": [finding.as_dict() for finding in findings],
            "expected": [expectation.as_dict() for expectation in expected],
            "advice": words,
        }
        print(json.dumps(record))
        return EXIT_OK
    _print(probe.kernel, findings, expected, words)
    return EXIT_OK


def _cost(path: Path, blocks: Blocks, volumes: Sequence[Path]) -> ModelCost:
    """What a token costs, and the budgets between which the model works."""
    with colibri_format.open(path, volumes=volumes) as reader:
        model = read_model(reader)
        backend = load_backend("auto")
        needs = describe_needs(reader, model, backend, RunConfig())
        plan = plan_run(needs, RunConfig(memory_bytes=2**62))
        return ModelCost(
            file_bytes=reader.file_size,
            n_blocks=plan.n_blocks,
            block_bytes=blocks.largest,
            dense_bytes=needs.dense_bytes,
            expert_bytes=blocks.token_bytes or 0,
            smallest_budget=plan.smallest_bytes,
            largest_budget=plan.largest_bytes,
        )


def _print(
    kernel: str,
    findings: Sequence[Finding],
    expected: Sequence[Expectation],
    words: Sequence[str],
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 100)
    console.print(f"Linux {kernel}" if kernel else "")
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        told = finding.found + (f"\n-> {finding.advice}" if finding.advice else "")
        table.add_row(finding.grade.value, finding.subject, told)
    console.print(table)
    if expected:
        console.print()
        speeds = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("--memory", "experts that fit", "tokens/s", "range", "bound by"):
            speeds.add_column(name, justify="right")
        for row in expected:
            speeds.add_row(
                format_size(row.budget_bytes),
                f"{row.share:.0%}",
                f"{row.expected:.1f}",
                f"{row.uniform:.1f}-{row.typical:.1f}",
                row.bound,
            )
        console.print(speeds)
        console.print(
            "an estimate from this probe: range from all experts chosen alike to a model with "
            "strong skew, tokens/s for one between them; half of the shorter of computing and "
            "reading hidden behind the longer. colibri bench decode measures it",
            soft_wrap=True,
        )
    for text in words:
        console.print(text, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri doctor",
        description="Looks at kernel, disk, memory and processor, measures for some seconds, and "
        "says what speed to expect of a model, which budget to choose and what to change.",
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE.colibri")
    parser.add_argument(
        "--volume", type=Path, action="append", default=[], metavar="DIR",
        help="a folder with a volume of a striped file; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), metavar="DIR",
        help="without a file: where 256 MiB are written to measure with, and removed (here)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    return parser
