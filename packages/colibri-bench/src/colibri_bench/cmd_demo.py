"""`colibri demo`: repack, inspect and run the embedded model with little memory."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from colibri_format import ColibriError, StorageError, format_size, parse_size
from colibri_format.command import EXIT_DATA, EXIT_OK, run_command
from colibri_repack import cmd_inspect, cmd_repack, cmd_verify

from .demo_model import DEMO_NAME, demo_gguf

PROMPT: Final = "Once upon a time there was a"
SMALL: Final = "8M"
LARGE: Final = "64M"
_RUN: Final = "import sys; from colibri_runtime.cmd_run import main; sys.exit(main(sys.argv[1:]))"


def main(argv: Sequence[str] | None = None) -> int:
    """Shows each step as the command one would type, and what it prints; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.keep is None:
        with tempfile.TemporaryDirectory(prefix="colibri-demo-") as folder:
            return _demo(arguments, Path(folder))
    try:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError.of(error, arguments.keep, "making the folder") from error
    return _demo(arguments, arguments.keep)


def _demo(arguments: argparse.Namespace, folder: Path) -> int:
    console = Console(highlight=False, soft_wrap=True)
    output = folder / f"{DEMO_NAME}.colibri"
    started = time.monotonic()
    with demo_gguf() as source:
        _title(console, "1. A checkpoint becomes a .colibri file: one aligned block an expert")
        if status := _step(cmd_repack.main, "repack", str(source), str(output), "--force"):
            return status
    _title(console, "2. What stands where, and is every block as it was written?")
    if status := _step(cmd_inspect.main, "inspect", str(output)):
        return status
    if status := _step(cmd_verify.main, "verify", str(output)):
        return status
    file_size = format_size(output.stat().st_size)
    texts = []
    for title, memory in (
        (
            f"3. Text from a budget of {format_size(arguments.memory)}, the file being "
            f"{file_size}: experts come from disk as tokens need them",
            arguments.memory,
        ),
        ("4. The same with room for every expert", parse_size(LARGE)),
    ):
        _title(console, title)
        status, text = _run(arguments, output, memory)
        if status:
            return status
        texts.append(text)
    if texts[0] != texts[1]:
        print("error[text-differs]: the two budgets gave different texts", file=sys.stderr)
        return EXIT_DATA
    seconds = time.monotonic() - started
    console.print(
        f"The texts are the same: memory changes the speed alone. The demo took {seconds:.1f} s."
    )
    if arguments.keep is not None:
        console.print(f"The file is {output}.")
    return EXIT_OK


def _title(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _show(verb: str, arguments: Sequence[str]) -> None:
    print(f"$ colibri {shlex.join([verb, *arguments])}", flush=True)


def _step(command: Callable[[Sequence[str]], int], verb: str, *arguments: str) -> int:
    """Runs one verb as if it had been typed, and shows what would have been."""
    _show(verb, arguments)
    status = command(list(arguments))
    print(flush=True)
    return status


def _run(arguments: argparse.Namespace, output: Path, memory: int) -> tuple[int, str]:
    """Status and text of `colibri run`, which is shown as it comes.

    In a process of its own, so that the peak it states is its own.
    """
    options = [
        str(output), f"--prompt={arguments.prompt}",
        "--max-tokens", str(arguments.max_tokens),
        "--temperature", "0", "--memory", _size_text(memory),
    ]  # fmt: skip
    _show("run", options)
    command = [sys.executable, "-c", _RUN, *options]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    pieces = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        while child.stdout is not None and (piece := os.read(child.stdout.fileno(), 4096)):
            pieces.append(piece)
            sys.stdout.write(piece.decode(errors="replace"))
            sys.stdout.flush()
    print(flush=True)
    return child.returncode, b"".join(pieces).decode(errors="replace")


def _size_text(size_bytes: int) -> str:
    """The size as one would type it."""
    n_mib, rest = divmod(size_bytes, 2**20)
    return str(size_bytes) if rest else f"{n_mib}M"


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ColibriError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri demo",
        description="Repacks the embedded 21M-parameter Mixture-of-Experts model, inspects the "
        "result, and generates text with a budget far below the model's size.",
    )
    parser.add_argument("--prompt", default=PROMPT, help=f"text to continue (default: {PROMPT!r})")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="default: 48")
    parser.add_argument(
        "--memory",
        type=_size,
        default=parse_size(SMALL),
        metavar="SIZE",
        help=f"the small budget (default: {SMALL})",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the .colibri file in this folder"
    )
    return parser
