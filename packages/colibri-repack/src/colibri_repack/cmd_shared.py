"""What the commands of this package share: arguments, errors, progress and tables."""

from __future__ import annotations

import json
import shlex
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from colibri_format import ColibriError, format_size, parse_size, printable
from colibri_format.command import EXIT_DATA, EXIT_OK, run_command

from .facts import FileFacts, LayerTypes

# rich takes longer to load than most commands need for all they do: only where it draws.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

__all__ = [
    "EXIT_DATA",
    "EXIT_OK",
    "add_volume_option",
    "columns_table",
    "facts_rows",
    "layer_rows",
    "new_console",
    "print_json",
    "print_notes",
    "print_rows",
    "print_warnings",
    "progress_bar",
    "run",
    "size_argument",
]

_FILE_WIDTH: Final = 200
_USAGE_CODES: Final = frozenset(
    {
        "bad-size",
        "bad-alignment",
        "bad-quant",
        "bad-layout",
        "bad-volumes",
        "budget-too-small",
        "no-such-layer",
        "output-is-input",
        "unknown-ro-compat",
    }
)


def run(body: Callable[[], int]) -> int:
    """The exit status of `body`, or that of the error it ended with, told on stderr."""
    return run_command(
        body,
        usage_codes=_USAGE_CODES,
        on_interrupt="interrupted: nothing half-written has the final name",
    )


def size_argument(text: str) -> int:
    """`text` as a size in bytes, for argparse."""
    try:
        return parse_size(text)
    except ColibriError as error:
        raise ArgumentTypeError(str(error)) from error


def add_volume_option(parser: ArgumentParser) -> None:
    """`--volume DIR`, for commands that read what volumes hold."""
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder to search for volumes, after the file's own; may be repeated",
    )


def print_json(record: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(record, indent=1))


@contextmanager
def progress_bar(label: str, *, is_quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A callback for bytes done and in all, shown on stderr with rate and time left.

    A bar on a terminal; elsewhere a line at every tenth. Nothing with `is_quiet`.
    """
    if is_quiet:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(label).show
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks: list[TaskID] = []

        def show(done: int, total: int) -> None:
            if not tasks:
                # What was there before counts as done, and not towards the rate.
                tasks.append(bar.add_task(label, total=total, completed=done))
            bar.update(tasks[0], completed=done)

        yield show


class _Lines:
    """Progress for logs: small work stays silent, large work says each tenth."""

    _LEAST_BYTES = 2**30

    def __init__(self, label: str) -> None:
        self._label = label
        self._tenth = 0
        self._first: tuple[float, int] | None = None

    def show(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if self._first is None:
            # What was there before does not count towards the rate.
            self._first = time.monotonic(), done
            self._tenth = tenth
        if total >= self._LEAST_BYTES and tenth > self._tenth:
            self._tenth = tenth
            text = f"{self._label}: {format_size(done)} of {format_size(total)}"
            seconds = time.monotonic() - self._first[0]
            if rate := int((done - self._first[1]) / seconds) if seconds > 0 else 0:
                left = round((total - done) / rate)
                text += f", {format_size(rate)}/s, {left // 60}:{left % 60:02} left"
            print(text, file=sys.stderr, flush=True)


def new_console() -> Console:
    """A console on stdout as it is now; wide where there is no terminal to fit into."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)


def facts_rows(facts: FileFacts) -> list[tuple[str, str]]:
    """The facts of a file as names and values."""
    is_moe = facts.n_experts > 1
    moe = f"{facts.n_experts} a layer" + (f", top-{facts.top_k}" if facts.top_k else "")
    rows = [
        ("family", facts.family),
        ("layers", str(facts.n_layers)),
        ("experts", moe if is_moe else "1 a layer, top-1: a dense model"),
    ]
    rows += [
        (
            "block",
            f"{format_size(block.size)} ({block.size} bytes, {block.padded} padded) "
            f"in layers {_ranges(block.layers)}",
        )
        for block in facts.block_sizes
    ]
    rows += [
        ("blocks", f"{facts.n_blocks}, {format_size(facts.block_bytes)}"),
        ("alignment", format_size(facts.alignment)),
        ("padding", f"{facts.padding_share:.2%} of the blocks' space; {_shares(facts)}"),
        ("index", format_size(facts.index_bytes)),
        (
            "read per token",
            "not known: the file describes no model"
            if facts.token_bytes is None
            else f"{format_size(facts.token_bytes)} when no expert is resident",
        ),
        ("dense tensors", format_size(facts.dense_bytes)),
    ]
    rows += [
        (
            f"type {name}",
            f"{total.dense_tensors} dense tensors {format_size(total.dense_bytes)}, "
            f"{total.segments} segments {format_size(total.segment_bytes)}",
        )
        for name, total in facts.types.items()
    ]
    if facts.interleaved_bytes:
        rows.append(("interleaved", f"{format_size(facts.interleaved_bytes)}, 16 rows at a time"))
    rows += [
        ("embedded files", format_size(facts.embedded_bytes)),
        ("file", f"{format_size(facts.file_size)} ({facts.file_size} bytes)"),
    ]
    rows += [
        (f"volume {label}", f"{format_size(size)} ({size} bytes)")
        for label, size in facts.volume_sizes.items()
    ]
    return rows


def layer_rows(facts: FileFacts) -> list[tuple[str, str]]:
    """Which types each layer has, layers alike in one row."""
    return [(f"layers {_ranges(types.layers)}", _types(types)) for types in facts.layer_types]


def _shares(facts: FileFacts) -> str:
    shares = facts.padding_shares.items()
    return ", ".join(f"{share:.2%} at {alignment // 1024}K" for alignment, share in shares)


def _types(types: LayerTypes) -> str:
    parts = [", ".join(f"{role} {name}" for role, name in types.segments.items())]
    parts.append("dense " + ", ".join(f"{n} {name}" for name, n in types.dense.items()))
    return "; ".join(part for part in parts if part not in ("", "dense "))


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Names and values, a line each, never folded: paths stay whole."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(printable(f"{name:<{width}}  {value}"))


def print_notes(notes: Sequence[str], warnings: Sequence[str] = ()) -> None:
    """What a report has to say in words, a line each, never folded."""
    for note in notes:
        print(printable(f"note: {note}"))
    for warning in warnings:
        print(printable(f"warning: {warning}"))


def print_warnings(path: object, warnings: Sequence[str]) -> None:
    """What was found damaged and made good, on stderr, and what restores it."""
    for warning in warnings:
        print(printable(f"warning: {path}: {warning}"), file=sys.stderr)
    if warnings:
        print(f"colibri repair {shlex.quote(str(path))} restores it", file=sys.stderr)


def columns_table(*columns: str) -> Table:
    """An empty table with headings."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _ranges(numbers: tuple[int, ...]) -> str:
    """`(0, 1, 2, 5)` as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
