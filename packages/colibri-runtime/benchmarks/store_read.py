"""Random blocks through the whole store, beside what the disk gives to a loop that only reads.

Arms, interleaved, the order turned by one each round, each with the page cache of this machine
emptied of the file and every block read once in a random order of the round's own:

- bare: io_uring from C (bare_uring.c), direct, same depth, no checksums, as many slots;
- store: fetch, take, close, checksums on, `--io auto`; once in fetches of 8 blocks, as a token
  asks, where the queue runs dry at the end of each, and once in fetches of 64;
- unchecked: the same with 64 and without checksums;
- pread: `os.preadv` into one buffer, buffered, one block at a time;
- mmap: blocks copied out of a mapping, one at a time.

    python store_read.py [--folder /tmp] [--gib 2] [--rounds 5] [--sizes 1048576,3670016,8388608]

With `--limit-mb` the kernel holds every arm to that rate. Rates are GB/s (10^9), CPU is seconds a
GB of the process, kernel's work included. A virtual disk may be the host's memory: compare arms and
never call it the speed of a disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from synthetic_blocks import Blocks, bare_read, compile_bare, disk_limit, forget

from colibri_runtime import RunConfig, equal_slots
from colibri_runtime.disk_queue import default_depth
from colibri_runtime.opening import open_pool

N_EXPERTS = 64
POOL_BYTES = 320 * 2**20


def slots_of(block_bytes):
    """As many slots as a pool has, in huge pages and in no cache."""
    return POOL_BYTES // block_bytes


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def by_store(blocks, order, group, depth, io, *, is_verified=True):
    """Seconds, CPU seconds, bytes, and the engine's report."""
    counts = [N_EXPERTS] * blocks.geometry.n_layers
    size = int(blocks.block_index.entries["size"][0, 0])
    slot_bytes = -(-size // 4096) * 4096
    plan = equal_slots(slot_bytes, counts, slots_of(slot_bytes), 8, 0)
    config = RunConfig(
        io=io, io_depth=depth, prefetch_depth=0, policy="lru", is_verified=is_verified
    )
    with open_pool([blocks], plan, config) as store:
        report = store.io_report
        started, cpu = time.perf_counter(), cpu_seconds()
        for layer, experts in order:
            for first in range(0, len(experts), group):
                with store.fetch(layer, experts[first : first + group]) as fetch:
                    while fetch.take():
                        pass
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        n_bytes = store.stats.total().read_bytes
        if store.stats.total().n_hits:
            raise RuntimeError("some blocks were not read")
    return seconds, cpu, n_bytes, report


def by_pread(path, offsets, size):
    buffer = np.empty(size, np.uint8)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    started, cpu = time.perf_counter(), cpu_seconds()
    for offset in offsets:
        if os.preadv(fd, [buffer], offset) != size:
            raise RuntimeError("short read")
    result = time.perf_counter() - started, cpu_seconds() - cpu, size * len(offsets)
    os.close(fd)
    return result


def by_mmap(path, offsets, size):
    buffer = np.empty(size, np.uint8)
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = np.frombuffer(mapping, np.uint8)
    started, cpu = time.perf_counter(), cpu_seconds()
    for offset in offsets:
        np.copyto(buffer, view[offset : offset + size])
    return time.perf_counter() - started, cpu_seconds() - cpu, size * len(offsets)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, help="default: the engine's own for the size")
    parser.add_argument("--io", default="auto")
    parser.add_argument("--sizes", default="1048576,3670016,8388608")
    parser.add_argument("--limit-mb", type=int, help="slow the disk down to so many MB/s (root)")
    parser.add_argument("--keep", action="store_true", help="leave the file for the next time")
    options = parser.parse_args(argv)
    rng = np.random.default_rng()
    with tempfile.TemporaryDirectory() as folder:
        program = compile_bare(Path(folder))
        for size in map(int, options.sizes.split(",")):
            path = options.folder / f"store_read.{size}.blocks"
            n_layers = max(1, int(options.gib * 2**30) // (N_EXPERTS * size))
            blocks = Blocks(path, n_layers, N_EXPERTS, size)
            limit = options.limit_mb and options.limit_mb * 10**6
            try:
                with disk_limit(options.folder, limit):
                    run(blocks, size, program, options, rng)
            finally:
                if not options.keep:
                    path.unlink()
    return 0


def run(blocks, size, program, options, rng):
    path, depth = blocks.path, options.depth or default_depth(size)
    reports = []

    def store(order, group, **more):
        *result, report = by_store(blocks, order, group, depth, options.io, **more)
        reports.append(report)
        return result

    arms = {
        "bare": lambda order, offsets: bare_read(
            program, path, offsets, size, depth, n_slots=slots_of(size)
        ),
        "store, 8": lambda order, offsets: store(order, 8),
        "store, 64": lambda order, offsets: store(order, 64),
        "unchecked, 64": lambda order, offsets: store(order, 64, is_verified=False),
        "pread": lambda order, offsets: by_pread(path, offsets, size),
        "mmap": lambda order, offsets: by_mmap(path, offsets, size),
    }
    results = {name: [] for name in arms}
    for number in range(-1, options.rounds):
        names = list(arms)[max(number, 0) % len(arms) :] + list(arms)[: max(number, 0) % len(arms)]
        for name in names:
            order = [
                (int(layer), rng.permutation(N_EXPERTS).tolist())
                for layer in rng.permutation(blocks.geometry.n_layers)
            ]
            entries = blocks.block_index.entries
            offsets = [int(entries[layer, e]["offset"]) for layer, es in order for e in es]
            forget(path)
            result = arms[name](order, offsets)
            # The round before the first warms whatever lies below this machine.
            if number >= 0:
                results[name].append(result)
    report = reports[-1]
    print(
        f"\nblocks of {size} bytes, {blocks.file_size / 1e9:.2f} GB, depth {depth}, "
        f"{options.rounds} rounds; store: {report.engine}, {report.mode} {report.reason}"
        + (f"; limited to {options.limit_mb} MB/s" if options.limit_mb else "")
    )
    bare = [n / s for s, _, n in results["bare"]]
    bare_cpu = statistics.median(c / n * 1e9 for _, c, n in results["bare"])
    for name, runs in results.items():
        rates = [n / s / 1e9 for s, _, n in runs]
        ratios = sorted(r * 1e9 / b for r, b in zip(rates, bare, strict=True))
        cpu = statistics.median(c / n * 1e9 for _, c, n in runs)
        print(
            f"  {name:<14} {statistics.median(rates):6.2f} GB/s ({min(rates):.2f} to "
            f"{max(rates):.2f})  of bare {statistics.median(ratios):5.0%} ({ratios[0]:.0%} to "
            f"{ratios[-1]:.0%})  CPU {cpu:.3f} s/GB, {cpu - bare_cpu:+.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
