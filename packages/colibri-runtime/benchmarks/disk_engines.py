"""Disk engines against a bare io_uring loop, with the engines' own pattern: layer after layer,
random blocks within each, the next layer only when all have come.

    python packages/colibri-runtime/benchmarks/disk_engines.py --folder /tmp/scratch engines
    python packages/colibri-runtime/benchmarks/disk_engines.py --folder /tmp/scratch depth split

Every figure is a median over rounds, with the least and the largest; in a round each arm reads
other blocks, in an order that changes, after the page cache was dropped (as root; else that of the
file alone). CPU seconds are those of the process, kernel and threads included. What a virtual disk
gives may be its host's memory: quote ratios. See docs/io.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_format.checksum import checksum
from colibri_format.layout import block_seed
from colibri_runtime.disk import BlockRead
from colibri_runtime.disk_choice import open_engine
from colibri_runtime.disk_files import BlockFile
from colibri_runtime.disk_queue import DEFAULT_DEPTH
from colibri_runtime.pool import Pool

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64K": 64 * KIB, "1M": MIB, "3.5M": 7 * MIB // 2, "8M": 8 * MIB}
EXPERTS = 64
POOL_BYTES = 256 * MIB
CHUNK = 64 * MIB


@dataclass(frozen=True)
class Arm:
    """One way to read: an engine and its knobs, or the yardstick `bare`."""

    name: str
    engine: str
    depth: int = DEFAULT_DEPTH
    split_bytes: int = 0
    direct: bool = True
    is_verified: bool = True
    n_threads: int | None = None
    registered: bool = True
    share: float = 1.0
    """Of the bytes of a round; slow arms read less."""


ENGINES = [
    Arm("bare", "bare"),
    Arm("uring", "uring"),
    Arm("uring, nothing registered", "uring", registered=False),
    Arm("uring, unchecked", "uring", is_verified=False),
    Arm("aio", "aio"),
    Arm("threads", "threads"),
    Arm("uring, buffered", "uring", direct=False, share=0.5),
    Arm("threads, buffered", "threads", direct=False, share=0.5),
    Arm("mmap", "mmap", share=0.1),
]
DEPTHS = [
    Arm(f"{engine}, depth {depth}", engine, depth=depth)
    for depth in (1, 2, 4, 8, 16)
    for engine in ("bare", "uring")
] + [Arm(f"threads, {n}", "threads", n_threads=n) for n in (1, 2, 4)]
SPLITS = [
    Arm(f"uring, {name}, depth {depth}", "uring", split_bytes=split, depth=depth)
    for name, split in (
        ("whole", 0),
        ("split 256K", 256 * KIB),
        ("split 1M", MIB),
        ("split 2M", 2 * MIB),
    )
    for depth in (2, 8, 32)
]


class Blocks:
    """A file of random bytes, seen as layers of blocks of one size, and their checksums."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.n = path.stat().st_size // size
        side = path.with_suffix(f".{size}.npy")
        if not side.exists():
            sums = np.empty(self.n, np.uint64)
            with open(path, "rb", buffering=0) as file:
                buffer = bytearray(size)
                for i in range(self.n):
                    file.readinto(buffer)
                    sums[i] = checksum(buffer, block_seed(*divmod(i, EXPERTS)))
            np.save(side, sums)
        self.sums = np.load(side).tolist()

    def choose(self, rng: np.random.Generator, n_bytes: int, group: int) -> list[list[int]]:
        """Blocks to read: `group` different ones of each layer, layer after layer."""
        n_layers = max(1, self.n // EXPERTS)
        experts = min(EXPERTS, self.n)
        n_groups = max(1, n_bytes // (self.size * group))
        first = int(rng.integers(n_layers))
        return [
            [
                (first + i) % n_layers * EXPERTS + int(e)
                for e in rng.choice(experts, group, replace=False)
            ]
            for i in range(n_groups)
        ]


def make_file(path: Path, n_bytes: int) -> None:
    if path.exists() and path.stat().st_size == n_bytes:
        return
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        for _ in range(n_bytes // CHUNK):
            file.write(rng.bytes(CHUNK))
        file.flush()
        os.fsync(file.fileno())


def drop_cache(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return "of the file"
    return "all"


def run_bare(
    arm: Arm, program: Path, n_slots: int, blocks: Blocks, groups: list[list[int]]
) -> list[float]:
    offsets = np.array([i * blocks.size for group in groups for i in group], np.uint64)
    command = [program, blocks.path, str(blocks.size), str(arm.depth), str(len(groups[0]))]
    command.append(str(n_slots))
    result = subprocess.run(command, input=offsets.tobytes(), capture_output=True, check=True)
    return [float(word) for word in result.stdout.split()]


def run_engine(arm: Arm, pool: Pool, blocks: Blocks, groups: list[list[int]]) -> list[float]:
    probe = read_of(blocks, 0, pool, 0)
    engine = open_engine(
        arm.engine,
        [BlockFile(blocks.path, probe)],
        arena=pool.arena if arm.registered else None,
        depth=arm.depth,
        split_bytes=arm.split_bytes,
        n_threads=arm.n_threads,
        direct=arm.direct,
        is_verified=arm.is_verified,
    )
    gc.collect()
    n_bytes = slot = 0
    wall, used = time.perf_counter(), time.process_time()
    for group in groups:
        for block in group:
            engine.submit(read_of(blocks, block, pool, slot))
            slot = (slot + 1) % pool.n_slots
        engine.flush()
        left = len(group)
        while left:
            for read in engine.wait():
                left -= 1
                n_bytes += read.size
                if read.error is not None:
                    raise read.error
    result = [time.perf_counter() - wall, time.process_time() - used, n_bytes]
    report = engine.report()
    if (report.mode == "direct") != (arm.direct and arm.engine != "mmap"):
        sys.exit(f"{arm.name}: reads are {report.mode}: {report.reason}")
    engine.close()
    return result


def read_of(blocks: Blocks, block: int, pool: Pool, slot: int) -> BlockRead:
    layer, expert = divmod(block, EXPERTS)
    return BlockRead(
        layer=layer,
        expert=expert,
        offset=block * blocks.size,
        length=blocks.size,
        size=blocks.size,
        checksum=blocks.sums[block],
        slot=slot,
        buffer=pool.slot(slot),
        address=pool.addresses[slot],
    )


def measure(
    arms: Sequence[Arm],
    sizes: Sequence[str],
    path: Path,
    program: Path,
    *,
    rounds: int,
    n_bytes: int,
    group: int,
) -> None:
    for name in sizes:
        blocks = Blocks(path, SIZES[name])
        pool = Pool(max(group, POOL_BYTES // blocks.size), blocks.size)
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for number in range(rounds):
            shift = number * 3 % len(arms)
            for arm in [*arms[shift:], *arms[:shift]]:
                rng = np.random.default_rng([number, arms.index(arm), blocks.size])
                groups = blocks.choose(rng, int(n_bytes * arm.share), group)
                cache = drop_cache(path)
                if arm.engine == "bare":
                    wall, used, done = run_bare(arm, program, pool.n_slots, blocks, groups)
                else:
                    wall, used, done = run_engine(arm, pool, blocks, groups)
                found[arm.name].append((done / wall / 1e9, used / done * 1e9))
        bare = statistics.median(rate for rate, _ in found.get("bare", found[arms[0].name]))
        huge = (pool.report().huge_bytes or 0) / pool.arena_bytes
        pool.close()
        print(
            f"\nblocks of {name}, {group} a layer, {n_bytes >> 20} MiB an arm, {rounds} rounds, "
            f"page cache dropped: {cache}; {huge:.0%} of the pool in huge pages"
        )
        print(f"{'arm':30} {'GB/s':>6} {'least':>6} {'most':>6} {'of first':>9} {'CPU s/GB':>9}")
        for arm in arms:
            rates = [rate for rate, _ in found[arm.name]]
            middle = statistics.median(rates)
            used = statistics.median(cost for _, cost in found[arm.name])
            print(
                f"{arm.name:30} {middle:6.2f} {min(rates):6.2f} {max(rates):6.2f} "
                f"{middle / bare:9.2f} {used:9.3f}"
            )
        print(json.dumps({"blocks": name, "group": group, "arms": found}), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("suites", nargs="+", choices=["engines", "depth", "split"])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured")
    parser.add_argument("--file-gib", type=int, default=3)
    parser.add_argument("--mib", type=int, default=384, help="what an arm reads in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--group", type=int, default=8, help="blocks of a layer")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "disk_engines.bin"
    make_file(path, options.file_gib << 30)
    program = options.folder / "bare_uring"
    compiler = shutil.which("cc") or shutil.which("gcc") or sys.exit("no C compiler")
    source = Path(__file__).with_name("bare_uring.c")
    subprocess.run([compiler, "-O2", "-o", program, source], check=True)
    arms = {"engines": ENGINES, "depth": DEPTHS, "split": SPLITS}
    for suite in options.suites:
        measure(
            arms[suite],
            options.sizes,
            path,
            program,
            rounds=options.rounds,
            n_bytes=options.mib << 20,
            group=options.group,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
