"""`colibri bench io`: how fast this machine reads expert blocks, in every way there is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from colibri_format import ColibriError, UsageError, format_size, parse_size
from colibri_format.command import (
    EXIT_DATA,
    EXIT_OK,
    ends_like_interrupt,
    run_command,
)
from colibri_runtime.disk_files import direct_alignment

from .io_bench import THROTTLED_S, IoBench, measure
from .io_files import blocks_of, copies_in_memory, synthetic_file
from .io_plan import (
    IoRow,
    Way,
    check_shares,
    parse_sizes,
    plan_sizes,
    plan_ways,
    share_out,
    summarise,
)
from .io_run import MAX_DEPTH
from .io_verdict import verdict
from .machine_facts import describe_machine
from .memory_rate import memory_rate
from .picture import size_label
from .results import ResultKeeper, Results
from .throttle import throttled

ENGINES: Final = (
    "mmap", "mmap willneed", "mmap random", "buffered", "threads", "aio", "uring", "tmpfs"
)  # fmt: skip
_SIZES: Final = "64K,1M,3.5M,8M"
_QUICK_SIZES: Final = "1M,3.5M"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    _settle(arguments)
    engines = arguments.engines.split(",")
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown:
        raise UsageError(
            "bad-option", "--engines", f"{', '.join(unknown)}", f"some of {','.join(ENGINES)}"
        )
    console = Console(stderr=True, highlight=False, markup=False)
    keeper = ResultKeeper(arguments.out, lambda text: console.print(text, soft_wrap=True))
    ways = plan_ways(engines, arguments.depths)
    bench = IoBench(ways, arguments.rounds, console, arguments.throttle)
    with ExitStack() as stack:
        stack.enter_context(ends_like_interrupt())
        bar = stack.enter_context(_progress(console))
        if arguments.file is None:
            layers = plan_sizes(arguments.synthetic, parse_sizes(arguments.sizes))
            path = arguments.folder
        else:
            path = arguments.file
            blocks = blocks_of(path, arguments.volume)
            layers = [(blocks.largest, blocks.layers)]
            bench.paths, bench.token_bytes = blocks.paths, blocks.token_bytes
            if blocks.computed_bytes is not None:
                bench.compute_s = blocks.computed_bytes / memory_rate(describe_machine().n_cpus)
        n_shares = len(ways) * arguments.rounds
        # Before anything is written: it may be too little.
        for size, of_size in layers:
            if arguments.throttle is None:
                shares = share_out(of_size, n_shares, arguments.bytes, seed=size)
            else:
                shares = share_out(of_size, 1, arguments.bytes, seed=size) * n_shares
            bench.shares[size] = shares
        if arguments.throttle is not None:
            with throttled(path, arguments.throttle):
                pass  # what cannot be had is told before anything is written
        if arguments.file is None:
            task = bar.add_task("making a file to read", total=arguments.synthetic)
            path = stack.enter_context(
                synthetic_file(
                    arguments.folder,
                    arguments.synthetic,
                    lambda done, _: bar.update(task, completed=done),
                )
            )
            bench.paths = [path]
        bench.memory = bench.paths
        if "tmpfs" in engines:
            read = {
                extent
                for shares in bench.shares.values()
                for number in range(arguments.rounds)
                for extent in shares[number * len(ways) + ways.index(Way("tmpfs"))]
            }
            bench.memory = stack.enter_context(copies_in_memory(bench.paths, list(read)))
        bar.stop()
        if arguments.throttle is not None:
            bench.limit = stack.enter_context(throttled(path, arguments.throttle))
        bench.alignment = _alignment(path)
        machine = describe_machine(path).as_dict()
        command = ["colibri", "bench", "io", *(sys.argv[2:] if argv is None else argv)]

        def results(*, is_complete: bool) -> Results:
            rows = summarise(bench.readings)
            return Results(
                kind="io",
                command=command,
                machine=machine,
                rows=[row.as_dict() for row in rows],
                notes=_notes(bench, rows),
                is_complete=is_complete,
                extra={
                    "source": "made-up file" if arguments.file is None else str(path),
                    "pools": list(bench.pools.values()),
                },
            )

        status = measure(bench, lambda: keeper.save(results(is_complete=False)))
    final = results(is_complete=status == EXIT_OK)
    keeper.save(final)
    if arguments.json:
        print(json.dumps(final.as_dict()))
    else:
        _print(summarise(bench.readings), final.notes)
    keeper.finish()
    if status != EXIT_OK:
        return status
    return EXIT_OK if bench.readings else EXIT_DATA


def _settle(arguments: argparse.Namespace) -> None:
    """Fills in what was left to us: quick runs read less, of fewer sizes. Behind a throttle each
    reading takes a second: the kernel gives out what it allows a tenth of a second at a time."""
    is_quick, is_throttled = arguments.quick, arguments.throttle is not None
    sizes = _QUICK_SIZES.rpartition(",")[2] if is_throttled else _QUICK_SIZES
    depths = [1, 2, 4, 8]
    for name, value, quick in (
        ("synthetic", 8 * 2**30, 3 * 2**30), ("sizes", _SIZES, sizes), ("depths", depths, [4]),
        ("rounds", 3, 3 if is_throttled else 5),
    ):  # fmt: skip
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if is_quick else value)
    if arguments.bytes is None:
        arguments.bytes = 32 * 2**20 if is_quick else 256 * 2**20
    if arguments.throttle is not None:
        arguments.bytes = max(arguments.bytes, int(THROTTLED_S * arguments.throttle))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
               TimeRemainingColumn())  # fmt: skip
    return Progress(*columns, console=console, transient=True)


def _alignment(path: Path) -> tuple[int, int] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = direct_alignment(fd)
    finally:
        os.close(fd)
    return None if found is None or not found.offset else (found.offset, found.memory)


def _notes(bench: IoBench, rows: Sequence[IoRow]) -> list[str]:
    notes = verdict(
        rows, token_bytes=bench.token_bytes, compute_s=bench.compute_s, throttle=bench.throttle,
        alignment=bench.alignment,
    )  # fmt: skip
    # What is wrong stands first.
    place = sum(note.startswith("NOT ") for note in notes)
    states = [f"before each reading: {'; '.join(sorted(bench.states))}"]
    if bench.pools:
        states.append(f"read into {_pools(bench.pools.values())}, its slots in rotation")
    if bench.throttle is not None and bench.limit is not None:
        states.append(f"limit for every way: {bench.throttle / 1e6:.0f} MB/s, by {bench.limit.how}")
    states += check_shares(bench.shares, max(way.depth or 1 for way in bench.ways))
    states += [f"{name}: {why}" for name, why in bench.refused.items()]
    return [*notes[:place], *states, *notes[place:]]


def _pools(pools: Iterable[Mapping[str, Any]]) -> str:
    sizes = [pool["pool_bytes"] for pool in pools]
    text = " to ".join(dict.fromkeys(format_size(size) for size in (min(sizes), max(sizes))))
    huge = [pool["huge_bytes"] for pool in pools]
    if None in huge:
        return f"a pool of {text}"
    return f"a pool of {text}, {sum(huge) / sum(sizes):.0%} of it in huge pages"


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
        "disks serve the latter from their host's memory. Everything but a mapping is read into "
        "the slots of a pool larger than caches are, each used again only after all others, as "
        "an engine's are.",
    )
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE.colibri", help="read the blocks of a model"
    )
    parser.add_argument(
        "--volume", type=Path, action="append", default=[], metavar="DIR",
        help="a folder with a volume of a striped file; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--synthetic", type=_bytes, metavar="SIZE",
        help="without a file: make one of this size, and remove it (default: 8G, quick 3G)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), metavar="DIR", help="where it is made (here)"
    )
    parser.add_argument(
        "--sizes", metavar="LIST",
        help=f"block sizes, each in a part of its own (default: {_SIZES}, quick {_QUICK_SIZES})",
    )  # fmt: skip
    parser.add_argument(
        "--engines", default=",".join(ENGINES), metavar="LIST", help="default: %(default)s"
    )
    parser.add_argument(
        "--depths", type=_depths, metavar="LIST",
        help="requests in flight, or threads (default: 1,2,4,8, quick 4)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=_count, metavar="N", help="default: 3, quick 5")
    parser.add_argument(
        "--bytes", type=_bytes, metavar="SIZE",
        help="read at most so much in one go (default: 256M, quick 32M)",
    )  # fmt: skip
    parser.add_argument(
        "--throttle", type=_bytes, metavar="RATE", help="hold the disk to so many bytes a second"
    )
    parser.add_argument(
        "--quick", action="store_true",
        help="five rounds of little, at one depth: under a minute, and rough",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    return parser
