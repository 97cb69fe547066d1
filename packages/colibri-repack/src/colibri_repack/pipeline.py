"""Slices of the source on their way into the output: read ahead and converted by threads."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from colibri_format.page_memory import page_memory

from ._native import ElementError
from .errors import RepackError, SourceError
from .memory_plan import PAGE, MemoryPlan, tile_buffer_bytes
from .part_plan import Conversion, Part
from .pieces import Piece, gather
from .recode import element, recode
from .row_groups import interleave_rows
from .sources import Source


class Pipeline:
    """Gives the converted bytes of parts, in order, from tiles that threads prepare ahead.

    A context manager; one thread may call. Memory is as its plan says, whatever the parts are.
    """

    def __init__(self, source: Source, memory: MemoryPlan) -> None:
        self._source = source
        self._memory = memory
        self._pool = ThreadPoolExecutor(memory.n_workers, thread_name_prefix="colibri-repack")
        size = tile_buffer_bytes(memory.tile_bytes)
        self._tiles = [_Memory(size) for _ in range(memory.n_tiles)]
        # Pages take memory when they are first used: where nothing is converted none does.
        self._scratch: queue.SimpleQueue[tuple[_Memory, _Memory]] = queue.SimpleQueue()
        for _ in range(memory.n_workers):
            self._scratch.put((_Memory(size), _Memory(size)))

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def stream(self, parts: Iterable[Part]) -> Iterator[NDArray[np.uint8]]:
        """The bytes of each of `parts` in the output, one after the other, in pieces of no part's
        but one; a piece is valid until the next is asked for.

        Raises:
            RepackError, SourceError, StorageError: as `convert`, of the first piece that fails.
        """
        tiles = gather(parts, self._memory.tile_bytes)
        waiting: deque[tuple[_Memory, Future[list[NDArray[np.uint8]]]]] = deque()
        for memory in self._tiles:
            self._submit(waiting, memory, tiles)
        while waiting:
            memory, future = waiting.popleft()
            yield from future.result()
            self._submit(waiting, memory, tiles)

    def _submit(
        self,
        waiting: deque[tuple[_Memory, Future[list[NDArray[np.uint8]]]]],
        memory: _Memory,
        tiles: Iterator[list[Piece]],
    ) -> None:
        tile = next(tiles, None)
        if tile is not None:
            try:
                future = self._pool.submit(self._make, memory, tile)
            except RuntimeError as error:
                raise MemoryError("no thread to convert with can be started") from error
            waiting.append((memory, future))

    def _make(self, memory: _Memory, tile: list[Piece]) -> list[NDArray[np.uint8]]:
        made = []
        position = 0
        scratch = self._scratch.get()
        try:
            for piece in tile:
                out = memory.place(position, piece.out_bytes, _file_offset(piece))
                self._fill(piece, out, scratch)
                position += piece.out_bytes + PAGE
                made.append(out)
        finally:
            self._scratch.put(scratch)
        return made

    def _fill(self, piece: Piece, out: NDArray[np.uint8], scratch: tuple[_Memory, _Memory]) -> None:
        """Fills `out` with what `piece` becomes, step by step from buffer to buffer."""
        part = piece.part
        steps = (part.conversion is Conversion.RECODE) + bool(part.row_interleave)
        data = out if not steps else scratch[0].place(0, piece.size, _file_offset(piece))
        part.source.read_into(self._source, piece.start, data.data)
        if part.conversion is Conversion.RECODE:
            recoded = out if steps == 1 else scratch[1].place(0, piece.out_bytes, 0)
            weights = part.importance.read() if part.importance else None
            _recode(part, data, piece.start, weights, recoded)
            data = recoded
        if part.row_interleave:
            interleave_rows(data, part.dtype, part.source.shape[-1], out)


class _Memory:
    """Anonymous pages, used again and again: fresh ones would cost a page fault each."""

    def __init__(self, size: int) -> None:
        self._bytes = page_memory(size)

    def place(self, position: int, size: int, offset: int) -> NDArray[np.uint8]:
        """`size` bytes from `position` on, or up to a page later: as far from one as `offset`."""
        start = position + (offset - position) % PAGE
        return self._bytes[start : start + size]


def _file_offset(piece: Piece) -> int:
    source = piece.part.source
    return source.tensor.offset + source.offset + piece.start


def _recode(
    part: Part,
    data: NDArray[np.uint8],
    start: int,
    weights: NDArray[np.float32] | None,
    out: NDArray[np.uint8],
) -> None:
    """Fill `out` with what `data`, which stands `start` bytes into the slice, becomes."""
    dtype = part.source.dtype
    try:
        recode(data, dtype, part.dtype, columns=part.source.shape[-1], weights=weights,
               n_threads=1, out=out)  # fmt: skip
    except ElementError as error:
        where = f"{part.source.tensor.file}: tensor {part.source.tensor.name!r}"
        first = start // dtype.block_bytes * dtype.block_elements
        place = list(part.source.place(first + error.index))
        if not error.is_finite:
            value = element(data, dtype, error.index)
            raise SourceError("not-finite", where, f"element {place} is {value}",
                              "finite numbers to convert",
                              "the checkpoint is damaged: fetch it again") from error  # fmt: skip
        if part.dtype.is_quantised:
            raise RepackError("scale-overflow", where,
                              f"the quant block at {place} has a scale beyond float16",
                              f"values that {part.dtype.name} holds",
                              "take another type for it, as bf16") from error  # fmt: skip
        value = element(data, dtype, error.index)
        raise RepackError("value-overflow", where, f"element {place} is {value}",
                          f"values that {part.dtype.name} holds",
                          "take another type for it, as bf16 or f32") from error  # fmt: skip
