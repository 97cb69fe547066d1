"""`colibri diff`: what differs between two `.colibri` files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import colibri_format
from colibri_format import Difference, printable

from .cmd_shared import EXIT_OK, print_json, run

EXIT_DIFFERENT: Final = 1
_LONGEST: Final = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as `argv` asks; 0 the same, 1 different or unreadable, 2 usage."""
    return run(lambda: _diff(_parser().parse_args(argv)))


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
            print(printable(f"{difference.kind}: {difference.what}"))
            for line in _lines(difference):
                print(printable(f"  {line}"))
    else:
        print("no difference: geometry, layouts, tensors, files, metadata and blocks are the same")
    return EXIT_DIFFERENT if found else EXIT_OK


def _lines(difference: Difference) -> list[str]:
    """What differs, the first file's with -, the second's with +."""
    first, second = difference.first, difference.second
    if difference.kind == "blocks":
        return [f"experts {first}"]
    if isinstance(first, dict) and isinstance(second, dict):
        names = [name for name in first if first[name] != second.get(name)]
        first, second = ({name: value[name] for name in names} for value in (first, second))
    return [f"- {_text(first)}", f"+ {_text(second)}"]


def _text(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {json.dumps(member)}" for name, member in value.items())
    else:
        text = "(not there)" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri diff",
        description="Show what differs between two .colibri files: geometry, layouts, tensors, "
        "embedded files, metadata, and blocks by their checksums. Reads no data. Exit status 0: no "
        "difference, 1: some, or a file cannot be read, 2: usage.",
    )
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser
