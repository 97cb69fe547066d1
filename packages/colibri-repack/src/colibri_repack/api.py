"""Planning and repacking in one call each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from .collector import without_collector
from .convert import Progress, check_output, convert
from .decoding import Fp8Form
from .families import Checkpoint, read_checkpoint
from .imatrix import Imatrix
from .kernel_layout import DEFAULT_LAYOUT, KernelLayout
from .memory_plan import DEFAULT_MEMORY, check_metadata
from .part_plan import Conversion
from .plan_advice import MIN_ALIGNMENT
from .quantise import Quant
from .recode import engine_name, is_slow
from .repack_plan import RepackOptions, RepackPlan, plan_repack
from .report import RepackReport
from .routing_trace import read_trace
from .sources import Source, open_source
from .striping import VolumeFolder, check_folders

SourceLike = str | os.PathLike[str] | Source


def plan(source: SourceLike, options: RepackOptions | None = None) -> RepackPlan:
    """What repacking `source`, a path or an open source, would write.

    Raises:
        ColibriError: whatever is wrong with the source or the options; see `open_source`,
            `read_checkpoint` and `plan_repack`.
    """
    with without_collector(), _opened(source) as opened:
        options = options or RepackOptions()
        return _planned(opened, _checkpoint(opened, options), options)


def repack(
    source: SourceLike,
    output: str | os.PathLike[str],
    *,
    quant: str | Quant = Quant.KEEP,
    dense_quant: str | Quant | None = None,
    may_requantise: bool = False,
    imatrix: str | os.PathLike[str] | None = None,
    alignment: int = MIN_ALIGNMENT,
    family: str | None = None,
    fp8: str | Fp8Form = Fp8Form.BF16,
    layout: str | KernelLayout = DEFAULT_LAYOUT,
    order: str | os.PathLike[str] | None = None,
    volumes: Sequence[str | os.PathLike[str] | VolumeFolder] = (),
    memory_bytes: int = DEFAULT_MEMORY,
    overwrite: bool = False,
    restart: bool = False,
    trust_source: bool = False,
    progress: Progress | None = None,
) -> RepackReport:
    """Write the checkpoint `source`, a path or an open source, as the `.colibri` file `output`.

    Same input and options give the same bytes. `progress(done, total)` is called with bytes of
    payload. `memory_bytes` is a ceiling on what the process has resident, whatever the model's
    size. `quant`, `dense_quant` and `may_requantise` as in `RepackOptions`; `imatrix` is the path
    of an importance matrix, `order` that of a routing trace. Each of `volumes` is a folder that
    gets a volume file. An interrupted repack is gone on with; see `convert` for that and for
    `restart` and `trust_source`.

    Raises:
        ColibriError: as `plan`, and as `convert`.
    """
    output = Path(output)
    with (
        without_collector() as collect_again,
        _opened(source) as opened,
        opened_imatrix(imatrix) as matrix,
    ):
        options = RepackOptions(
            quant=Quant.of(quant),
            alignment=alignment,
            dense_quant=None if dense_quant is None else Quant.of(dense_quant),
            may_requantise=may_requantise,
            imatrix=matrix,
            family=family,
            fp8=Fp8Form.of(fp8),
            layout=KernelLayout.of(layout),
            trace=None if order is None else read_trace(Path(order)),
            volumes=tuple(
                folder if isinstance(folder, VolumeFolder) else VolumeFolder(Path(folder))
                for folder in volumes
            ),
            memory_bytes=memory_bytes,
        )
        others = [Path(path) for path in (imatrix, order) if path is not None]
        check_output(opened, output, *others)
        planned = _planned(opened, _checkpoint(opened, options), options)
        collect_again()
        start = time.perf_counter()
        converted = convert(
            planned,
            opened,
            output,
            overwrite=overwrite,
            restart=restart,
            trust_source=trust_source,
            progress=progress,
        )
        seconds = time.perf_counter() - start
        return RepackReport.of(planned, opened.path, output, converted=converted, seconds=seconds)


def _planned(source: Source, checkpoint: Checkpoint, options: RepackOptions) -> RepackPlan:
    check_folders(options.volumes)
    planned = plan_repack(source, checkpoint, options)
    if is_slow() and any(part.conversion is Conversion.RECODE for part, _ in planned.kinds):
        slow = f"converting runs in {engine_name()}"
        planned = replace(planned, warnings=(*planned.warnings, slow))
    return planned


@contextmanager
def opened_imatrix(path: str | os.PathLike[str] | None) -> Iterator[Imatrix | None]:
    """The importance matrix at `path`, open; None without a path.

    Raises:
        ColibriError: as `Imatrix`.
    """
    if path is None:
        yield None
        return
    matrix = Imatrix(Path(path))
    try:
        yield matrix
    finally:
        matrix.close()


def _checkpoint(source: Source, options: RepackOptions) -> Checkpoint:
    admit = partial(check_metadata, options.memory_bytes)
    return read_checkpoint(source, family=options.family, fp8=options.fp8, admit=admit)


@contextmanager
def _opened(source: SourceLike) -> Iterator[Source]:
    """`source` if it is open already, else opened and closed again."""
    if not isinstance(source, (str, os.PathLike)):
        yield source
        return
    opened = open_source(source)
    try:
        yield opened
    finally:
        opened.close()
