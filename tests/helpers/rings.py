"""A ring of requests without a kernel's queue, which fails by a script."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from colibri_format.checksum import checksum
from colibri_runtime.blocks import plan_read
from colibri_runtime.disk_files import UNKNOWN_ALIGNMENT, IoMode, OpenFile


class ScriptedRing:
    """Reads with `preadv` when reaped, in order of submission, one request a call.

    `acts` says what becomes of each request: None reads it, a positive number that many bytes of
    it, a negative one is -errno, and a callable gets the request and the result, whose value it
    may replace. `answers` are the results of calls of `submit`, None for success.
    """

    name = "scripted"
    backlog = 0
    is_checking = False

    def __init__(self, acts=(), answers=()):
        self.acts = list(acts)
        self.answers = list(answers)
        self.queue = []
        self.begun = []
        self.most_in_flight = 0
        self.is_closed = False

    def submit(self, requests):
        assert not self.is_closed
        answer = self.answers.pop(0) if self.answers else None
        n = len(requests) if answer is None else min(answer, len(requests))
        if n > 0:
            self.queue += requests[:n]
            self.begun += requests[:n]
            self.most_in_flight = max(self.most_in_flight, len(self.queue))
        return n

    def reap(self, *, wait):
        if not (wait and self.queue):
            return []
        return [self.finish(0)]

    def finish(self, number):
        """What becomes of the request that stands at `number` of the queue."""
        request = self.queue.pop(number)
        act = self.acts.pop(0) if self.acts else None
        if isinstance(act, int) and act < 0:
            return [request.tag, act]
        length = act if isinstance(act, int) else request.length
        result = read_request(request, length)
        if callable(act):
            result = act(request, result)
        return [request.tag, result]

    def withdraw(self, tag):
        return False

    def promote(self, tag):
        pass

    def in_flight(self):
        return len(self.queue)

    def close(self):
        self.queue.clear()
        self.is_closed = True


class ScriptedWorker(ScriptedRing):
    """The same as a ring with a thread: it takes everything at once, hashes whole requests, and
    gives up the rest of one that is withdrawn once it has come to the front."""

    backlog = 64
    is_checking = True

    def __init__(self, acts=(), answers=()):
        super().__init__(acts, answers)
        self.given_up = set()

    def finish(self, number):
        request = self.queue[number]
        if request.tag in self.given_up:
            self.queue.pop(number)
            return [request.tag, -errno.ECANCELED, 4096, 0, 0, 0]
        tag, result = super().finish(number)
        if not request.size or result != request.length:
            return [tag, result, 0, 0, 0, 0]
        found = checksum(memory_at(request.address, request.size), request.seed)
        return [tag, result, found - (found >> 63 << 64), 0, 0, 1]

    def withdraw(self, tag):
        if self.queue and self.queue[0].tag == tag:
            self.given_up.add(tag)
            return False
        before = len(self.queue)
        self.queue = [request for request in self.queue if request.tag != tag]
        return len(self.queue) < before


def memory_at(address, n_bytes):
    """The bytes at `address`, to be read and written."""
    return memoryview((ctypes.c_uint8 * n_bytes).from_address(address)).cast("B")


def read_request(request, length=None):
    """Bytes that `preadv` gives for `request`, or -errno."""
    memory = memory_at(request.address, request.length if length is None else length)
    try:
        return os.preadv(request.fd, [memory], request.offset)
    except OSError as error:
        return -(error.errno or errno.EIO)


def open_plain(path, *, mode=IoMode.BUFFERED, alignment=UNKNOWN_ALIGNMENT):
    """`path` open without O_DIRECT, whatever `mode` says of it; two descriptors in direct mode."""
    fd = os.open(path, os.O_RDONLY)
    twin = os.open(path, os.O_RDONLY) if mode is IoMode.DIRECT else fd
    return OpenFile(path, fd, twin, mode, "", alignment)


def read_of(source, pool, key=(0, 0), slot=0, **options):
    """A read of block `key` into a slot."""
    read = plan_read(source, *key, slot=slot, buffer=pool.slot(slot))
    for name, value in options.items():
        setattr(read, name, value)
    return read


def ring_of(kind, depth=4):
    """A ring of the kernel's, if it has one for us."""
    try:
        return kind(depth)
    except OSError as error:
        pytest.skip(f"{kind.name}: {error}")


def n_descriptors():
    """How many descriptors this process has open."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip(f"no {folder} to count descriptors in")
    return len(list(folder.iterdir()))
