"""Whether a `.colibri` file and the peer's GGUF hold the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import colibri_format
from colibri_format import ColibriError, Reader, Role
from colibri_repack import Source, open_source

_STACKS = {Role.GATE: "ffn_gate_exps", Role.UP: "ffn_up_exps", Role.DOWN: "ffn_down_exps"}


def compare_models(file: Path, gguf: Path) -> list[str]:
    """What differs, in sentences: none where every part that was looked at is the same.

    Looked at are shapes and, byte by byte, the small dense tensors (norms, routers) and the first
    and last expert of the first and last layer with experts. Weights in other encodings cannot be
    compared and are named.
    """
    try:
        with colibri_format.open(file) as reader:
            source = open_source(gguf)
            try:
                return _compare(reader, source, gguf)
            finally:
                source.close()
    except ColibriError as error:
        return [f"MODELS NOT COMPARED: {error}"]


def _compare(reader: Reader, source: Source, gguf: Path) -> list[str]:
    differing, others, n_same = [], [], 0
    for name, tensor in reader.tensors.items():
        theirs = source.tensors.get(name)
        if theirs is None:
            differing.append(f"{name} (theirs has none)")
        elif tuple(theirs.shape) != tuple(tensor.shape):
            differing.append(f"{name} ({tuple(theirs.shape)} there, {tuple(tensor.shape)} here)")
        elif theirs.dtype != tensor.dtype:
            others.append(f"{name} ({theirs.dtype.name} there, {tensor.dtype.name} here)")
        elif len(tensor.shape) == 1 or name.endswith("ffn_gate_inp.weight"):
            if not _is_equal(reader.tensor(name).read(), _read(source, name, 0, theirs.size)):
                differing.append(name)
            n_same += 1
    for layer, expert in _probes(reader):
        block = reader.expert(layer, expert)
        data = block.read()
        for segment in block.segments:
            name = f"blk.{layer}.{_STACKS.get(segment.role, '')}.weight"
            theirs = source.tensors.get(name)
            if theirs is None:
                continue
            label = f"{name}, expert {expert}"
            if theirs.dtype != segment.dtype:
                others.append(f"{label} ({theirs.dtype.name} there, {segment.dtype.name} here)")
                continue
            start = expert * segment.size
            if start + segment.size > theirs.size or not _is_equal(
                block.plain(segment, data), _read(source, name, start, segment.size)
            ):
                differing.append(label)
            n_same += 1
    notes = []
    if differing:
        notes.append(
            f"NOT THE SAME MODEL: {_few(differing)} of {gguf.name} differ from ours: what was "
            "measured compares different weights"
        )
    elif not n_same:
        notes.append(f"MODELS NOT COMPARED: {gguf.name} shares no encoding with ours")
    if others:
        notes.append(f"other encodings in {gguf.name}: {_few(others)}")
    return notes


def _probes(reader: Reader) -> list[tuple[int, int]]:
    layers = [layer for layer, sizes in enumerate(reader.index["size"]) if sizes.any()]
    found: set[tuple[int, int]] = set()
    for layer in {*layers[:1], *layers[-1:]}:
        present = np.flatnonzero(reader.index["size"][layer]).tolist()
        found |= {(layer, present[0]), (layer, present[-1])}
    return sorted(found)


def _read(source: Source, name: str, offset: int, size: int) -> NDArray[np.uint8]:
    data = bytearray(size)
    source.read_into(name, offset, memoryview(data))
    return np.frombuffer(data, np.uint8)


def _is_equal(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> bool:
    return bool(np.array_equal(ours, theirs))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
