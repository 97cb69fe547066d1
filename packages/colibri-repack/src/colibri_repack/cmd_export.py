"""`colibri export`: a `.colibri` file becomes a GGUF file again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from colibri_format import format_size
from colibri_format.command import ends_like_interrupt

from .cmd_shared import (
    EXIT_OK,
    add_volume_option,
    print_json,
    print_notes,
    print_rows,
    progress_bar,
    run,
)
from .gguf_export import ExportReport, export


def main(argv: Sequence[str] | None = None) -> int:
    """Export as `argv` asks; 0 done, 1 data or I/O failure, 2 usage, 130 interrupted."""

    def body() -> int:
        with ends_like_interrupt():
            return _export(_parser().parse_args(argv))

    return run(body)


def _export(arguments: argparse.Namespace) -> int:
    with progress_bar("exporting", is_quiet=arguments.json) as progress:
        report = export(
            arguments.source,
            arguments.target,
            volumes=arguments.volume,
            overwrite=arguments.force,
            is_dry_run=arguments.dry_run,
            progress=progress,
        )
    if arguments.json:
        print_json(report.to_record())
    else:
        _print_report(report)
    return EXIT_OK


def _print_report(report: ExportReport) -> None:
    rows = [("tensors", f"{report.n_tensors}, {format_size(report.payload_bytes)}")]
    rows += [(f"type {name}", format_size(size)) for name, size in sorted(report.types.items())]
    rows.append(("file", f"{format_size(report.file_size)} ({report.file_size} bytes)"))
    if report.seconds is None:
        rows.append(("written to", "nothing: --dry-run"))
    else:
        rate = format_size(int(report.payload_bytes / report.seconds)) if report.seconds else "-"
        rows.append(("time", f"{report.seconds:.1f} s, {rate}/s"))
        rows.append(("written to", str(report.output)))
    print_rows(rows)
    print_notes(report.notes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri export",
        description="Write a .colibri file as GGUF. What was repacked from a GGUF unchanged comes "
        "back byte for byte; interleaved rows are made plain.",
    )
    parser.add_argument("source", metavar="FILE", help="the .colibri file")
    parser.add_argument("target", metavar="OUT", help="the GGUF file to write")
    add_volume_option(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object, no progress")
    return parser
