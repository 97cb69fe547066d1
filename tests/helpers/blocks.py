"""Block sources for tests of the store: random blocks in a plain file, or in memory alone."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_format import (
    DTYPES,
    INDEX_DTYPE,
    Geometry,
    Layout,
    Role,
    SegmentSpec,
)
from colibri_format.checksum import checksum
from colibri_format.layout import block_seed, round_up
from colibri_runtime.disk import BlockRead, IoReport
from colibri_runtime.disk_files import IoMode

ALIGNMENT = 4096


@dataclass
class FakeSource:
    """What the store reads of a reader; `payload` has every block's bytes."""

    path: Path
    file_size: int
    geometry: Geometry
    index: np.ndarray
    checksums: np.ndarray
    layouts: list
    payload: dict

    def layout(self, layer):
        return self.layouts[layer]


def small_layout(rows=24, columns=40, dtype="f32"):
    """A layout of three segments whose sizes are no multiples of 64."""
    kind = DTYPES[dtype]
    return Layout.of(
        (
            SegmentSpec(Role.GATE, kind, (rows, columns)),
            SegmentSpec(Role.UP, kind, (rows, columns)),
            SegmentSpec(Role.DOWN, kind, (columns, rows)),
        )
    )


def make_source(path=None, *, layouts, n_experts, absent=(), seed=0, tail=8192):
    """Random blocks, one for each `(layer, expert)` of layers with a layout; written to `path`."""
    rng = np.random.default_rng(seed)
    n_layers = len(layouts)
    index = np.zeros((n_layers, n_experts), INDEX_DTYPE)
    checksums = np.zeros((n_layers, n_experts), np.uint64)
    payload = {}
    offset = ALIGNMENT
    for layer, layout in enumerate(layouts):
        for expert in range(n_experts):
            if layout is None or (layer, expert) in absent:
                continue
            data = rng.integers(0, 256, layout.block_size, dtype=np.uint8)
            payload[layer, expert] = data
            index[layer, expert] = (offset, layout.block_size)
            checksums[layer, expert] = checksum(data, block_seed(layer, expert))
            offset += round_up(layout.block_size, ALIGNMENT)
    size = offset + tail
    if path is not None:
        with open(path, "wb") as file:
            for key, data in payload.items():
                file.seek(int(index[key]["offset"]))
                file.write(data)
            file.truncate(size)
    return FakeSource(
        Path(path or "memory.colibri"),
        size,
        Geometry(n_layers, n_experts, ALIGNMENT),
        index,
        checksums,
        list(layouts),
        payload,
    )


def assert_lease_is_right(source, lease):
    """The lease shows exactly its block's bytes, aligned and read-only."""
    data = source.payload[lease.layer, lease.expert]
    for segment in lease.layout.segments:
        view = lease.segments[segment.role]
        assert not view.flags.writeable
        assert view.__array_interface__["data"][0] % 64 == 0
        assert np.array_equal(view, data[segment.offset : segment.offset + segment.size])


class StepEngine:
    """A disk engine without threads: reads end when the test says so, or when waited for.

    `fail` holds the addresses whose next read fails with OSError.
    """

    def __init__(self, source):
        self.source = source
        self.demands = deque()
        self.prefetches = deque()
        self.done = []
        self.begun = []
        self.submitted = []
        self.fail = set()
        self.is_closed = False

    def submit(self, read: BlockRead):
        assert not self.is_closed
        self.submitted.append((read.layer, read.expert, read.is_prefetch))
        (self.prefetches if read.is_prefetch else self.demands).append(read)

    def promote(self, read):
        read.is_prefetch = False
        if read in self.prefetches:
            self.prefetches.remove(read)
            self.demands.append(read)

    def cancel(self, read):
        for queue in (self.demands, self.prefetches):
            if read in queue:
                queue.remove(read)
                return True
        return False

    def begin(self):
        """Takes the next read off the queue, so that it can no longer be cancelled."""
        queue = self.demands or self.prefetches
        if not queue:
            return False
        self.begun.append(queue.popleft())
        return True

    def finish(self, n=1):
        """Ends up to `n` reads, begun ones first."""
        for _ in range(n):
            if not self.begun and not self.begin():
                return
            read = self.begun.pop(0)
            key = (read.layer, read.expert)
            if key in self.fail:
                self.fail.remove(key)
                read.error = OSError(5, os.strerror(5))
            else:
                read.buffer[: read.size] = self.source.payload[key]
                read.n_bytes = read.length
            self.done.append(read)

    def poll(self):
        done, self.done = self.done, []
        return done

    def wait(self):
        if not self.done:
            self.finish()
        assert self.done, "waited with no read outstanding"
        return self.poll()

    def report(self):
        return IoReport("step", IoMode.BUFFERED, "a fake", 0, False)

    def close(self):
        self.is_closed = True
        assert threading.current_thread() is threading.main_thread()
