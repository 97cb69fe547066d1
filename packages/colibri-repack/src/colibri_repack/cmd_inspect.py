"""`colibri inspect`: what a `.colibri` file holds and where it stands."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

import colibri_format
from colibri_format import MODEL_FILE, Expert, Layout, ModelSpec, Reader, parse_model, printable

from .cmd_shared import (
    EXIT_OK,
    columns_table,
    facts_rows,
    new_console,
    print_json,
    print_rows,
    print_warnings,
    run,
)
from .facts import FileFacts, encoding, facts_of_file, layouts_of_layer


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect as `argv` asks; 0 done, 1 data or I/O failure, 2 usage."""
    return run(lambda: _inspect(_parser().parse_args(argv)))


def _inspect(arguments: argparse.Namespace) -> int:
    # Volumes are not needed to tell what is in them, and may be on a disk that is not there.
    with colibri_format.open(arguments.file, volumes=None) as reader:
        layers = _layers(reader, arguments.layer)
        model = None
        if MODEL_FILE in reader.files:
            model = parse_model(reader.read_file(MODEL_FILE), f"{arguments.file}: {MODEL_FILE}")
        family = str(reader.metadata.get("family", model.family if model else "not said"))
        facts = facts_of_file(reader, model, family)
        if arguments.json:
            print_json(_record(reader, model, facts, layers, arguments))
        else:
            _print(new_console(), reader, facts, layers, arguments)
    return EXIT_OK


def _layers(reader: Reader, layer: int | None) -> list[int]:
    if layer is None:
        return list(range(reader.geometry.n_layers))
    reader.is_mixed(layer)
    return [layer]


def _blocks(reader: Reader, layers: Iterable[int]) -> list[Expert]:
    """Every present block of `layers`."""
    return [
        reader.expert(layer, expert)
        for layer in layers
        for expert in np.flatnonzero(reader.index["size"][layer]).tolist()
    ]


def _layouts(reader: Reader, layer: int) -> list[dict[str, Any]]:
    """Each layout of the layer's blocks; one without segments if it has no experts."""
    found = [
        {"layer": layer, "n_experts": n_blocks, "segments": _segments(layout)}
        for layout, n_blocks in layouts_of_layer(reader, layer)
    ]
    return found or [{"layer": layer, "n_experts": 0, "segments": []}]


def _segments(layout: Layout) -> list[dict[str, Any]]:
    return [
        {
            "role": segment.role.name.lower(),
            "dtype": segment.dtype.name,
            "shape": list(segment.shape),
            "row_interleave": segment.row_interleave,
            "offset": segment.offset,
            "size": segment.size,
        }
        for segment in layout.segments
    ]


def _record(
    reader: Reader,
    model: ModelSpec | None,
    facts: FileFacts,
    layers: list[int],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "file": str(reader.path),
        "uuid": str(reader.uuid),
        **facts.to_record(),
        "has_model": model is not None,
        "context_length": model.context_length if model else None,
        "layouts": [record for layer in layers for record in _layouts(reader, layer)],
        "metadata": reader.metadata,
        "warnings": list(reader.warnings),
    }
    if arguments.tensors:
        record["tensors"] = [
            {
                "name": tensor.name,
                "dtype": tensor.dtype.name,
                "shape": list(tensor.shape),
                "layer": tensor.layer,
                "row_interleave": tensor.row_interleave,
                "offset": tensor.offset,
                "size": tensor.size,
            }
            for tensor in reader.tensors.values()
            if arguments.layer is None or tensor.layer == arguments.layer
        ]
    if arguments.blocks:
        record["blocks"] = [
            {
                "layer": block.layer,
                "expert": block.expert,
                "offset": block.offset,
                "size": block.size,
                "volume": block.volume,
            }
            for block in _blocks(reader, layers)
        ]
    if arguments.files:
        record["files"] = [
            {"name": file.name, "offset": file.offset, "size": file.size}
            for file in reader.files.values()
        ]
    return record


def _print(
    console: Console,
    reader: Reader,
    facts: FileFacts,
    layers: list[int],
    arguments: argparse.Namespace,
) -> None:
    rows = [*facts_rows(facts), ("uuid", str(reader.uuid))]
    if MODEL_FILE not in reader.files:
        rows.insert(1, ("model", f"not described (no {MODEL_FILE}): engines cannot run this file"))
    print_rows(rows)
    table = columns_table("layers", "experts", "segment", "dtype", "shape", "at", "bytes")
    for first, last in _runs(reader, layers):
        layouts = layouts_of_layer(reader, first)
        span = str(first) if first == last else f"{first}-{last}"
        if not layouts:
            table.add_row(span, "0", "none: the feed-forward network is among the dense tensors")
        for layout, n_blocks in layouts:
            n_experts = str(n_blocks)
            for s in _segments(layout):
                shape = " x ".join(map(str, s["shape"]))
                place = (str(s["offset"]), str(s["size"]))
                dtype = encoding(s["dtype"], s["row_interleave"])
                table.add_row(span, n_experts, s["role"], dtype, shape, *place)
                span = n_experts = ""
    console.print()
    console.print(table)
    if arguments.tensors:
        table = columns_table("tensor", "dtype", "shape", "at", "bytes")
        for tensor in reader.tensors.values():
            if arguments.layer is None or tensor.layer == arguments.layer:
                shape = " x ".join(map(str, tensor.shape))
                at, size = str(tensor.offset), str(tensor.size)
                dtype = encoding(tensor.dtype.name, tensor.row_interleave)
                table.add_row(Text(printable(tensor.name)), dtype, shape, at, size)
        console.print()
        console.print(table)
    if arguments.blocks:
        table = columns_table("layer", "expert", "at", "bytes", "volume")
        for block in _blocks(reader, layers):
            values = (block.layer, block.expert, block.offset, block.size, block.volume)
            table.add_row(*map(str, values))
        console.print()
        console.print(table)
    if arguments.files:
        table = columns_table("file", "at", "bytes")
        for file in reader.files.values():
            table.add_row(Text(printable(file.name)), str(file.offset), str(file.size))
        console.print()
        console.print(table)
    print_warnings(reader.path, reader.warnings)


def _runs(reader: Reader, layers: list[int]) -> list[tuple[int, int]]:
    """Spans of neighbouring layers that look the same."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs:
            first, last = runs[-1]
            is_same = layouts_of_layer(reader, first) == layouts_of_layer(reader, layer)
            if is_same and layer == last + 1:
                runs[-1] = (first, layer)
                continue
        runs.append((layer, layer))
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri inspect", description="Show what a .colibri file holds."
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--layer", type=int, metavar="N", help="only this layer")
    parser.add_argument("--tensors", action="store_true", help="list the dense tensors")
    parser.add_argument("--blocks", action="store_true", help="list each block's offset and size")
    parser.add_argument("--files", action="store_true", help="list the embedded files")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser
