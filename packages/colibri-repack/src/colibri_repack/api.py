"""Planning and repacking in one call each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .convert import Progress, check_output, convert
from .families import read_checkpoint
from .quantise import Quant
from .repack_plan import MIN_ALIGNMENT, RepackOptions, RepackPlan, plan_repack
from .report import RepackReport
from .sources import Source, open_source

SourceLike = str | os.PathLike[str] | Source


def plan(source: SourceLike, options: RepackOptions | None = None) -> RepackPlan:
    """What repacking `source`, a path or an open source, would write.

    Raises:
        ColibriError: whatever is wrong with the source or the options; see `open_source`,
            `read_checkpoint` and `plan_repack`.
    """
    with _opened(source) as opened:
        return plan_repack(opened, read_checkpoint(opened), options or RepackOptions())


def repack(
    source: SourceLike,
    output: str | os.PathLike[str],
    *,
    quant: str | Quant = Quant.KEEP,
    alignment: int = MIN_ALIGNMENT,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> RepackReport:
    """Write the checkpoint `source`, a path or an open source, as the `.colibri` file `output`.

    Same input and options give the same bytes. `progress(done, total)` is called with bytes of
    payload. Memory stays below 400 MB whatever the model's size.

    Raises:
        ColibriError: as `plan`, and as `convert`.
    """
    output = Path(output)
    options = RepackOptions(Quant.of(quant), alignment)
    with _opened(source) as opened:
        check_output(opened, output)
        planned = plan_repack(opened, read_checkpoint(opened), options)
        start = time.perf_counter()
        uuid = convert(planned, opened, output, overwrite=overwrite, progress=progress)
        seconds = time.perf_counter() - start
        return RepackReport.of(planned, opened.path, output, uuid=uuid, seconds=seconds)


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
