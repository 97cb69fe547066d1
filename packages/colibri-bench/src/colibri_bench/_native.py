"""System calls that Python lacks: mincore(2), prctl(2)."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from typing import Final

import numpy as np
from numpy.typing import NDArray

_PR_SET_PDEATHSIG: Final = 1  # prctl.h


def resident_pages(mapping: mmap.mmap, offset: int, n_bytes: int) -> NDArray[np.bool_] | None:
    """For each page of `n_bytes` from `offset`, a page boundary, whether it is in memory; None
    where the system has no such call or refuses it. Touches no page.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    call.restype = ctypes.c_int
    n_pages = -(-n_bytes // mmap.PAGESIZE)
    states = np.zeros(n_pages, np.uint8)
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    if call(start + offset, n_bytes, states.ctypes.data):
        return None
    return (states & 1).astype(np.bool_)


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when `parent`, its own, ends, even if it was killed;
    ends it at once if that one has gone. Nothing where the system has no such call.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return
    call(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
