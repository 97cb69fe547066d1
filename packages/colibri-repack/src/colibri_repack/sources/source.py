"""A checkpoint to repack: tensors by name, read in ranges so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from .embedded import EmbeddedFile
from .files import Fingerprint
from .tensor import SourceTensor


class Source(Protocol):
    """What the planner and the converter need of a checkpoint.

    All metadata is read and checked when a source is opened; tensor data only by `read_into`.
    Any thread may read.
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

    @property
    def fingerprints(self) -> Mapping[Path, Fingerprint]:
        """Every input as it was when it was opened."""

    @property
    def io_mode(self) -> tuple[str, str]:
        """How large reads were done, `direct` or `buffered`, and what showed it."""

    def changed(self) -> tuple[Path, str] | None:
        """The first input that is no longer what it was when it was opened, and what is other."""

    def close(self) -> None:
        """Close every file; reading afterwards opens them again."""
