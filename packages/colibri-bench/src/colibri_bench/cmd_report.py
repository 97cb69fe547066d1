"""`colibri bench report`: the results in a folder as plots and as one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from colibri_format import StorageError, UsageError
from colibri_format.command import EXIT_OK, run_command

from .errors import BenchError
from .plots import plot_results, save_plots
from .report_page import make_page
from .result_rows import KINDS
from .results import load_results


def main(argv: Sequence[str] | None = None) -> int:
    """Writes plots and page; 0 if all went well."""
    return run_command(lambda: _main(argv), usage=(UsageError, BenchError))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    folder: Path = arguments.folder
    paths = [folder / f"{kind}.json" for kind in KINDS]
    found = [load_results(path) for path in paths if path.exists()]
    if not found:
        raise BenchError(
            "no-results",
            folder,
            "holds no results",
            f"at least one of {', '.join(path.name for path in paths)}",
            "measure with colibri bench io|decode|cache --out DIR",
        )
    sections = [(results, plot_results(results)) for results in found]
    for results, plots in sections:
        for path in save_plots(plots, folder):
            print(path)
        if not results.is_complete:
            print(f"{folder / results.kind}.json holds the results of an interrupted run")
    page = arguments.page or folder / "report.html"
    try:
        page.write_text(make_page(sections), encoding="utf-8")
    except OSError as error:
        raise StorageError.of(error, page, "writing the page") from error
    print(page)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri bench report",
        description="Makes plots (PNG and SVG) and one self-contained HTML page of the results "
        "that other subcommands left in a folder with --out.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: DIR/report.html")
    return parser
