"""Carries out a plan: streams the source into the output, tile by tile, in the output's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from colibri_format import Sink, Writer

from .errors import RepackError, SourceError
from .output_checks import check_not_input, check_space
from .part_plan import Part
from .pipeline import Pipeline
from .repack_plan import BlockJob, FileJob, Job, RepackPlan, TensorJob, job_bytes
from .sources import Source
from .work_facts import resume_of

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """How a conversion went: `resumed_bytes` of the payload were there from an earlier run.

    `read_mode` and `write_mode` are `direct` or `buffered`, with what showed it; `sync_seconds` is
    how long syncs for the journal took, beside everything else.
    """

    uuid: UUID
    resumed_bytes: int
    read_mode: tuple[str, str]
    write_mode: tuple[str, str]
    sync_seconds: float
    notes: tuple[str, ...]


def convert(
    plan: RepackPlan,
    source: Source,
    output: Path,
    *,
    overwrite: bool = False,
    restart: bool = False,
    trust_source: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the file of `plan` from `source` to `output`.

    Memory stays within `plan.memory`, whatever the model's size. `progress(done, total)` is called
    at the start and after every piece with bytes of payload. The output has its name only when it
    is complete. What an interrupt, a full disk or a kill leaves is gone on with by the next call
    with the same plan, unless `restart`; inputs that are no longer the same files are accepted
    only with `trust_source`. Errors in the data, which would come again, leave nothing.

    Raises:
        RepackError: `output-is-input`, `scale-overflow` (a quant block's scale is beyond float16),
            `value-overflow` (an element is beyond float16 or bfloat16).
        SourceError: `not-finite` when a converted tensor holds NaN or infinity, `imatrix-value`,
            `source-changed` when an input was changed meanwhile.
        StorageError: `disk-full` before the first byte when the space is not there, `file-exists`,
            `unfinished-differs` when unfinished work is of another source or other options,
            `file-not-found` (the output's folder or a volume's), `short-read`, or the kernel's
            refusal.
    """
    check_output(source, output)
    resume = resume_of(plan, source, restart=restart, trust_source=trust_source)
    writer = Writer(
        output,
        plan.file,
        overwrite=overwrite,
        volume_folders=plan.options.volume_paths,
        resume=resume,
        buffer_bytes=plan.memory.write_buffer_bytes,
    )
    for path in writer.volume_paths:
        check_output(source, path)
    sizes = (plan.file.file_size, *(volume.file_size for volume in plan.file.volumes))
    check_space(zip((output, *writer.volume_paths), sizes, strict=True))
    with writer, Pipeline(source, plan.memory) as pipeline:
        try:
            resumed = _write(plan, pipeline, writer, progress)
            _check_unchanged(plan, source)
        except (RepackError, SourceError) as error:
            # The same data would fail again; a source that changed may be trusted by the caller.
            if error.code != "source-changed":
                writer.abandon()
            raise
    return Converted(
        uuid=writer.uuid,
        resumed_bytes=resumed,
        read_mode=source.io_mode,
        write_mode=writer.io_mode,
        sync_seconds=writer.sync_seconds,
        notes=writer.notes,
    )


def _write(plan: RepackPlan, pipeline: Pipeline, writer: Writer, progress: Progress | None) -> int:
    """Writes what `writer` does not have; the bytes of payload that it had."""
    jobs = [job for job in plan.jobs if not _is_done(job, writer)]
    done = resumed = plan.payload_bytes - sum(job_bytes(job) for job in jobs)

    def report(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, plan.payload_bytes)

    report(0)
    pieces = pipeline.stream(part for job in jobs for part in _parts(job))
    for job in jobs:
        if isinstance(job, FileJob):
            data = job.file.read()
            writer.write_file(job.file.name, data)
            report(len(data))
        elif isinstance(job, BlockJob):
            with writer.block(job.layer, job.expert) as sink:
                for part in job.parts:
                    _pass_on(part, pieces, sink, report)
        else:
            with writer.tensor(job.name) as sink:
                _pass_on(job.part, pieces, sink, report)
    return resumed


def _is_done(job: Job, writer: Writer) -> bool:
    if isinstance(job, BlockJob):
        return writer.has_block(job.layer, job.expert)
    if isinstance(job, TensorJob):
        return writer.has_tensor(job.name)
    return writer.has_file(job.file.name)


def _parts(job: Job) -> tuple[Part, ...]:
    if isinstance(job, BlockJob):
        return job.parts
    return (job.part,) if isinstance(job, TensorJob) else ()


def _pass_on(
    part: Part, pieces: Iterator[NDArray[np.uint8]], sink: Sink, report: Callable[[int], None]
) -> None:
    left = part.size
    while left:
        piece = next(pieces)
        sink.write(piece)
        left -= piece.nbytes
        report(piece.nbytes)


def _check_unchanged(plan: RepackPlan, source: Source) -> None:
    imatrix = plan.options.imatrix
    changed = source.changed() or (imatrix.changed() if imatrix is not None else None)
    if changed is None:
        return
    path, how = changed
    raise SourceError(
        "source-changed",
        path,
        f"{how} while it was read",
        "inputs stay as they are until the end",
        "if its content is certainly the same, repeat with --trust-source, which keeps what is "
        "done; else with --restart",
    )


def check_output(source: Source, output: Path, *others: Path) -> None:
    """Raise `output-is-input` if writing `output` could touch a file of `source` or of `others`.

    Looks at the files themselves, not at their names: links and other spellings count.
    """
    check_not_input(output, (*source.inputs, *others))
