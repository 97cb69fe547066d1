"""A ring with a thread of its own, in C, that keeps it full and hashes what it brings."""

from __future__ import annotations

import errno
import os
import struct
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ._native import native
from .disk_ring import NativeRing, Request, UringRing

MAX_ORDERS: Final = 256
"""Requests that a worker takes before it gives the first back: COLIBRI_WORKER_ORDERS."""

_ORDER: Final = struct.Struct("=QQIiiIQQQ")  # struct colibri_order
_OUTCOME_WORDS: Final = 6  # struct colibri_outcome
_KINDS: Final = (0, 1)  # uring, aio
_ROOM: Final = 64
_AT_ONCE: Final = 32


class WorkerRing:
    """`ring` driven by a thread: csrc/disk_worker.h. Owns `ring` and closes it.

    All requests are taken at once; demands begin before prefetches, and those only while fewer
    than `prefetch_depth` requests are in flight. With `piece_bytes` a request is read in pieces of
    so many bytes: what comes before the rest is hashed meanwhile, a demand begins before the rest
    of a prefetch, and the rest of one that is withdrawn is not read. Answers have six numbers: tag,
    result, hash of the request's `size` bytes (signed; bytes that came, where not all did), and
    nanoseconds: of the clock when it began and when it ended, and how long hashing took.

    Raises:
        OSError: no thread can be had; `ring` is still the caller's.
    """

    backlog = MAX_ORDERS
    is_checking = True

    def __init__(
        self, ring: NativeRing, depth: int, prefetch_depth: int, piece_bytes: int = 0
    ) -> None:
        library = native().library
        if library is None:
            raise OSError(errno.ENOSYS, f"no C library: {native().reason}")
        self.name = ring.name
        self._ring = ring
        n_bytes = library.function("colibri_worker_bytes", "i32")()
        self._memory = np.zeros(n_bytes + 64, np.uint8)
        start = int(self._memory.__array_interface__["data"][0])
        self.worker = start + -start % 64
        self._orders = bytearray(_ORDER.size * _AT_ONCE)
        self._orders_at = int(np.frombuffer(self._orders, np.uint8).__array_interface__["data"][0])
        self._outcomes = np.zeros((_ROOM, _OUTCOME_WORDS), np.int64)
        self._outcomes_at = int(self._outcomes.__array_interface__["data"][0])
        function = library.function
        self._submit = function("colibri_worker_submit", "i32", "ptr", "ptr", "u32")
        self._reap = function("colibri_worker_reap", "i32", "ptr", "ptr", "u32", "i32")
        self._withdraw = function("colibri_worker_withdraw", "i32", "ptr", "u32")
        self._promote = function("colibri_worker_promote", "i32", "ptr", "u32")
        self._count = function("colibri_worker_outstanding", "i32", "ptr")
        begin = function("colibri_worker_open", "i32", "ptr", "ptr", "i32", "ptr")
        kind = _KINDS[not isinstance(ring, UringRing)]
        plan = np.array([depth, prefetch_depth, piece_bytes], np.uint32)
        plan_at = int(plan.__array_interface__["data"][0])
        result = begin(self.worker, ring.queue, kind, plan_at)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        # Also when nobody closes: the thread ends before its memory and the queue go.
        stop = function("colibri_worker_close", "i32", "ptr")
        self._end = weakref.finalize(self, _close, stop, self.worker, self._memory, ring)

    def submit(self, requests: Sequence[Request]) -> int:
        """How many of `requests`, from the first on, were taken, or -EBUSY."""
        taken = requests[:_AT_ONCE]
        for i, request in enumerate(taken):
            _ORDER.pack_into(self._orders, i * _ORDER.size, *request)
        n: int = self._submit(self.worker, self._orders_at, len(taken))
        return n

    def reap(self, *, wait: bool) -> list[list[int]]:
        """What became of requests that have ended; with `wait` at least one, unless a signal came.

        Raises:
            OSError: the queue serves no more.
        """
        n = self._reap(self.worker, self._outcomes_at, _ROOM, wait)
        if n in (0, -errno.EINTR):
            return []
        if n < 0:
            raise OSError(-n, os.strerror(-n))
        outcomes: list[list[int]] = self._outcomes[:n].tolist()
        return outcomes

    def withdraw(self, tag: int) -> bool:
        """Whether request `tag` had not begun, and is none any more. One that has begun ends with
        -ECANCELED, unless all of its pieces have begun."""
        return bool(self._withdraw(self.worker, tag))

    def promote(self, tag: int) -> None:
        """Makes a prefetch that has not begun a demand."""
        self._promote(self.worker, tag)

    def in_flight(self) -> int:
        """Requests that were taken and not given back."""
        n: int = self._count(self.worker)
        return n

    def close(self) -> None:
        """Drops what has not begun, waits for the rest, ends the thread, closes the ring."""
        self._end()


def _close(stop: Any, worker: int, memory: np.ndarray[Any, Any], ring: NativeRing) -> None:
    stop(worker)
    del memory  # the worker's own, kept until here
    ring.close()
