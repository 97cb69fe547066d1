"""`colibri bench cache`: what room for experts brings, on a recorded routing trace."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import colibri_format
from colibri_format import UsageError, format_size
from colibri_format.command import EXIT_OK, ends_like_interrupt, interrupt_status, run_command
from colibri_runtime.policies import DEFAULT_POLICY, POLICY_NAMES
from colibri_runtime.trace import TracePhase, read_trace

from .cache_grid import (
    BELADY,
    CachePoint,
    count_tokens,
    curve,
    find_knee,
    measure,
    parse_shares,
    size_for,
)
from .demo_model import demo_trace
from .machine_facts import describe_machine
from .results import ResultKeeper, Results

_TELL_S = 1.0
_SIZES = "2%,5%,10%,15%,20%,30%,40%,50%,70%"
_QUICK_SIZES = "5%,10%,20%,30%,50%"


def main(argv: Sequence[str] | None = None) -> int:
    """Replays and prints; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    if not 0 < arguments.want < 100:
        raise UsageError("bad-option", "--want", f"is {arguments.want}", "above 0 and below 100 %")
    shares = parse_shares(arguments.sizes or (_QUICK_SIZES if arguments.quick else _SIZES))
    names = arguments.policies.split(",")
    if arguments.trace is None:
        with demo_trace() as path:
            trace = read_trace(path)
    else:
        trace = read_trace(arguments.trace)
    if arguments.phase != "all":
        trace = trace.only(TracePhase[arguments.phase.upper()])
    n_blocks, block_bytes = None, None
    if arguments.blocks is not None:
        n_blocks, block_bytes = _blocks(arguments.blocks)
    console = Console(stderr=True, highlight=False, markup=False)
    keeper = ResultKeeper(arguments.out, lambda text: console.print(text, soft_wrap=True))
    chosen = DEFAULT_POLICY if DEFAULT_POLICY in names else names[0]
    command = ["colibri", "bench", "cache", *(sys.argv[2:] if argv is None else argv)]
    machine, n_tokens = describe_machine().as_dict(), count_tokens(trace)
    points: list[CachePoint] = []

    def results(*, is_complete: bool) -> Results:
        return Results(
            kind="cache",
            command=command,
            machine=machine,
            rows=[point.as_dict() for point in points],
            notes=_notes(points, chosen, arguments.want / 100),
            is_complete=is_complete,
            extra={"trace": trace.where, "n_tokens": n_tokens},
        )

    sizes = measure(trace, shares, names, n_blocks=n_blocks, block_bytes=block_bytes)
    status = _collect(
        sizes, len(shares), points, console, lambda: keeper.save(results(is_complete=False))
    )
    final = results(is_complete=status == EXIT_OK)
    keeper.save(final)
    if arguments.json:
        print(json.dumps(final.as_dict()))
    else:
        _print(points, final.notes)
    keeper.finish()
    return status


def _collect(
    sizes: Iterable[list[CachePoint]],
    n_all: int,
    points: list[CachePoint],
    console: Console,
    save: Callable[[], object],
) -> int:
    """0 when all sizes are in `points`, else the status to exit with: what there is remains."""
    started = told = time.monotonic()
    n_done = 0
    try:
        with ends_like_interrupt():
            for of_size in sizes:
                points += of_size
                n_done += 1
                now = time.monotonic()
                left = (now - started) / n_done * (n_all - n_done)
                if now - told > _TELL_S:
                    console.print(
                        f"{n_done}/{n_all}: room for {of_size[0].share:.0%}; {left:.0f} s left"
                    )
                    told = now
                    save()
    except KeyboardInterrupt as error:
        if not points:
            raise
        console.print(f"interrupted after {n_done} of {n_all} sizes: what there is")
        return interrupt_status(error)
    return EXIT_OK


def _blocks(path: Path) -> tuple[int, int]:
    """How many blocks a file has, and what a slot for any of them takes."""
    with colibri_format.open(path) as reader:
        sizes = reader.index["size"]
        n_blocks = int((sizes > 0).sum())
        if not n_blocks:
            raise UsageError("no-blocks", path, "has no expert blocks", "a file with experts")
        alignment = reader.geometry.alignment
        return n_blocks, -(-int(sizes.max()) // alignment) * alignment


def _notes(points: Sequence[CachePoint], policy: str, wanted: float) -> list[str]:
    line = curve(points, policy)
    of_policy = {point.share: point for point in points if point.policy == policy}
    notes = [
        "replayed from a cold start, all experts of a layer at once; a short trace flatters no "
        "policy but understates hits of a long run"
    ]
    knee = find_knee(line)
    if knee is None:
        notes.append(f"{policy}: the curve has no knee between these sizes")
    else:
        notes.append(
            f"{policy}: the knee is at {knee:.0%} of the experts{_room(of_policy[knee])}: more "
            "room brings clearly less from there on"
        )
    needed = size_for(line, wanted)
    if needed is None:
        best = max(rate for _, rate in line)
        notes.append(f"{policy}: none of these sizes reaches {wanted:.0%} hits; most: {best:.1%}")
    else:
        any_point = points[0]
        room = ""
        if any_point.pool_bytes is not None:
            total = any_point.pool_bytes / any_point.n_slots * (any_point.n_slots / any_point.share)
            room = f", a --cache-size of {format_size(int(needed * total))}"
        notes.append(f"{policy}: {wanted:.0%} hits need room for {needed:.0%} of the experts{room}")
    return notes


def _room(point: CachePoint) -> str:
    return "" if point.pool_bytes is None else f", {format_size(point.pool_bytes)}"


def _print(points: Sequence[CachePoint], notes: Sequence[str]) -> None:
    names = list(dict.fromkeys(point.policy for point in points))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("room", justify="right")
    table.add_column("experts", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for share in sorted({point.share for point in points}):
        row = {point.policy: point for point in points if point.share == share}
        cells = []
        for name in names:
            point = row[name]
            read = point.bytes_per_token
            told = f"{point.misses_per_token:.1f}" if read is None else format_size(int(read))
            cells.append(f"{point.hit_rate:.1%}, {told}")
        table.add_row(f"{share:.0%}", str(row[BELADY].n_slots), *cells)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print("hit rate, and what a token reads (bytes, or experts where sizes are unknown)")
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri bench cache",
        description="Replays a routing trace (CSV or Parquet, as colibri run --trace records) "
        "through cache policies and Belady's optimum, and names the knee of the curve and the "
        "room that a wanted hit rate needs.",
    )
    parser.add_argument(
        "trace", type=Path, nargs="?", metavar="TRACE", help="default: the demo model's"
    )
    parser.add_argument(
        "--blocks", type=Path, metavar="FILE.colibri", help="number and size of the blocks"
    )
    parser.add_argument(
        "--sizes",
        metavar="LIST",
        help=f"shares of the experts (default: {_SIZES})".replace("%", "%%"),
    )
    parser.add_argument(
        "--policies", default=",".join(POLICY_NAMES), metavar="LIST", help="default: %(default)s"
    )
    parser.add_argument(
        "--phase", choices=("decode", "prefill", "all"), default="decode", help="default: decode"
    )
    parser.add_argument(
        "--want", type=float, default=90.0, metavar="PERCENT", help="hit rate wanted (default: 90)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    return parser
