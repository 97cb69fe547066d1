"""A file of random blocks for benchmarks, and what the store reads of it."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from colibri_format import DTYPES, Geometry, Layout, Role
from colibri_format.blockindex import BlockIndex
from colibri_format.checksum import checksum
from colibri_format.layout import INDEX_DTYPE, Segment, block_seed

ALIGNMENT = 4096
HERE = Path(__file__).parent


class Blocks:
    """`n_layers` layers of `n_experts` blocks of `block_bytes` bytes each, in one file.

    The bytes of one random block, shifted from block to block so that no two are alike; a disk
    that compresses would still find them random.
    """

    def __init__(self, path: Path, n_layers: int, n_experts: int, block_bytes: int) -> None:
        shape = (n_layers, n_experts)
        stride = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        size = block_bytes // 3 // 64 * 64
        roles = (Role.GATE, Role.UP, Role.DOWN)
        sizes = (size, size, block_bytes - 2 * size)
        segments = tuple(
            Segment(role, DTYPES["i8"], (1, n), 0, i * size, n)
            for i, (role, n) in enumerate(zip(roles, sizes, strict=True))
        )
        entries = np.zeros(shape, INDEX_DTYPE)
        entries["offset"] = ALIGNMENT + stride * np.arange(n_layers * n_experts).reshape(shape)
        entries["size"] = block_bytes
        self.path = path
        self.file_size = ALIGNMENT + stride * n_layers * n_experts
        self.geometry = Geometry(n_layers, n_experts, ALIGNMENT)
        sums = np.zeros(shape, np.uint64)
        zeros = np.zeros(shape, np.uint16)
        self.block_index = BlockIndex(entries, sums, zeros, zeros)
        self.layouts = (Layout(segments, block_bytes),)
        self.volumes = ()
        self.volume_paths = ()
        self._write(stride, block_bytes)

    def _write(self, stride: int, block_bytes: int) -> None:
        seed = np.random.default_rng(0).integers(0, 256, 2 * stride, np.uint8)
        is_there = self.path.exists() and self.path.stat().st_size == self.file_size
        with open(self.path, "r+b" if is_there else "wb") as file:
            for (layer, expert), entry in np.ndenumerate(self.block_index.entries):
                shift = 8 * ((layer * 1009 + expert) % (stride // 8))
                data = seed[shift : shift + stride].copy()
                data[block_bytes:] = 0
                payload = data[:block_bytes]
                seeded = block_seed(layer, expert)
                self.block_index.checksums[layer, expert] = checksum(payload, seeded)
                if not is_there:
                    file.seek(int(entry["offset"]))
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Drops what the page cache of this machine holds of a file; a host's cache stays."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def disk_limit(folder: Path, bytes_per_s: int | None):
    """This process and its children read no faster from the disk that holds `folder`.

    By a blkio group of cgroup version 1 (Documentation/admin-guide/cgroup-v1/blkio-controller.rst);
    needs root. None limits nothing. So every arm has the same disk, and one that is slower than the
    host's memory, which on a virtual disk takes the very processor that computes.
    """
    if bytes_per_s is None:
        yield
        return
    root = Path("/sys/fs/cgroup/blkio")
    group = root / f"colibri-benchmark-{os.getpid()}"
    device = folder.stat().st_dev
    group.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def compile_bare(folder: Path, *, is_library: bool = False) -> Path:
    """The program or library of bare_uring.c, compiled into `folder`."""
    out = folder / ("libbare_uring.so" if is_library else "bare_uring")
    options = ["-shared", "-fPIC"] if is_library else []
    command = ["cc", "-O2", "-std=gnu11", *options, "-o", str(out), str(HERE / "bare_uring.c")]
    subprocess.run(command, check=True)
    return out


def bare_read(
    program: Path,
    path: Path,
    offsets: list[int],
    block_bytes: int,
    depth: int,
    *,
    n_slots: int,
    group: int = 64,
):
    """Seconds, CPU seconds and bytes of a loop that only reads, `group` blocks at a time."""
    numbers = (block_bytes, depth, group, n_slots)
    command = [str(program), str(path), *map(str, numbers)]
    text = np.array(offsets, np.uint64).tobytes()
    done = subprocess.run(command, input=text, check=True, capture_output=True)
    seconds, cpu, n_bytes = done.stdout.split()
    return float(seconds), float(cpu), int(n_bytes)
