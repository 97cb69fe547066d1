"""`colibri bench compare`: whether two results agree within the spreads that they state."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from colibri_format import UsageError
from colibri_format.command import EXIT_DATA, EXIT_OK, run_command

from .agreement import Pair, pair_rows
from .errors import BenchError
from .results import load_results

_KINDS = ("io", "decode", "cache")


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints; 0 if everything agrees, 1 if something does not."""
    return run_command(lambda: _main(argv), usage=(UsageError, BenchError))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    pairs: list[Pair] = []
    for kind in _KINDS:
        paths = [folder / f"{kind}.json" for folder in (arguments.first, arguments.second)]
        if all(path.exists() for path in paths):
            first, second = map(load_results, paths)
            pairs += pair_rows(kind, first.rows, second.rows)
    if not pairs:
        raise BenchError(
            "no-results",
            f"{arguments.first}, {arguments.second}",
            "have no figures of the same thing",
            f"results of the same kind ({', '.join(_KINDS)}) in both",
            "measure twice with colibri bench io|decode|cache --out DIR",
        )
    differing = [pair for pair in pairs if not pair.agrees]
    if arguments.json:
        print(json.dumps({"agree": not differing, "pairs": [asdict(pair) for pair in pairs]}))
    else:
        _print(pairs)
    return EXIT_DATA if differing else EXIT_OK


def _print(pairs: Sequence[Pair]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what")
    for name in ("first", "second", "ratio", ""):
        table.add_column(name, justify="right")
    for pair in pairs:
        table.add_row(
            pair.name,
            *(f"{value:.3g} ({low:.3g}-{high:.3g})" for value, low, high in (pair.a, pair.b)),
            "" if not pair.a[0] else f"{pair.b[0] / pair.a[0]:.2f}",
            "" if pair.agrees else "DIFFERS",
        )
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 110)
    console.print(table)
    n = sum(not pair.agrees for pair in pairs)
    console.print(
        f"{len(pairs) - n} of {len(pairs)} agree: their spreads, slowest to fastest round, overlap"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri bench compare",
        description="Compares the results that two runs left with --out: of another time, another "
        "disk, another version. Figures agree when their spreads overlap.",
    )
    parser.add_argument("first", type=Path, metavar="DIR")
    parser.add_argument("second", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    return parser
