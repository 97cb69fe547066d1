"""`colibri diff`: what differs between two `.colibri` files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import colibri_format

from .cmd_shared import EXIT_OK, print_json, run

EXIT_DIFFERENT: Final = 1
_LONGEST: Final = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as `argv` asks; 0 the same, 1 different or unreadable, 2 usage."""
    arguments = _parser().parse_args(argv)
    return run(lambda: _diff(arguments))


def _diff(arguments: argparse.Namespace) -> int:
    with (
        colibri_format.open(arguments.first, volumes=None) as first,
        colibri_format.open(arguments.second, volumes=None) as second,
    ):
        found = colibri_format.diff_files(first, second)
    if arguments.json:
        print_json(
            {
                "first": arguments.first,
                "second": arguments.second,
                "differences": [asdict(difference) for difference in found],
            }
        )
    elif found:
        for difference in found:
            print(f"{difference.kind}: {difference.what}")
            print(f"  - {_text(difference.first)}")
            print(f"  + {_text(difference.second)}")
    else:
        print("no difference: geometry, layouts, tensors, files, metadata and blocks are the same")
    return EXIT_DIFFERENT if found else EXIT_OK


def _text(value: Any) -> str:
    text = "(not there)" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri diff",
        description="Show what differs between two .colibri files: geometry, layouts, tensors, "
        "embedded files, metadata, and blocks by their checksums. Reads no data.",
    )
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser
