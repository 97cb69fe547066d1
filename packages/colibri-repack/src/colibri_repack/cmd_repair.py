"""`colibri repair`: restore the damaged ends of a `.colibri` file from the sound ones."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

import colibri_format
from colibri_format import ColibriError, FormatError

from .cmd_shared import EXIT_DATA, EXIT_OK, add_volume_option, print_json, run


def main(argv: Sequence[str] | None = None) -> int:
    """Repair as `argv` asks; 0 restored or sound, 1 beyond repair or I/O failure, 2 usage."""
    return run(lambda: _repair(_parser().parse_args(argv)))


def _repair(arguments: argparse.Namespace) -> int:
    try:
        restored = colibri_format.repair(
            arguments.file, volumes=arguments.volume, is_dry_run=arguments.dry_run
        )
    except FormatError as error:
        return _report_loss(arguments, error)
    if arguments.json:
        print_json(
            {
                "file": arguments.file,
                "is_dry_run": arguments.dry_run,
                "restored": [
                    {"file": str(r.path), "place": r.place, "offset": r.offset, "size": r.size}
                    for r in restored
                ],
            }
        )
        return EXIT_OK
    verb = "would restore" if arguments.dry_run else "restored"
    for r in restored:
        print(f"{r.path}: {verb} the {r.place} ({r.size} bytes at {r.offset:#x})")
    if not restored:
        print(f"{arguments.file}: both ends are sound; nothing to restore there")
    print(
        "Data was not looked at: "
        f"colibri verify {shlex.quote(arguments.file)} tells whether blocks are damaged."
    )
    return EXIT_OK


def _report_loss(arguments: argparse.Namespace, error: ColibriError) -> int:
    loss = colibri_format.describe_loss(error)
    if arguments.json:
        print_json({"file": arguments.file, "error": error.code, "lost": loss, "restored": []})
    print(f"error[{error.code}]: {error}", file=sys.stderr)
    print(f"nothing was written: {loss}", file=sys.stderr)
    return EXIT_DATA


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri repair",
        description="Restore a damaged superblock, index or table of a .colibri file, in place, "
        "from its copy at the other end. Data is never written to.",
    )
    parser.add_argument("file", metavar="FILE")
    add_volume_option(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be restored")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser
