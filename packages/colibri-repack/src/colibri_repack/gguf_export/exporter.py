"""Carries out an export: the file is read once, in its own order, each part goes to its place.

A stack's matrices come from as many blocks, so the GGUF is written all over; what is held is one
piece of a segment.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import colibri_format
from colibri_format import Reader
from colibri_format.handles import DataStream
from colibri_format.layout import PAGE
from colibri_format.output import OutputFile

from ..output_checks import check_not_input, check_space
from ..recode import UNIT_ELEMENTS, recode
from ..row_groups import deinterleave_rows
from .export_plan import ExportPlan, Move, plan_export

Progress = Callable[[int, int], None]
# Whole groups of 16 rows of a piece are held at most four times over.
_PIECE: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote, or would write; `seconds` is None when only planned."""

    source: Path
    output: Path
    file_size: int
    n_tensors: int
    types: dict[str, int]
    payload_bytes: int
    notes: tuple[str, ...]
    seconds: float | None = None

    @classmethod
    def of(
        cls, plan: ExportPlan, source: Path, output: Path, seconds: float | None = None
    ) -> ExportReport:
        """The report on `plan`; `types` are bytes by type."""
        types: dict[str, int] = {}
        for tensor in plan.tensors:
            types[tensor.dtype.name] = types.get(tensor.dtype.name, 0) + tensor.size
        return cls(
            source=source,
            output=output,
            file_size=plan.file_size,
            n_tensors=len(plan.tensors),
            types=types,
            payload_bytes=plan.payload_bytes,
            notes=plan.notes,
            seconds=seconds,
        )

    def to_record(self) -> dict[str, Any]:
        """As JSON-ready values."""
        rate = self.payload_bytes / self.seconds if self.seconds else None
        return {
            "source": str(self.source),
            "output": str(self.output),
            "file_size": self.file_size,
            "n_tensors": self.n_tensors,
            "types": self.types,
            "payload_bytes": self.payload_bytes,
            "seconds": self.seconds,
            "bytes_per_second": rate,
            "notes": list(self.notes),
        }


def export(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    volumes: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    is_dry_run: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the `.colibri` file `source` as the GGUF file `output`.

    A file that was repacked from a GGUF with `--quant keep` gives that GGUF back: key-values,
    names, types, shapes and data, byte for byte. One that came from safetensors becomes a GGUF that
    llama.cpp runs, where it knows the family. Interleaved rows are made plain. `volumes` names
    folders to search for volumes. `progress(done, total)` is called with bytes of tensors.
    The output has its name only when it is complete; every block and tensor is checked against
    its checksum on the way.

    Raises:
        ExportError: as `plan_export`.
        RepackError: `output-is-input`.
        FormatError: as opening the file; `block-checksum`, `tensor-checksum`.
        StorageError: `disk-full` before the first byte when the space is not there,
            `file-exists`, `output-busy`, or the kernel's refusal.
    """
    output = Path(output)
    with colibri_format.open(source, volumes=None if is_dry_run else volumes) as reader:
        plan = plan_export(reader)
        if is_dry_run:
            return ExportReport.of(plan, reader.path, output)
        check_not_input(output, (reader.path, *reader.volume_paths))
        check_space([(output, plan.file_size)])
        start = time.perf_counter()
        _write(plan, reader, output, overwrite, progress)
        return ExportReport.of(plan, reader.path, output, time.perf_counter() - start)


def _write(
    plan: ExportPlan, reader: Reader, output: Path, overwrite: bool, progress: Progress | None
) -> None:
    file = OutputFile(output, plan.file_size, overwrite=overwrite)
    try:
        file.start()
        mover = _Mover(file, plan.payload_bytes, progress)
        for name in sorted(plan.tensor_moves, key=lambda name: reader.tensors[name].offset):
            stream = reader.tensor(name).stream()
            mover.move(stream, plan.tensor_moves[name])
            stream.finish()
        volumes = reader.block_index.volumes
        blocks = [reader.expert(*place) for place in plan.block_moves]
        blocks.sort(key=lambda block: (int(volumes[block.layer, block.expert]), block.offset))
        for block in blocks:
            stream = block.stream()
            position = 0
            for move in plan.block_moves[block.layer, block.expert]:
                segment = move.part.fact
                stream.read_into(bytearray(segment.offset - position))
                mover.move(stream, move)
                position = segment.offset + segment.size
            stream.read_into(bytearray(block.size - position))
            stream.finish()
        for offset, data in plan.made.items():
            file.write_at(offset, data)
        # The first page last: what an earlier writer left unfinished is known by its zeros.
        file.write_at(min(PAGE, len(plan.head)), plan.head[PAGE:])
        file.flush()
        file.sync()
        file.write_at(0, plan.head[:PAGE])
        file.flush()
        file.sync()
        file.publish()
    finally:
        file.discard()


class _Mover:
    """Brings stored parts to their places, piece by piece, and keeps count."""

    def __init__(self, file: OutputFile, total: int, progress: Progress | None) -> None:
        self._file = file
        self._total = total
        self._progress = progress
        self._done = 0

    def move(self, stream: DataStream, move: Move) -> None:
        """Write what `stream` has next, the part of `move`."""
        fact = move.part.fact
        offset = move.offset
        step = _piece_bytes(move)
        left = fact.size
        while left:
            piece = np.empty(min(step, left), np.uint8)
            stream.read_into(piece)
            left -= piece.nbytes
            data = _changed(piece, move)
            self._file.write_at(offset, data)
            offset += data.nbytes
            self._done += data.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _piece_bytes(move: Move) -> int:
    """Bytes of the part that are changed at once: groups of rows, heads, or just many."""
    fact = move.part.fact
    dtype = fact.dtype
    n_rows = fact.row_interleave or 1
    if move.n_heads:
        n_rows = math.lcm(n_rows, fact.shape[0] // move.n_heads)
    if n_rows > 1:
        unit = n_rows * (fact.size // fact.shape[0])
    else:
        unit = dtype.size_bytes((UNIT_ELEMENTS,))
    return max(_PIECE // unit, 1) * unit


def _changed(piece: NDArray[np.uint8], move: Move) -> NDArray[np.uint8]:
    fact = move.part.fact
    if fact.row_interleave:
        piece = deinterleave_rows(piece, fact.dtype, fact.shape[-1])
    if move.n_heads:
        piece = _paired(piece, move)
    if move.dtype.name != fact.dtype.name:
        piece = recode(piece, fact.dtype, move.dtype)
    return piece


def _paired(piece: NDArray[np.uint8], move: Move) -> NDArray[np.uint8]:
    """Rows of whole heads, those of a first and a second half turned into neighbours."""
    fact = move.part.fact
    n_rows = fact.shape[0]
    half = n_rows // move.n_heads // 2
    row_bytes = fact.size // n_rows
    heads = piece.reshape(-1, 2, half, row_bytes)
    return np.ascontiguousarray(heads.transpose(0, 2, 1, 3)).reshape(-1)
