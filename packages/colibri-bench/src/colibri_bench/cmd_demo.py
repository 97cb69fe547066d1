"""`colibri demo`: repack, inspect and run the embedded model with little memory."""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from colibri_format import ColibriError, format_size, parse_size
from colibri_repack import cmd_inspect, cmd_repack, cmd_verify
from colibri_runtime import cmd_run

from .demo_model import DEMO_NAME, demo_gguf

PROMPT: Final = "Once upon a time there was a"
SMALL: Final = "8M"
LARGE: Final = "64M"


def main(argv: Sequence[str] | None = None) -> int:
    """Shows each step as the command one would type, and what it prints; 0 if all went well."""
    parser = argparse.ArgumentParser(
        prog="colibri demo",
        description="Repacks the embedded 21M-parameter Mixture-of-Experts model, inspects the "
        "result, and generates text with a budget far below the model's size.",
    )
    parser.add_argument("--prompt", default=PROMPT, help=f"text to continue (default: {PROMPT!r})")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="default: 48")
    parser.add_argument(
        "--memory", default=SMALL, metavar="SIZE", help=f"the small budget (default: {SMALL})"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the .colibri file in this folder"
    )
    arguments = parser.parse_args(argv)
    try:
        small = parse_size(arguments.memory)
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            return _demo(arguments, small, arguments.keep)
        with tempfile.TemporaryDirectory(prefix="colibri-demo-") as folder:
            return _demo(arguments, small, Path(folder))
    except ColibriError as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error[os-error]: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _demo(arguments: argparse.Namespace, small: int, folder: Path) -> int:
    console = Console(highlight=False, soft_wrap=True)
    output = folder / f"{DEMO_NAME}.colibri"
    started = time.monotonic()
    with demo_gguf() as source:
        _title(console, "1. A checkpoint becomes a .colibri file: one aligned block an expert")
        if status := _step(cmd_repack.main, "repack", str(source), str(output), "--force"):
            return status
        source_bytes = source.stat().st_size
    _title(console, "2. What stands where, and is every block as it was written?")
    if status := _step(cmd_inspect.main, "inspect", str(output)):
        return status
    if status := _step(cmd_verify.main, "verify", str(output)):
        return status
    _title(
        console,
        f"3. Text from a budget of {format_size(small)}, the model being "
        f"{format_size(source_bytes)}: experts come from disk as tokens need them",
    )
    common = [
        "run", str(output), "--prompt", arguments.prompt,
        "--max-tokens", str(arguments.max_tokens), "--temperature", "0",
    ]  # fmt: skip
    if status := _step(cmd_run.main, *common, "--memory", arguments.memory):
        return status
    _title(console, "4. The same with room for every expert: the text does not depend on memory")
    runs = {}
    for memory in (arguments.memory, LARGE):
        record = _run_json([*common[1:], "--memory", memory])
        if record is None:
            return 1
        runs[memory] = record
    console.print(_compare(runs))
    texts = {record["text"] for record in runs.values()}
    if len(texts) != 1:
        print("error[text-differs]: the two budgets gave different texts", file=sys.stderr)
        return 1
    console.print(f"Both texts are the same. The demo took {time.monotonic() - started:.1f} s.")
    if arguments.keep is not None:
        console.print(f"The file is {output}.")
    return 0


def _title(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _step(command: Callable[[Sequence[str]], int], verb: str, *arguments: str) -> int:
    """Runs one verb as if it had been typed, and shows what would have been."""
    print(f"$ colibri {shlex.join([verb, *arguments])}", flush=True)
    status = command(list(arguments))
    print(flush=True)
    return status


def _run_json(arguments: Sequence[str]) -> dict[str, Any] | None:
    out = io.StringIO()
    with redirect_stdout(out):
        status = cmd_run.main([*arguments, "--json"])
    if status:
        return None
    record: dict[str, Any] = json.loads(out.getvalue())
    return record


def _compare(runs: dict[str, dict[str, Any]]) -> Table:
    table = Table("budget", "tokens/s", "hit rate", "read per token", "time stalled")
    for memory, record in runs.items():
        table.add_row(
            memory,
            f"{record['tokens_per_s']:.1f}",
            f"{100 * record['hit_rate']:.0f} %",
            format_size(round(record["bytes_per_token"])),
            f"{100 * record['stall_share']:.0f} %",
        )
    return table
