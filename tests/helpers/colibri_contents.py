"""What a `.colibri` file holds, under the names that a GGUF file would give it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import colibri_format


def contents(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor by GGUF name, experts joined to stacks again."""
    found: dict[str, tuple[str, bytes]] = {}
    with colibri_format.open(path) as file:
        for tensor in file.tensors.values():
            found[tensor.name] = (
                tensor.dtype.name,
                file.tensor(tensor.name).read_plain().tobytes(),
            )
        suffix = "_exps" if file.geometry.n_experts > 1 else ""
        for layer, expert in np.argwhere(file.index["size"]).tolist():
            block = file.expert(layer, expert)
            data = block.read()
            for segment in block.segments:
                name = f"blk.{layer}.ffn_{segment.role.name.lower()}{suffix}.weight"
                part = block.plain(segment, data).tobytes()
                found[name] = (segment.dtype.name, found.get(name, ("", b""))[1] + part)
    return found
