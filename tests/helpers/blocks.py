"""Block sources for tests of the store: random blocks in a plain file, or in memory alone."""

from __future__ import annotations

import ctypes
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
    Volume,
)
from colibri_format.blockindex import BlockIndex
from colibri_format.checksum import checksum
from colibri_format.layout import NO_LAYOUT, PAGE, Extent, block_seed, round_up
from colibri_runtime.disk import BlockRead, IoReport
from colibri_runtime.disk_files import IoMode

ALIGNMENT = 4096


@dataclass
class FakeSource:
    """What the store reads of a reader; `payload` has every block's bytes."""

    path: Path
    file_size: int
    geometry: Geometry
    block_index: BlockIndex
    layouts: tuple
    payload: dict
    volumes: tuple = ()
    volume_paths: tuple = ()

    @property
    def index(self):
        return self.block_index.entries

    @property
    def checksums(self):
        return self.block_index.checksums


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


def make_source(
    path=None, *, layouts, n_experts, absent=(), seed=0, tail=8192, n_volumes=0, mixed=None
):
    """Random blocks, one for each `(layer, expert)` of layers with a layout; written to `path`.

    `mixed[layer, expert]` is the layout of a block that differs from its layer's. With
    `n_volumes` blocks stand in turn in the file and in so many volumes beside it.
    """
    rng = np.random.default_rng(seed)
    mixed = mixed or {}
    n_layers = len(layouts)
    shape = (n_layers, n_experts)
    index = np.zeros(shape, INDEX_DTYPE)
    checksums = np.zeros(shape, np.uint64)
    numbers = np.full(shape, NO_LAYOUT, np.uint16)
    volumes = np.zeros(shape, np.uint16)
    distinct = list(dict.fromkeys(x for x in (*layouts, *mixed.values()) if x is not None))
    payload = {}
    path = Path(path or "memory.colibri")
    paths = [path, *(path.with_name(f"{path.name}.{i + 1}") for i in range(n_volumes))]
    ends = [ALIGNMENT] * len(paths)
    for layer in range(n_layers):
        for expert in range(n_experts):
            layout = mixed.get((layer, expert), layouts[layer])
            if layout is None or (layer, expert) in absent:
                continue
            data = rng.integers(0, 256, layout.block_size, dtype=np.uint8)
            volume = len(payload) % len(paths)
            payload[layer, expert] = data
            index[layer, expert] = (ends[volume], layout.block_size)
            checksums[layer, expert] = checksum(data, block_seed(layer, expert))
            numbers[layer, expert] = distinct.index(layout)
            volumes[layer, expert] = volume
            ends[volume] += round_up(layout.block_size, ALIGNMENT)
    if path.parent != Path():
        for number, (name, end) in enumerate(zip(paths, ends, strict=True)):
            with open(name, "wb") as file:
                for key, data in payload.items():
                    if volumes[key] == number:
                        file.seek(int(index[key]["offset"]))
                        file.write(data)
                file.truncate(end + (tail if number == 0 else PAGE))
    extents = [Extent(PAGE, end - PAGE) for end in ends[1:]]
    return FakeSource(
        path,
        ends[0] + tail,
        Geometry(n_layers, n_experts, ALIGNMENT),
        BlockIndex(index, checksums, numbers, volumes),
        tuple(distinct),
        payload,
        tuple(Volume(f"v{i}", extent) for i, extent in enumerate(extents)),
        tuple(paths[1:]),
    )


def assert_lease_is_right(source, lease):
    """The lease shows exactly its block's bytes, aligned and read-only."""
    data = source.payload[lease.layer, lease.expert]
    assert ctypes.string_at(lease.address, len(data)) == data.tobytes()
    for segment in lease.layout.segments:
        view = lease.segments[segment.role]
        assert not view.flags.writeable
        assert view.__array_interface__["data"][0] % 64 == 0
        assert np.array_equal(view, data[segment.offset : segment.offset + segment.size])


def counts(store, layer):
    """Hits, lates and misses of a layer."""
    stats = store.stats.layers[layer]
    return stats.n_hits, stats.n_lates, stats.n_misses


def assert_nothing_is_held(store):
    """Nothing is in use, and every slot is accounted for."""
    cache = store.cache
    assert cache.n_pinned == 0
    assert cache.n_free + cache.n_resident + cache.n_loading == cache.n_slots


def ask(source, store, layer, experts):
    """Fetches, checks every lease, and gives the experts in order of arrival."""
    order = []
    for lease in store.fetch(layer, experts):
        assert lease.layer == layer
        assert_lease_is_right(source, lease)
        order.append(lease.expert)
    return order


class StepEngine:
    """A disk engine without threads: reads end when the test says so, or when waited for.

    `fail` holds the addresses whose next read fails with OSError, `cut` those whose next read is
    given up on its way.
    """

    def __init__(self, source):
        self.source = source
        self.demands = deque()
        self.prefetches = deque()
        self.done = []
        self.begun = []
        self.submitted = []
        self.fail = set()
        self.cut = set()
        self.is_closed = False

    def submit(self, read: BlockRead):
        assert not self.is_closed
        self.submitted.append((read.layer, read.expert, read.is_prefetch))
        (self.prefetches if read.is_prefetch else self.demands).append(read)

    def flush(self):
        pass

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
            elif key in self.cut:
                self.cut.remove(key)
                read.is_cut = True
                read.n_bytes = 4096
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
