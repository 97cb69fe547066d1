"""A part of a source tensor as contiguous rows, whatever way they are stored."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType

from ..sources import Source, SourceTensor


class Decoder(Protocol):
    """Makes rows of `dtype` from bytes that are no such rows; one for all slices of a kind.

    `piece_units` is how many quant blocks (or elements) at once keep temporary memory at a few
    megabytes.
    """

    @property
    def dtype(self) -> DType:
        """What the bytes are after decoding."""

    @property
    def piece_units(self) -> int:
        """Units to ask for at most."""

    def inputs(self, part: Slice) -> tuple[SourceTensor, ...]:
        """Tensors that are read beside the slice's own."""

    def read(self, source: Source, part: Slice, first: int, n_units: int) -> NDArray[np.uint8]:
        """`n_units` quant blocks or elements of `part` from number `first` on, as bytes."""

    def place(self, part: Slice, index: int) -> tuple[int, ...]:
        """Where element `index` of `part` stands in the source tensor."""

    def as_f32(self) -> Decoder:
        """The same without a rounding on the way, for values to be encoded again."""


class Slice(NamedTuple):
    """A part of a source tensor that is read as a C-contiguous tensor of `shape`.

    Without a `decoder` its bytes stand in `tensor` from byte `offset` on. With one, `offset` is
    where the decoder starts, and `dtype`, `size` and `read_into` are of the decoded rows. A named
    tuple, as a model has 50,000.
    """

    tensor: SourceTensor
    offset: int
    shape: tuple[int, ...]
    decoder: Decoder | None = None

    @property
    def dtype(self) -> DType:
        """The encoding of the bytes that `read_into` gives."""
        return self.tensor.dtype if self.decoder is None else self.decoder.dtype

    @property
    def size(self) -> int:
        """How many bytes `read_into` can give."""
        return self.dtype.size_bytes(self.shape)

    @property
    def inputs(self) -> tuple[SourceTensor, ...]:
        """Every tensor that reading touches."""
        return (self.tensor, *(self.decoder.inputs(self) if self.decoder else ()))

    def read_into(self, source: Source, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of the slice on.

        Raises:
            StorageError: as `Source.read_into`.
        """
        if self.decoder is None:
            source.read_into(self.tensor.name, self.offset + start, buffer)
            return
        unit = self.dtype.block_bytes
        out = np.frombuffer(buffer, np.uint8)
        done = 0
        while done < len(out):
            first, skip = divmod(start + done, unit)
            n_units = min(-(-(skip + len(out) - done) // unit), self.decoder.piece_units)
            data = self.decoder.read(source, self, first, n_units)[skip:]
            n = min(len(data), len(out) - done)
            out[done : done + n] = data[:n]
            done += n

    def place(self, index: int) -> tuple[int, ...]:
        """Where element `index` of this slice stands in the source tensor."""
        if self.decoder is not None:
            return self.decoder.place(self, index)
        dtype = self.tensor.dtype
        index += self.offset // dtype.block_bytes * dtype.block_elements
        return tuple(int(i) for i in np.unravel_index(index, self.tensor.shape))

    def as_f32(self) -> Slice:
        """The same slice without a rounding on the way, for values to be encoded again."""
        return self if self.decoder is None else self._replace(decoder=self.decoder.as_f32())
