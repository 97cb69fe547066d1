"""A tensor of a checkpoint: what it is and where its bytes stand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colibri_format import DType


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """`size` bytes at absolute `offset` of `file`: a C-contiguous tensor of `shape`.

    `shape` is in C order, the last axis contiguous; `()` is a scalar. `dtype` may be one that a
    `.colibri` file cannot hold (a checkpoint may carry such tensors as long as nothing needs
    them).
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    size: int
    file: Path
    offset: int
