"""`colibri bench io`: how fast this machine reads expert blocks, in every way there is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from colibri_format import ColibriError, StorageError, UsageError, parse_size
from colibri_format.command import EXIT_OK, run_command

from .io_files import Blocks, blocks_of, copies_in_memory, synthetic_file
from .io_plan import (
    Extent,
    IoRow,
    Reading,
    Way,
    order_ways,
    parse_sizes,
    plan_blocks,
    plan_ways,
    share_out,
    summarise,
    verdict,
)
from .io_run import MAX_DEPTH, read_extents
from .machine_facts import describe_machine
from .page_cache import drop_caches
from .picture import size_label
from .results import Results, save_results
from .throttle import throttled

ENGINES: Final = (
    "mmap", "mmap willneed", "mmap random", "buffered", "threads", "aio", "uring", "tmpfs"
)  # fmt: skip
_SIZES: Final = "64K,1M,3.5M,8M"
_FIRST, _AGAIN = "first", "re-read"


@dataclass(slots=True)
class _Bench:
    """What is read, how much of it, and what came of it."""

    ways: list[Way]
    n_rounds: int
    most_bytes: int
    console: Console
    readings: list[Reading] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)
    n_done: int = 0
    n_all: int = 0
    started: float = field(default_factory=time.monotonic)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.bytes = 1, 48 * 2**20
        arguments.depths = arguments.depths[-1:]
    engines = arguments.engines.split(",")
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown:
        raise UsageError(
            "bad-option", "--engines", f"{', '.join(unknown)}", f"some of {','.join(ENGINES)}"
        )
    bench = _Bench(
        plan_ways(engines, arguments.depths),
        arguments.rounds,
        arguments.bytes,
        Console(stderr=True, highlight=False),
    )
    is_complete = True
    token_bytes = None
    with ExitStack() as stack:
        if arguments.file is None:
            path = stack.enter_context(synthetic_file(arguments.folder, arguments.synthetic))
            sources = [
                (size, Blocks([path], plan_blocks(arguments.synthetic, size), None))
                for size in parse_sizes(arguments.sizes)
            ]
        else:
            path = arguments.file
            blocks = blocks_of(path, arguments.volume)
            sources, token_bytes = [(blocks.largest, blocks)], blocks.token_bytes
        memory = [path]
        if "tmpfs" in engines:
            memory = stack.enter_context(copies_in_memory(sources[0][1].paths))
        if arguments.throttle is not None:
            stack.enter_context(throttled(path, arguments.throttle))
        machine = describe_machine(path).as_dict()
        command = ["colibri", "bench", "io", *(sys.argv[2:] if argv is None else argv)]

        def results(*, is_complete: bool) -> Results:
            rows = summarise(bench.readings)
            return Results(
                kind="io",
                command=command,
                machine=machine,
                rows=[row.as_dict() for row in rows],
                notes=_notes(bench, arguments.throttle, verdict(rows, token_bytes=token_bytes)),
                is_complete=is_complete,
                extra={"source": "made-up file" if arguments.file is None else str(path)},
            )

        bench.n_all = len(sources) * bench.n_rounds * len(bench.ways)
        bench.started = time.monotonic()
        try:
            for size, blocks in sources:
                _measure(bench, size, blocks, memory)
                # After each size: whatever ends this, what was measured is there.
                if arguments.out is not None:
                    save_results(results(is_complete=size == sources[-1][0]), arguments.out)
        except KeyboardInterrupt:
            if not bench.readings:
                raise
            is_complete = False
    final = results(is_complete=is_complete)
    if arguments.out is not None:
        save_results(final, arguments.out)
    if arguments.json:
        print(json.dumps(final.as_dict()))
        return EXIT_OK
    _print(summarise(bench.readings), final.notes)
    return EXIT_OK


def _notes(bench: _Bench, throttle: int | None, words: Sequence[str]) -> list[str]:
    notes = [f"before each reading: {'; '.join(sorted(bench.states))}"]
    if throttle is not None:
        notes.append(f"the disk was held to {throttle / 1e6:.0f} MB/s for every way")
    return [*notes, *(f"{name}: {why}" for name, why in bench.refused.items()), *words]


def _measure(bench: _Bench, size: int, blocks: Blocks, memory: list[Path]) -> None:
    n_shares = len(bench.ways) * bench.n_rounds
    shares = share_out(blocks.layers, n_shares, bench.most_bytes, seed=size)
    for number in range(bench.n_rounds):
        for place, way in order_ways(bench.ways, number):
            share = shares[number * len(bench.ways) + place]
            for reading in _read_twice(bench, number, size, way, share, blocks.paths, memory):
                bench.readings.append(reading)
            bench.n_done += 1
            bench.console.print(
                f"{bench.n_done}/{bench.n_all}: {size_label(size)}, {way.name}: "
                f"{_told(bench, way)}; {_left_s(bench):.0f} s left"
            )


def _read_twice(
    bench: _Bench, number: int, size: int, way: Way, share: list[Extent],
    paths: list[Path], memory: list[Path],
) -> Iterator[Reading]:  # fmt: skip
    """The first reading ever of a share, and the same again; both after the cache was emptied."""
    is_memory = way.engine == "tmpfs"
    for phase in (_FIRST, _AGAIN):
        if not is_memory:
            bench.states.add(drop_caches(*paths).how)
        try:
            timed = read_extents(way, memory if is_memory else paths, share)
        except (StorageError, UsageError) as error:
            bench.refused[way.engine] = str(error)
            return
        yield Reading(
            way=way, block_bytes=size, round=number, phase=phase, seconds=timed.seconds,
            n_bytes=timed.n_bytes, latencies_s=timed.latencies_s, cpu_s=timed.cpu_s,
            n_major_faults=timed.n_major_faults, disk_bytes=timed.disk_bytes, mode=timed.mode,
            reason=timed.reason,
        )  # fmt: skip


def _left_s(bench: _Bench) -> float:
    spent = time.monotonic() - bench.started
    return spent / bench.n_done * (bench.n_all - bench.n_done)


def _told(bench: _Bench, way: Way) -> str:
    if not bench.readings or bench.readings[-1].way != way:
        return bench.refused.get(way.engine, "nothing")
    last = bench.readings[-1]
    return f"{last.n_bytes / last.seconds / 1e9:.2f} GB/s, {last.mode}"


def _print(rows: Sequence[IoRow], notes: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("block", "engine"):
        table.add_column(name)
    for name in ("depth", "pass", "mode", "GB/s", "spread", "IOPS", "p50 ms", "p99 ms", "CPU s/GB",
                 "faults", "from disk"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            size_label(row.block_bytes),
            row.engine,
            "" if row.depth is None else str(row.depth),
            row.phase,
            row.mode,
            f"{row.gb_per_s:.2f}",
            f"{row.slowest:.2f}-{row.fastest:.2f}",
            f"{row.iops:.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.cpu_s_per_gb:.3f}",
            f"{row.major_faults:.0f}",
            f"{row.from_disk:.0%}",
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 130)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def _bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ColibriError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is nothing")
    return size


def _depths(text: str) -> list[int]:
    try:
        depths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from error
    if not 1 <= depths[0] <= depths[-1] <= MAX_DEPTH:
        raise argparse.ArgumentTypeError(f"depths are 1 to {MAX_DEPTH}")
    return depths


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri bench io",
        description="Reads blocks as an engine does, random within a layer, layer after layer: "
        "through mappings, through the page cache, directly, and from memory. Ways take turns; "
        "no two read the same blocks; the page cache is emptied before each. What has not been "
        "read since the file was made (first) and what has (re-read) are told apart, as virtual "
        "disks serve the latter from their host's memory.",
    )
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE.colibri", help="read the blocks of a model"
    )
    parser.add_argument(
        "--volume", type=Path, action="append", default=[], metavar="DIR",
        help="a folder with a volume of a striped file; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--synthetic", type=_bytes, default=8 * 2**30, metavar="SIZE",
        help="without a file: make one of this size, and remove it (default: 8G)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), metavar="DIR", help="where it is made (here)"
    )
    parser.add_argument(
        "--sizes", default=_SIZES, metavar="LIST", help=f"its block sizes (default: {_SIZES})"
    )
    parser.add_argument(
        "--engines", default=",".join(ENGINES), metavar="LIST", help="default: %(default)s"
    )
    parser.add_argument(
        "--depths", type=_depths, default=[1, 2, 4, 8], metavar="LIST",
        help="requests in flight, or threads (default: 1,2,4,8)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--bytes", type=_bytes, default=256 * 2**20, metavar="SIZE",
        help="read at most so much in one go (default: 256M)",
    )  # fmt: skip
    parser.add_argument(
        "--throttle", type=_bytes, metavar="RATE", help="hold the disk to so many bytes a second"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of 48M at the largest depth: rough"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    return parser
