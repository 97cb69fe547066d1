"""`colibri bench`: what there is to measure, each a subcommand with a module of its own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from colibri_format.command import run_command

# Name: module with `main(argv) -> int`, and what it does.
_COMMANDS: Final = {
    "cache": ("cmd_cache", "what room for experts brings, on a recorded routing trace"),
    "io": ("cmd_io", "how fast blocks are read, by every way to read"),
    "decode": ("cmd_decode", "tokens a second under memory limits, and against llama.cpp"),
    "compare": ("cmd_compare", "whether two results agree within their spreads"),
    "report": ("cmd_report", "the results in a folder as plots and one HTML page"),
    "model": ("cmd_model", "writes a synthetic model to measure with"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the first argument names; 0 if all went well."""
    return run_command(lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="colibri bench",
        description="Measures what storage and engine reach on this machine.",
        epilog="\n".join(f"  {name:8} {text}" for name, (_, text) in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(_COMMANDS), metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    chosen = parser.parse_args(argv)
    module = importlib.import_module(f".{_COMMANDS[chosen.command][0]}", __package__)
    status: int = module.main(chosen.arguments)
    return status
