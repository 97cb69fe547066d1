"""`colibri bench model`: a synthetic checkpoint of a published model's shape."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from colibri_format import format_size
from colibri_format.command import EXIT_OK, run_command

from .synthetic_model import write_model
from .synthetic_shape import SHAPES, shape_of


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the model; 0 if all went well."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    shape = shape_of(arguments.shape, arguments.layers)
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        size = write_model(
            arguments.output,
            shape,
            arguments.seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(
        f"{arguments.output}: {shape.architecture}, {shape.n_layers} layers of "
        f"{shape.n_experts} experts, top-{shape.top_k}, {format_size(size)} of tensors"
    )
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri bench model",
        description="Writes a GGUF with random weights (experts Q4_K, the rest Q8_0), skewed "
        "routing and a known greedy text, so that any engine runs the same tokens. Such a model "
        "says nothing; it costs what a real one of its shape costs.",
    )
    parser.add_argument("output", type=Path, metavar="OUT.gguf")
    parser.add_argument(
        "--shape", default="olmoe", metavar="NAME", help=f"{', '.join(SHAPES)} (default: olmoe)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    return parser
