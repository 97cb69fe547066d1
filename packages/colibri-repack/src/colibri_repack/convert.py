"""Carries out a plan: streams the source into the output, tile by tile, in the output's order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from colibri_format import Sink, Writer

from ._native import ElementError
from .errors import RepackError, SourceError
from .output_checks import check_not_input, check_space
from .part_plan import Conversion, Part
from .recode import UNIT_ELEMENTS, element, recode
from .repack_plan import TILE_BYTES, BlockJob, FileJob, RepackPlan, TensorJob
from .row_groups import interleave_rows
from .sources import Source

Progress = Callable[[int, int], None]

# Elements recoded at once: enough work for every thread, and 4 MiB of float32.
_CONVERT_ELEMENTS: Final = 2**20


def convert(
    plan: RepackPlan,
    source: Source,
    output: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> UUID:
    """Write the file of `plan` from `source` to `output`; the UUID it got.

    Holds one tile of 8 MiB and, when converting, the pieces of it that are recoded, whatever the
    model's size. `progress(done, total)` is called after every tile with bytes of payload. The
    output has its name only when it is complete: on any exception, an interrupt included, nothing
    of it is left.

    Raises:
        RepackError: `output-is-input`, `scale-overflow` (a quant block's scale is beyond float16),
            `value-overflow` (an element is beyond float16 or bfloat16).
        SourceError: `not-finite` when a converted tensor holds NaN or infinity, `imatrix-value`,
            `source-changed` when an input was changed meanwhile.
        StorageError: `disk-full` before the first byte when the space is not there, `file-exists`,
            `file-not-found` (the output's folder or a volume's), `short-read`, or the kernel's
            refusal.
    """
    check_output(source, output)
    writer = Writer(
        output, plan.file, overwrite=overwrite, volume_folders=plan.options.volume_paths
    )
    for path in writer.volume_paths:
        check_output(source, path)
    sizes = (plan.file.file_size, *(volume.file_size for volume in plan.file.volumes))
    check_space(zip((output, *writer.volume_paths), sizes, strict=True))
    with writer:
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


def check_output(source: Source, output: Path, *others: Path) -> None:
    """Raise `output-is-input` if writing `output` could touch a file of `source` or of `others`.

    Looks at the files themselves, not at their names: links and other spellings count.
    """
    check_not_input(output, (*source.inputs, *others))


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
        step = TILE_BYTES if is_copy else _convert_bytes(part)
        if part.row_interleave:
            step = _group_bytes(part, step)
        weights = part.importance.read() if part.importance else None
        size = part.source.size
        for start in range(0, size, step):
            tile = self._tile[: min(step, size - start)]
            part.source.read_into(self._source, start, tile.data)
            out = tile if is_copy else _converted(part, tile, start, weights)
            if part.row_interleave:
                out = interleave_rows(out, part.dtype, part.source.shape[-1])
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


def _convert_bytes(part: Part) -> int:
    """How much of `part` is recoded at once: whole quant blocks, whole rows if columns matter."""
    unit = part.source.shape[-1] if part.importance else UNIT_ELEMENTS
    n_elements = max(_CONVERT_ELEMENTS // unit, 1) * unit
    return part.source.dtype.size_bytes((n_elements,))


def _group_bytes(part: Part, step: int) -> int:
    """About `step` bytes of the slice, whole groups of rows; one group at least."""
    group = part.row_interleave * part.source.dtype.row_bytes(part.source.shape[-1])
    return max(step // group, 1) * group


def _converted(
    part: Part, tile: NDArray[np.uint8], start: int, weights: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    """The bytes that `tile`, which stands `start` bytes into the slice, becomes."""
    dtype = part.source.dtype
    try:
        return recode(tile, dtype, part.dtype, columns=part.source.shape[-1], weights=weights)
    except ElementError as error:
        where = f"{part.source.tensor.file}: tensor {part.source.tensor.name!r}"
        first = start // dtype.block_bytes * dtype.block_elements
        place = list(part.source.place(first + error.index))
        if not error.is_finite:
            value = element(tile, dtype, error.index)
            raise SourceError("not-finite", where, f"element {place} is {value}",
                              "finite numbers to convert",
                              "the checkpoint is damaged: fetch it again") from error  # fmt: skip
        if part.dtype.is_quantised:
            raise RepackError("scale-overflow", where,
                              f"the quant block at {place} has a scale beyond float16",
                              f"values that {part.dtype.name} holds",
                              "take another type for it, as bf16") from error  # fmt: skip
        value = element(tile, dtype, error.index)
        raise RepackError("value-overflow", where, f"element {place} is {value}",
                          f"values that {part.dtype.name} holds",
                          "take another type for it, as bf16 or f32") from error  # fmt: skip
