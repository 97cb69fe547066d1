"""Handles of an open file's experts and dense tensors: facts now, bytes when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .checksum import view_bytes
from .dtypes import DType
from .errors import FormatCode, UsageError
from .interleave import deinterleave
from .layout import DenseTensor, Layout, Segment, block_seed, tensor_seed

if TYPE_CHECKING:
    from .reader import Reader


class Expert:
    """One expert's block; reads happen when asked."""

    __slots__ = ("_reader", "expert", "layer", "offset", "size")

    def __init__(self, reader: Reader, layer: int, expert: int, offset: int, size: int) -> None:
        self._reader = reader
        self.layer = layer
        self.expert = expert
        self.offset = offset
        self.size = size

    @property
    def layout(self) -> Layout:
        """Where the segments stand in the block."""
        return self._reader.layouts[int(self._reader.expert_layouts[self.layer, self.expert])]

    @property
    def volume(self) -> int:
        """The file that holds the block: 0 for the `.colibri` file itself, else a volume."""
        return int(self._reader.block_index.volumes[self.layer, self.expert])

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the block, in order."""
        return self.layout.segments

    @property
    def checksum(self) -> int:
        """The recorded XXH3-64, seeded with the block's place."""
        return int(self._reader.checksums[self.layer, self.expert])

    def read(self) -> NDArray[np.uint8]:
        """The block's `size` bytes in a new array, checked.

        Raises:
            FormatError: `block-checksum`, naming layer, expert and offset.
            StorageError: `short-read`, or the kernel's error.
        """
        data = np.empty(self.size, np.uint8)
        self.read_into(data)
        return data

    def read_into(self, buffer: bytearray | memoryview | NDArray[np.uint8]) -> None:
        """Fills `buffer`, of exactly `size` bytes, and checks it; raises as `read` does."""
        view = view_bytes(buffer)
        if len(view) != self.size:
            raise UsageError(
                "bad-buffer",
                f"block L{self.layer}/E{self.expert}",
                f"a buffer of {len(view)} bytes",
                f"{self.size} are required",
            )
        self._reader.read_at_into(self.offset, view, self.volume)
        self._reader.check_data(
            view,
            self.checksum,
            block_seed(self.layer, self.expert),
            FormatCode.BLOCK_CHECKSUM,
            f"block L{self.layer}/E{self.expert} at {self.offset:#x}",
        )

    def plain(self, segment: Segment, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bytes of `segment` in `block` with rows as ggml has them (spec, section 9)."""
        data = block[segment.offset : segment.offset + segment.size]
        return deinterleave(data, segment.dtype, segment.shape) if segment.row_interleave else data


class Tensor:
    """One dense tensor; reads happen when asked."""

    __slots__ = ("_number", "_reader", "fact")

    def __init__(self, reader: Reader, fact: DenseTensor, number: int) -> None:
        self._reader = reader
        self._number = number
        self.fact = fact

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.fact.name

    @property
    def dtype(self) -> DType:
        """How its elements are encoded."""
        return self.fact.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths in C order."""
        return self.fact.shape

    @property
    def layer(self) -> int | None:
        """The layer it belongs to; None for those of no layer."""
        return self.fact.layer

    @property
    def offset(self) -> int:
        """Where its bytes start in the file."""
        return self.fact.offset

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.fact.size

    def read(self) -> NDArray[np.uint8]:
        """Its `size` bytes as stored, in a new array, checked.

        Raises:
            FormatError: `tensor-checksum`.
            StorageError: `short-read`, or the kernel's error.
        """
        data = np.empty(self.size, np.uint8)
        self.read_into(data)
        return data

    def read_into(self, buffer: bytearray | memoryview | NDArray[np.uint8]) -> None:
        """Fills `buffer`, of exactly `size` bytes, and checks it; raises as `read` does."""
        view = view_bytes(buffer)
        if len(view) != self.size:
            raise UsageError(
                "bad-buffer",
                f"tensor {self.name!r}",
                f"a buffer of {len(view)} bytes",
                f"{self.size} are required",
            )
        self._reader.read_at_into(self.offset, view)
        self._reader.check_data(
            view,
            self.fact.checksum,
            tensor_seed(self._number),
            FormatCode.TENSOR_CHECKSUM,
            f"tensor {self.name!r} at {self.offset:#x}",
        )
