"""How fast memory is read here: what computing with weights cannot be faster than."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

_BYTES: Final = 128 * 2**20
_MOST_THREADS: Final = 16
_N_ROUNDS: Final = 4


def memory_rate(n_cpus: int) -> float:
    """Bytes a second at which all processors together read memory: the best of some rounds."""
    n_threads = min(n_cpus, _MOST_THREADS)
    parts = [np.ones(_BYTES // 8, np.int64) for _ in range(n_threads)]
    best = 0.0
    # NumPy lets go of the interpreter while it looks for a maximum.
    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(_N_ROUNDS):
            started = time.perf_counter()
            list(threads.map(np.max, parts))
            best = max(best, n_threads * parts[0].nbytes / (time.perf_counter() - started))
    return best
