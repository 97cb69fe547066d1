"""Checkpoints as tensors by name with bounded-memory range reads."""

from .embedded import EmbeddedFile
from .gguf_source import GgufSource
from .open import open_source
from .safetensors_source import SafetensorsSource
from .source import Source
from .tensor import SourceTensor

__all__ = [
    "EmbeddedFile",
    "GgufSource",
    "SafetensorsSource",
    "Source",
    "SourceTensor",
    "open_source",
]
