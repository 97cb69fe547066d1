"""How long a planned repack will take, told before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from colibri_format import DTYPES, DType

from .part_plan import Conversion
from .recode import is_slow, recode
from .repack_plan import RepackPlan
from .row_groups import interleave_rows

# Nothing is read or written to find out how fast the disk is.
DISK_BYTES_PER_SECOND: Final = 10**9
_ELEMENTS: Final = 2**18
_SLOW_ELEMENTS: Final = 2**13
_INTERLEAVE_COLUMNS: Final = 1024


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """`disk_seconds` at `DISK_BYTES_PER_SECOND` for reading and the same for writing.

    `compute_seconds` for converting and interleaving, from a sample of each conversion that was
    timed on this machine just now; the two take turns.
    """

    disk_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.disk_seconds + self.compute_seconds


def estimate_time(plan: RepackPlan) -> TimeEstimate:
    """The estimate for `plan`; times a sample of each conversion, some hundredths of a second."""
    recoded: dict[tuple[str, str, bool], int] = {}
    interleaved: dict[str, int] = {}
    read = 0
    for part in plan.parts:
        source = part.source.dtype
        if part.conversion is Conversion.RECODE:
            size = part.source.size
            key = source.name, part.dtype.name, part.importance is not None
            n_elements = size // source.block_bytes * source.block_elements
            recoded[key] = recoded.get(key, 0) + n_elements
        else:
            size = part.size
        read += size
        if part.row_interleave:
            interleaved[part.dtype.name] = interleaved.get(part.dtype.name, 0) + part.size
    compute = sum(
        _recode_seconds(DTYPES[source], DTYPES[target], is_weighed) * n
        for (source, target, is_weighed), n in recoded.items()
    )
    compute += sum(_interleave_seconds(DTYPES[name]) * size for name, size in interleaved.items())
    return TimeEstimate((read + plan.file.file_size) / DISK_BYTES_PER_SECOND, compute)


def _recode_seconds(source: DType, target: DType, is_weighed: bool) -> float:
    """Seconds an element, all threads at work."""
    n = _SLOW_ELEMENTS if is_slow() else _ELEMENTS
    values = np.random.default_rng(0).standard_normal(n, np.float32) * np.float32(0.02)
    data = values.view(np.uint8)
    if source.name != "f32":
        data = recode(data, DTYPES["f32"], source)
    weights = np.ones(1024, np.float32) if is_weighed else None
    start = time.perf_counter()
    recode(data, source, target, columns=1024 if is_weighed else 0, weights=weights)
    return (time.perf_counter() - start) / n


def _interleave_seconds(dtype: DType) -> float:
    """Seconds a byte."""
    data = np.zeros(dtype.size_bytes((64 if is_slow() else 1024, _INTERLEAVE_COLUMNS)), np.uint8)
    start = time.perf_counter()
    interleave_rows(data, dtype, _INTERLEAVE_COLUMNS)
    return (time.perf_counter() - start) / data.size
