"""Opens a checkpoint, whose kind is told by its content and never by its name."""

from __future__ import annotations

import os
from pathlib import Path

from colibri_format import StorageError

from ..errors import SourceError
from .files import InputFiles
from .gguf_header import MAGIC
from .gguf_source import GgufSource
from .safetensors_header import looks_like_safetensors
from .safetensors_source import INDEX, SafetensorsSource
from .source import Source

_KNOWN_HEADS = {
    b"\x89CLB": "a .colibri file (it is repacked already)",
    b"PK\x03\x04": "a zip archive, as PyTorch's .bin and .pt files are",
    b"\x80\x02": "a Python pickle",
    b"GGML": "a GGML file of before 2023",
    b"ggjt": "a GGJT file of before 2023",
    b"ggla": "a GGLA file",
}
_REQUIRED = "a GGUF file, a safetensors file, or a folder with safetensors files and config.json"


def open_source(path: str | os.PathLike[str]) -> Source:
    """The checkpoint at `path`, all its metadata read and checked. Close it after use.

    Raises:
        SourceError: `unknown-source` when it is no checkpoint that is understood; else as
            `GgufSource` and `SafetensorsSource`.
        StorageError: it cannot be read; `file-not-found` when there is nothing.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    files = InputFiles()
    try:
        size = files.add(path)
        head = bytes(files.read(path, 0, min(size, 9)))
    finally:
        files.close()
    if head.startswith(MAGIC):
        return GgufSource(path)
    if looks_like_safetensors(head, size):
        return SafetensorsSource(path)
    kind = next((text for magic, text in _KNOWN_HEADS.items() if head.startswith(magic)), None)
    found = f"is {kind}" if kind else f"starts with {head[:8].hex(' ') or 'nothing'}"
    raise SourceError("unknown-source", path, found, _REQUIRED)


def _open_folder(path: Path) -> Source:
    try:
        names = sorted(p.name for p in path.iterdir())
    except OSError as error:
        raise StorageError.of(error, path, "listing the folder") from error
    if INDEX in names or any(name.endswith(".safetensors") for name in names):
        return SafetensorsSource(path)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise SourceError("unknown-source", path, f"is a folder with {', '.join(ggufs[:4])}",
                          _REQUIRED, "name the GGUF file itself")  # fmt: skip
    listed = ", ".join(names[:6]) or "nothing"
    raise SourceError("unknown-source", path, f"is a folder with {listed}", _REQUIRED)
