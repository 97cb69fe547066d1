"""A checkpoint to repack: tensors by name, read in ranges so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from .embedded import EmbeddedFile
from .tensor import SourceTensor


class Source(Protocol):
    """What the planner and the converter need of a checkpoint.

    All metadata is read and checked when a source is opened; tensor data only by `read_into`.
    One thread at a time.
    """

    @property
    def path(self) -> Path:
        """The file or folder that was asked for."""

    @property
    def format(self) -> str:
        """`gguf` or `safetensors`."""

    @property
    def config(self) -> Mapping[str, object]:
        """The model's description: GGUF key-values, or the content of `config.json`."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor by name, in the order of their files."""

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Every file that is read, each once: an output must be none of them."""

    @property
    def embedded(self) -> tuple[EmbeddedFile, ...]:
        """Files to be carried over into the output (tokenizer, configuration)."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found and passed over, in words."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of tensor `name` from `offset` on.

        Raises:
            StorageError: the kernel refused; or `short-read` when the file ends too early.
        """

    def changed(self) -> Path | None:
        """The first input whose size or time of change is no longer that of the opening."""

    def close(self) -> None:
        """Close every file; reading afterwards opens them again."""
