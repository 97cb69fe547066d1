"""Carries out a plan: streams the source into the output, tile by tile, in the output's order."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from colibri_format import Sink, StorageError, Writer

from .errors import RepackError, SourceError
from .quantise import decode_floats, first_not_finite, quantise_q8_0
from .repack_plan import TILE_BYTES, BlockJob, Conversion, FileJob, Part, RepackPlan, TensorJob
from .sources import Source

Progress = Callable[[int, int], None]

# Quantising makes arrays of several times a tile's size and is fastest where they fit the cache.
_CONVERT_BYTES: Final = 2**18


def convert(
    plan: RepackPlan,
    source: Source,
    output: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> UUID:
    """Write the file of `plan` from `source` to `output`; the UUID it got.

    Holds one tile of 8 MiB and, when converting, a few arrays of a smaller one, whatever the
    model's size. `progress(done, total)` is called after every tile with bytes of payload. The
    output has its name only when it is complete: on any exception, an interrupt included, nothing
    of it is left.

    Raises:
        RepackError: `output-is-input`, `scale-overflow`.
        SourceError: `not-finite` when a converted tensor holds NaN or infinity, `source-changed`
            when an input was changed meanwhile.
        StorageError: `disk-full` before the first byte when the space is not there, `file-exists`,
            `file-not-found` (the output's folder), `short-read`, or the kernel's refusal.
    """
    check_output(source, output)
    _check_space(output, plan.file.file_size)
    with Writer(output, plan.file, overwrite=overwrite) as writer:
        copier = _Copier(source, plan.payload_bytes, progress)
        for job in plan.jobs:
            if isinstance(job, BlockJob):
                with writer.block(job.layer, job.expert) as sink:
                    for part in job.parts:
                        copier.copy(part, sink)
            elif isinstance(job, TensorJob):
                with writer.tensor(job.name) as sink:
                    copier.copy(job.part, sink)
            else:
                copier.embed(job, writer)
        changed = source.changed()
        if changed is not None:
            raise SourceError(
                "source-changed",
                changed,
                "changed while it was read",
                "inputs stay as they are until the end",
                "repack again",
            )
    return writer.uuid


def check_output(source: Source, output: Path) -> None:
    """Raise `output-is-input` if writing `output` could touch a file of `source`.

    Looks at the files themselves, not at their names: links and other spellings count.
    """
    part = output.parent / f"{output.name}.part"
    for candidate in (output, part):
        for path in source.inputs:
            try:
                is_same = candidate.samefile(path)
            except OSError:
                is_same = False
            if is_same:
                raise RepackError(
                    "output-is-input",
                    output,
                    f"{candidate.name} is the input {path}",
                    "an output of its own",
                    "choose another output name",
                )


def _check_space(output: Path, size: int) -> None:
    try:
        status = os.statvfs(output.parent)
    except OSError as error:
        raise StorageError.of(error, output.parent, "looking at the output's folder") from error
    free = status.f_bavail * status.f_frsize
    if free < size:
        raise StorageError(
            "disk-full",
            output.parent,
            f"{free} bytes are free",
            f"the output takes {size}",
            "free some space or choose another folder",
            errno=errno.ENOSPC,
        )


class _Copier:
    """Moves parts from source to sinks through one buffer, and keeps count."""

    def __init__(self, source: Source, total: int, progress: Progress | None) -> None:
        self._source = source
        self._tile: NDArray[np.uint8] = np.empty(TILE_BYTES, np.uint8)
        self._progress = progress
        self._total = total
        self._done = 0

    def copy(self, part: Part, sink: Sink) -> None:
        is_copy = part.conversion is Conversion.COPY
        step = TILE_BYTES if is_copy else _CONVERT_BYTES
        size = part.source.size
        for start in range(0, size, TILE_BYTES):
            tile = self._tile[: min(TILE_BYTES, size - start)]
            part.source.read_into(self._source, start, tile.data)
            for at in range(0, len(tile), step):
                piece = tile[at : at + step]
                out = piece if is_copy else _converted(part, piece, start + at)
                sink.write(out)
                self._report(out.nbytes)

    def embed(self, job: FileJob, writer: Writer) -> None:
        data = job.file.read()
        writer.write_file(job.file.name, data)
        self._report(len(data))

    def _report(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _converted(part: Part, tile: NDArray[np.uint8], start: int) -> NDArray[np.uint8]:
    """The bytes that `tile`, which stands `start` bytes into the slice, becomes."""
    values = decode_floats(tile, part.source.dtype.name)
    where = f"{part.source.tensor.file}: tensor {part.source.tensor.name!r}"
    bad = first_not_finite(values)
    if bad is not None:
        place = list(part.source.place(start // part.source.dtype.block_bytes + bad))
        raise SourceError("not-finite", where, f"element {place} is {float(values[bad])}",
                          "finite numbers to convert",
                          "the checkpoint is damaged: fetch it again")  # fmt: skip
    if part.conversion is Conversion.TO_F32:
        return values.view(np.uint8)
    try:
        return quantise_q8_0(values)
    except RepackError as error:
        raise RepackError(error.code, where, error.found, error.required, error.remedy) from error
