"""Queues of requests that the kernel serves: io_uring and Linux AIO, over csrc/disk.h."""

from __future__ import annotations

import errno
import os
import struct
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ._native import NativeLibrary, native
from .disk import EngineName

MAX_DEPTH: Final = 1024
MAX_REQUEST: Final = 1 << 30
"""Bytes of one request; the kernel cuts longer ones itself, at just below 2 GiB."""

PIECE_BYTES: Final = 1 << 30
"""Bytes of one registered buffer: the kernel takes no longer ones."""

_READ: Final = struct.Struct("=QQIiiI")  # struct colibri_read
_DONE_ROOM: Final = 64


class Request(NamedTuple):
    """`length` bytes at `offset` into memory at `address`; `file` is its number if registered.

    A ring that checks hashes the first `size` bytes, XXH3-64 with `seed`, unless `size` is 0.
    """

    address: int
    offset: int
    length: int
    fd: int
    file: int
    tag: int
    seed: int = 0
    size: int = 0
    is_ahead: bool = False


class Ring(Protocol):
    """Takes requests and gives back what became of them. One thread at a time."""

    @property
    def name(self) -> str:
        """As engines are called."""

    @property
    def backlog(self) -> int:
        """Requests that it takes beyond those that the kernel is given."""

    @property
    def is_checking(self) -> bool:
        """Whether it hashes, and its answers have six numbers: see `disk_worker.WorkerRing`."""

    def submit(self, requests: Sequence[Request]) -> int:
        """How many of `requests`, from the first on, have begun, or -errno if none could."""

    def reap(self, *, wait: bool) -> list[list[int]]:
        """Pairs of tag and result (bytes read or -errno) of requests that have ended.

        With `wait`, and requests in flight, at least one, unless a signal came first.
        """

    def withdraw(self, tag: int) -> bool:
        """Whether request `tag` had not begun, and is none any more."""

    def promote(self, tag: int) -> None:
        """Makes a prefetch that has not begun a demand."""

    def in_flight(self) -> int:
        """Requests that have begun and were not given back."""

    def close(self) -> None:
        """Waits for what is in flight and gives the queue up; again does nothing."""


class NativeRing:
    """A queue of csrc/disk.h for `depth` requests in flight.

    Raises:
        OSError: the system has no such queue for us; `errno` says why.
    """

    name: ClassVar[str]
    backlog: ClassVar[int] = 0
    is_checking: ClassVar[bool] = False

    def __init__(self, depth: int) -> None:
        library = native().library
        if library is None:
            raise OSError(errno.ENOSYS, f"no C library: {native().reason}")
        if not 1 <= depth <= MAX_DEPTH:
            raise OSError(errno.EINVAL, f"a depth of {depth}; 1 to {MAX_DEPTH}")
        n_bytes = self._function(library, "bytes")()
        self._depth = depth
        self._memory = np.zeros(n_bytes + 64, np.uint8)
        start = int(self._memory.__array_interface__["data"][0])
        self.queue = start + -start % 64
        self._reads = bytearray(_READ.size * depth)
        self._reads_at = int(np.frombuffer(self._reads, np.uint8).__array_interface__["data"][0])
        self._done = np.zeros((_DONE_ROOM, 2), np.int64)
        self._done_at = int(self._done.__array_interface__["data"][0])
        self._submit = self._function(library, "submit", "ptr", "ptr", "u32")
        self._reap = self._function(library, "reap", "ptr", "ptr", "u32", "i32")
        self._count = self._function(library, "in_flight", "ptr")
        _check(self._function(library, "open", "ptr", "u32")(self.queue, depth))
        # Also when nobody closes: the kernel's memory and descriptor go with this object.
        self._end = weakref.finalize(
            self, _drain, self._function(library, "close", "ptr"), self.queue, self._memory
        )

    def _function(self, library: NativeLibrary, name: str, *arguments: str) -> Any:
        return library.function(f"colibri_{self.name}_{name}", "i32", *arguments)

    def submit(self, requests: Sequence[Request]) -> int:
        taken = requests[: self._depth]
        for i, request in enumerate(taken):
            _READ.pack_into(self._reads, i * _READ.size, *request[:6])
        n: int = self._submit(self.queue, self._reads_at, len(taken))
        return n

    def reap(self, *, wait: bool) -> list[list[int]]:
        n = self._reap(self.queue, self._done_at, _DONE_ROOM, wait)
        if n in (0, -errno.EINTR):
            return []
        _check(n)
        done: list[list[int]] = self._done[:n].tolist()
        return done

    def withdraw(self, tag: int) -> bool:
        return False

    def promote(self, tag: int) -> None:
        pass

    def in_flight(self) -> int:
        n: int = self._count(self.queue)
        return n

    def close(self) -> None:
        self._end()


class UringRing(NativeRing):
    """io_uring. What is registered spares the kernel work; each can be refused on its own."""

    name: ClassVar[str] = EngineName.URING

    def register_buffers(self, arena: NDArray[np.uint8] | None) -> None:
        """Registers the memory that is read into; None takes that back.

        Raises:
            OSError: the kernel refuses; reads go on without.
        """
        library = native().library
        address = 0 if arena is None else int(arena.__array_interface__["data"][0])
        n_bytes = 0 if arena is None else arena.nbytes
        if library is not None:
            register = self._function(library, "register_buffers", "ptr", "u64", "u64", "u64")
            _check(register(self.queue, address, n_bytes, PIECE_BYTES))

    def register_files(self, fds: Sequence[int]) -> None:
        """Registers the files that are read, by their order; none takes that back.

        Raises:
            OSError: the kernel refuses; reads go on without.
        """
        library = native().library
        numbers = np.array(fds, np.int32)
        if library is not None:
            register = self._function(library, "register_files", "ptr", "ptr", "u32")
            _check(register(self.queue, numbers.ctypes.data, len(numbers)))


class AioRing(NativeRing):
    """Linux AIO: asynchronous for direct reads alone."""

    name: ClassVar[str] = EngineName.AIO


def read_once(ring: Ring, fd: int, buffers: list[Any], offset: int, *, file: int = -1) -> int:
    """`os.preadv` of one buffer through an idle ring: gives the bytes read.

    Raises:
        OSError: what the kernel said.
    """
    buffer = np.frombuffer(buffers[0], np.uint8)
    address = int(buffer.__array_interface__["data"][0])
    n = ring.submit([Request(address, offset, buffer.nbytes, fd, file, 0)])
    while n > 0:
        for _, result in ring.reap(wait=True):
            return _check(result)
    return _check(n)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def _drain(close: Any, queue: int, memory: NDArray[np.uint8]) -> None:
    while (result := close(queue)) == -errno.EINTR:
        pass
    del memory  # the queue's own, kept until here
    _check(result)
