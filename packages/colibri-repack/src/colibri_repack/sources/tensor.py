"""A tensor of a checkpoint: what it is and where its bytes stand."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from colibri_format import DType


class SourceTensor(NamedTuple):
    """`size` bytes at absolute `offset` of `file`: a C-contiguous tensor of `shape`.

    `shape` is in C order, the last axis contiguous; `()` is a scalar. `dtype` may be one that a
    `.colibri` file cannot hold (a checkpoint may carry such tensors as long as nothing needs
    them). A named tuple, as a checkpoint may have 90,000: they are made four times as fast.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    size: int
    file: Path
    offset: int
