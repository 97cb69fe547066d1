"""How long a repack will take: conversions timed here and now, a disk that is assumed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from colibri_format import DTYPES, DType

from .part_plan import Conversion
from .recode import default_threads, is_slow, recode
from .repack_plan import RepackPlan

DISK_BYTES_PER_SECOND: Final = 10**9
"""Assumed of a disk, reading as well as writing: what an NVMe disk holds for long."""
_SAMPLE_ELEMENTS: Final = 2**16
_SLOW_SAMPLE_ELEMENTS: Final = 2**14

Pair = tuple[str, str]
"""Encodings before and after a conversion."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """`seconds` of a whole repack, and in words what they rest on."""

    seconds: float
    basis: str


def estimate_time(plan: RepackPlan) -> Estimate:
    """The time that carrying out `plan` takes here; times each conversion for some milliseconds."""
    elements = _elements(plan)
    costs = {pair: time_conversion(DTYPES[pair[0]], DTYPES[pair[1]]) for pair in elements}
    n_cores = min(default_threads(), plan.memory.n_workers)
    seconds = plan_seconds(plan, costs, n_cores)
    basis = f"a disk that reads and writes {DISK_BYTES_PER_SECOND / 1e9:.0f} GB/s"
    if costs:
        basis += f", conversions as timed now on {n_cores} cores"
    return Estimate(seconds, basis)


def plan_seconds(
    plan: RepackPlan,
    costs: Mapping[Pair, float],
    n_cores: int,
    disk_bytes_per_second: float = DISK_BYTES_PER_SECOND,
) -> float:
    """Seconds of `plan`, of which reading, converting and writing overlap; touches nothing.

    `costs` are seconds an element on one core.
    """
    n_read = _read_bytes(plan)
    n_written = plan.file.file_size + sum(volume.file_size for volume in plan.file.volumes)
    disk = (n_read + n_written) / disk_bytes_per_second
    compute = sum(n * costs[pair] for pair, n in _elements(plan).items()) / n_cores
    return max(disk, compute)


def time_conversion(
    source: DType, target: DType, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds an element that converting numbers of middling size takes on one core."""
    n = _SLOW_SAMPLE_ELEMENTS if is_slow() else _SAMPLE_ELEMENTS
    # As good as random numbers here, and those take longer to load than all conversions take.
    values = np.sin(np.arange(n, dtype=np.float32))
    data = recode(values.view(np.uint8), DTYPES["f32"], source, n_threads=1)
    seconds = []
    for _ in range(2):
        start = clock()
        recode(data, source, target, n_threads=1)
        seconds.append(clock() - start)
    return min(seconds) / n


def _elements(plan: RepackPlan) -> Counter[Pair]:
    """How many elements go from which encoding to which."""
    found: Counter[Pair] = Counter()
    for part, n_parts in plan.kinds:
        if part.conversion is Conversion.RECODE:
            pair = part.source.dtype.name, part.dtype.name
            found[pair] += n_parts * math.prod(part.source.shape)
    return found


def _read_bytes(plan: RepackPlan) -> int:
    """Bytes read for all parts: of their own tensors' encodings, decoded or not."""
    n_bytes = 0
    for part, n_parts in plan.kinds:
        source = part.source
        n = math.prod(source.shape)
        dtype = source.tensor.dtype
        is_packed = source.decoder is not None and source.dtype.is_quantised
        size = source.size if is_packed else n // dtype.block_elements * dtype.block_bytes
        n_bytes += n_parts * size
    return n_bytes
