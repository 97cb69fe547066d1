"""Handles of an open file's experts and dense tensors: facts now, bytes when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from .checksum import view_bytes
from .dtypes import DType
from .errors import FormatCode, UsageError
from .interleave import deinterleave
from .layout import DenseTensor, Layout, Segment, block_seed, tensor_seed

if TYPE_CHECKING:
    from .reader import Reader


class DataStream:
    """The bytes of one block or tensor in order, in pieces of any size, checked at the end."""

    __slots__ = ("_code", "_digest", "_expected", "_left", "_place", "_position", "_reader",
                 "_volume")  # fmt: skip

    def __init__(
        self,
        reader: Reader,
        extent: tuple[int, int],
        volume: int,
        seed: int,
        expected: int,
        code: FormatCode,
        place: str,
    ) -> None:
        self._reader = reader
        self._position, self._left = extent
        self._volume = volume
        self._digest = xxhash.xxh3_64(seed=seed)
        self._expected = expected
        self._code = code
        self._place = place

    def read_into(self, buffer: bytearray | memoryview | NDArray[np.uint8]) -> None:
        """Fills `buffer` with the next bytes; what it holds is checked only by `finish`.

        Raises:
            UsageError: `bad-buffer` if fewer bytes are left.
            StorageError: `short-read`, or the kernel's error.
        """
        view = view_bytes(buffer)
        if len(view) > self._left:
            raise UsageError(
                "bad-buffer",
                self._place,
                f"{len(view)} bytes are asked for",
                f"{self._left} are left",
            )
        self._reader.read_at_into(self._position, view, self._volume)
        self._position += len(view)
        self._left -= len(view)
        if self._reader.is_verifying:
            self._digest.update(view)

    def finish(self) -> None:
        """Checks all bytes against the recorded checksum.

        Raises:
            UsageError: `bad-buffer` if some were not read.
            FormatError: `block-checksum` or `tensor-checksum`.
        """
        if self._left:
            raise UsageError("bad-buffer", self._place, f"{self._left} bytes were not read", "all")
        if self._reader.is_verifying:
            self._reader.check_digest(
                self._digest.intdigest(), self._expected, self._code, self._place
            )


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

    def stream(self) -> DataStream:
        """The block's bytes piece by piece, for blocks that are not to be held whole."""
        return DataStream(
            self._reader,
            (self.offset, self.size),
            self.volume,
            block_seed(self.layer, self.expert),
            self.checksum,
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

    def read_part_into(
        self, start: int, buffer: bytearray | memoryview | NDArray[np.uint8]
    ) -> None:
        """Fills `buffer` with the stored bytes from `start` on, unchecked: the checksum is of all.

        Raises:
            UsageError: `bad-buffer` unless that is within the tensor.
            StorageError: `short-read`, or the kernel's error.
        """
        view = view_bytes(buffer)
        if start < 0 or start + len(view) > self.size:
            raise UsageError(
                "bad-buffer",
                f"tensor {self.name!r}",
                f"{len(view)} bytes from {start} are asked for",
                f"it has {self.size}",
            )
        self._reader.read_at_into(self.offset + start, view)

    def read_plain(self) -> NDArray[np.uint8]:
        """Its bytes with rows as ggml has them (spec, section 9); raises as `read` does."""
        data = self.read()
        if self.fact.row_interleave:
            return deinterleave(data, self.dtype, self.shape)
        return data

    def stream(self) -> DataStream:
        """Its bytes piece by piece, for tensors that are not to be held whole."""
        return DataStream(
            self._reader,
            (self.offset, self.size),
            0,
            tensor_seed(self._number),
            self.fact.checksum,
            FormatCode.TENSOR_CHECKSUM,
            f"tensor {self.name!r} at {self.offset:#x}",
        )
