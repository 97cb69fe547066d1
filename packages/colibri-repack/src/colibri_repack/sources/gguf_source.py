"""A model in one GGUF file, or in the parts of a split one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from ..errors import SourceError
from .embedded import EmbeddedFile
from .files import Fingerprint, InputFiles
from .gguf_header import GgufHeader, GgufValue, KeyValue, parse_gguf_header
from .gguf_split import join_parts, split_count
from .tensor import SourceTensor

GGUF_FILE: Final = "gguf.json"
_CHUNK: Final = 65_536


class GgufSource:
    """The `Source` over a GGUF file of version 2 or 3, or over all parts of a split one.

    Opening reads and checks the whole header, of every part; see `parse_gguf_header` and
    `join_parts` for what they refuse. Any part may be named.
    """

    format: Final = "gguf"

    def __init__(self, path: Path) -> None:
        self._files = InputFiles()
        self._path = path
        size = self._files.add(path)
        try:
            header = parse_gguf_header(self._files, path, size)
            if split_count(header) > 1:
                header = join_parts(self._files, path, header)
            self.header: GgufHeader = header
        except BaseException:
            self._files.close()
            raise
        self._config = MappingProxyType({p.key: p.value for p in self.header.key_values})
        record = encode_gguf_json(self.header)
        self._embedded = (EmbeddedFile(GGUF_FILE, len(record), lambda: record),)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def config(self) -> Mapping[str, GgufValue]:
        return self._config

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self.header.tensors

    @property
    def inputs(self) -> tuple[Path, ...]:
        return self._files.paths

    @property
    def embedded(self) -> tuple[EmbeddedFile, ...]:
        return self._embedded

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.header.trailing_bytes:
            return ()
        return (f"{self.header.trailing_bytes} bytes behind the last tensor are not part of it",)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        tensor = self.header.tensors[name]
        check_range(tensor, offset, len(buffer))
        self._files.read_into(tensor.file, tensor.offset + offset, buffer)

    @property
    def fingerprints(self) -> Mapping[Path, Fingerprint]:
        return self._files.fingerprints

    @property
    def io_mode(self) -> tuple[str, str]:
        return self._files.mode, self._files.reason

    def changed(self) -> tuple[Path, str] | None:
        return self._files.changed()

    def close(self) -> None:
        self._files.close()


def check_range(tensor: SourceTensor, offset: int, size: int) -> None:
    """Raise `tensor-range` unless `size` bytes at `offset` lie inside `tensor`."""
    if offset < 0 or offset + size > tensor.size:
        raise SourceError("tensor-range", f"{tensor.file}: tensor {tensor.name!r}",
                          f"{size} bytes at {offset} were asked for",
                          f"it has {tensor.size} bytes")  # fmt: skip


def encode_gguf_json(header: GgufHeader) -> bytes:
    """What stands before the data as `gguf.json`: `{"version", "alignment", "kv", "tensors"}`.

    `kv` has one `[key, type, value]` a line in the file's order, `tensors` one `[name, type,
    shape]`, shapes in C order; export puts a GGUF together again from them. Bytes that are no UTF-8
    stand as lone surrogates; an f32 stands as the shortest double that gives it back.
    """
    head = f'{{"version": {header.version}, "alignment": {header.alignment}, "kv": ['
    parts = [head.encode()]
    for number, pair in enumerate(header.key_values):
        parts.append(b",\n" if number else b"\n")
        parts.extend(_encode_pair(pair))
    parts.append(b'\n], "tensors": [')
    for number, tensor in enumerate(header.tensors.values()):
        parts.append(b",\n" if number else b"\n")
        parts.append(json.dumps([tensor.name, tensor.dtype.name, tensor.shape]).encode())
    parts.append(b"\n]}\n")
    return b"".join(parts)


def _encode_pair(pair: KeyValue) -> Iterator[bytes]:
    head = f"[{json.dumps(pair.key)}, {json.dumps(pair.type)}, "
    value = pair.value
    if not isinstance(value, (list, np.ndarray)):
        if pair.type == "f32" and isinstance(value, float):
            value = _shortest(value)
        yield f"{head}{json.dumps(value)}]".encode()
        return
    yield f"{head}[".encode()
    for start in range(0, len(value), _CHUNK):
        part = value[start : start + _CHUNK]
        if isinstance(part, np.ndarray):
            if part.dtype == np.float32:
                items: list[object] = [_shortest(x) for x in part.tolist()]
            else:
                items = part.tolist()
        else:
            items = list(part)
        yield (", " if start else "").encode() + json.dumps(items)[1:-1].encode()
    yield b"]]"


def _shortest(value: float) -> float:
    """The double of fewest digits that rounds to the float32 `value`."""
    return float(str(np.float32(value))) if math.isfinite(value) else value
