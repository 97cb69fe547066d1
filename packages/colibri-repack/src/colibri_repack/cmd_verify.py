"""`colibri verify`: read a `.colibri` file and check every checksum."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import colibri_format
from colibri_format import Damage, format_size, printable

from .cmd_shared import (
    EXIT_DATA,
    EXIT_OK,
    add_volume_option,
    print_json,
    print_warnings,
    progress_bar,
    run,
)

_REPAIRABLE: Final = frozenset(
    {"bad-magic", "unsupported-version", "superblock-checksum", "region-checksum"}
)
_LOST: Final = frozenset({"block-checksum", "tensor-checksum", "file-checksum"})


def main(argv: Sequence[str] | None = None) -> int:
    """Verify as `argv` asks; 0 sound, 1 damage or I/O failure, 2 usage, 130 interrupted."""
    return run(lambda: _verify(_parser().parse_args(argv)))


def _verify(arguments: argparse.Namespace) -> int:
    n_bytes = 0
    with colibri_format.open(arguments.file, volumes=arguments.volume) as reader:
        start = time.perf_counter()
        with progress_bar("verifying", is_quiet=arguments.json) as show:

            def progress(done: int, total: int) -> None:
                nonlocal n_bytes
                n_bytes = done
                show(done, total)

            damages = reader.verify(progress, arguments.layer)
        seconds = time.perf_counter() - start
        warnings = reader.warnings
    if arguments.json:
        print_json(
            {
                "file": arguments.file,
                "is_sound": not damages and not warnings,
                "checked_bytes": n_bytes,
                "seconds": seconds,
                "damages": [asdict(damage) for damage in damages],
                "warnings": list(warnings),
            }
        )
        return EXIT_DATA if damages else EXIT_OK
    print_warnings(arguments.file, warnings)
    for damage in damages:
        text = printable(f"{arguments.file}: {_place(damage)}")
        print(f"error[{damage.code}]: {text}", file=sys.stderr)
    rate = format_size(int(n_bytes / seconds)) if seconds else "-"
    part = (
        arguments.file if arguments.layer is None else f"{arguments.file}, layer {arguments.layer}"
    )
    verdict = f"damaged in {_places(len(damages))}" if damages else "sound"
    print(f"{part}: {verdict}; {format_size(n_bytes)} checked, {rate}/s")
    if any(damage.code in _REPAIRABLE for damage in damages) and not warnings:
        print(f"colibri repair {shlex.quote(arguments.file)} restores its ends from their copies")
    if any(damage.code in _LOST for damage in damages):
        print("damaged data cannot be restored from the file: repack the source, or restore a copy")
    return EXIT_DATA if damages else EXIT_OK


def _places(n: int) -> str:
    return "1 place" if n == 1 else f"{n} places"


def _place(damage: Damage) -> str:
    volume = f" of volume {damage.volume}" if damage.volume else ""
    return f"{damage.place} at {damage.offset:#x}{volume} ({damage.size} bytes) is damaged"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri verify", description="Read a .colibri file and check every checksum."
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--layer", type=int, metavar="N", help="only this layer's blocks")
    add_volume_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object, no progress")
    return parser
