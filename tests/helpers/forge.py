"""Valid `.colibri` files to test on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import colibri_format as cf
from forge import Forge, region_extents
from valid import base_plan, network

__all__ = ["Forge", "code_of", "fill", "layout_of", "region_extents", "sample_plan", "write_sample"]


def layout_of(dtype: str, hidden: int, width: int) -> cf.Layout:
    """A gated feed-forward network of `width` neurons in one encoding."""
    return network(cf.DTYPES[dtype], hidden, width)


def sample_plan(**changes: Any) -> cf.FilePlan:
    """Three layers of five experts: two encodings, one layer without experts, one absent one."""
    layouts = [layout_of("q8_0", 64, 96), None, layout_of("f16", 64, 96)]
    return base_plan(**({"layer_layouts": layouts} | changes))


def fill(writer: cf.Writer, seed: int = 0) -> dict[str, bytes]:
    """Random bytes into everything that the writer's plan has; what was written, by place.

    Places are `L0/E1`, `tensor NAME` and `file NAME`.
    """
    rng = np.random.default_rng(seed)
    plan = writer.plan
    written = {}
    for layer, expert in np.argwhere(plan.index["size"] != 0).tolist():
        layout = plan.layout(layer, expert)
        assert layout is not None
        payload = rng.bytes(sum(segment.size for segment in layout.segments))
        writer.write_block(layer, expert, payload)
        written[f"L{layer}/E{expert}"] = payload
    for tensor in plan.tensors:
        data = written[f"tensor {tensor.name}"] = rng.bytes(tensor.size)
        writer.write_tensor(tensor.name, data)
    for file in plan.files:
        data = written[f"file {file.name}"] = rng.bytes(file.size)
        writer.write_file(file.name, data)
    return written


def write_sample(path: Path, plan: cf.FilePlan | None = None, seed: int = 0) -> dict[str, bytes]:
    """Writes a valid file; what was written, by place."""
    with cf.Writer(path, plan or sample_plan()) as writer:
        return fill(writer, seed)


def code_of(action: Callable[[], object]) -> str | None:
    """The code of the error that `action` raises, None if it raises none."""
    try:
        action()
    except cf.ColibriError as error:
        return error.code
    return None
