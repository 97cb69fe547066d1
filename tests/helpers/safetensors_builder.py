"""Builds safetensors files byte by byte, valid or as wrong as a test asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<i8": "I64", "<i4": "I32", "|u1": "U8"}

Entry = NDArray[Any] | tuple[str, tuple[int, ...], bytes]


def entry(item: Entry) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype name, shape and bytes of an array; BF16 and the like come as such a triple."""
    if isinstance(item, tuple):
        return item
    return _NAMES[item.dtype.str], item.shape, np.ascontiguousarray(item).tobytes()


def bf16(values: NDArray[np.float32]) -> tuple[str, tuple[int, ...], bytes]:
    """`values` cut to bfloat16."""
    bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    return "BF16", values.shape, bits.tobytes()


def encode(tensors: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """A whole valid file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, item in tensors.items():
        dtype, shape, payload = entry(item)
        offsets = [len(data), len(data) + len(payload)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += payload
    return raw(json.dumps(header).encode(), data)


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header, its length told as `length` where one is given."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def write_folder(
    folder: Path,
    tensors: Mapping[str, Entry],
    config: Mapping[str, Any],
    *,
    n_shards: int = 1,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A Hugging Face folder with these tensors: one file, or an index and so many shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    if n_shards == 1:
        (folder / "model.safetensors").write_bytes(encode(tensors))
        return folder
    weight_map = {}
    names = list(tensors)
    for number in range(n_shards):
        shard = f"model-{number + 1:05}-of-{n_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::n_shards]}
        (folder / shard).write_bytes(encode(part))
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
