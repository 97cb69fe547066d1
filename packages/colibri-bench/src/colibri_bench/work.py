"""What the kernel did for this process: page faults that read, bytes read, processor time."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Work:
    """Since the process began: major faults, bytes fetched from the disk, seconds computed."""

    n_major: int
    read_bytes: int
    cpu_s: float


def count_work(root: Path = Path("/")) -> Work:
    """The counts now (getrusage(2); read_bytes of proc_pid_io(5), 0 where it cannot be read)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    read = 0
    try:
        for line in (root / "proc/self/io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "read_bytes":
                read = int(value)
    except OSError:
        read = 0
    return Work(usage.ru_majflt, read, usage.ru_utime + usage.ru_stime)


def memory_group(root: Path = Path("/")) -> str | None:
    """The memory cgroup that this process is in, of version 1 or 2; None where none is told."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines if line.count(":") > 1}
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            return path
    return groups.get("")


def mapped_files(root: Path = Path("/")) -> dict[str, int]:
    """Inode by path of the files that this process has mapped, libraries left out
    (proc_pid_maps(5))."""
    inodes: dict[str, int] = {}
    try:
        lines = (root / "proc/self/maps").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and ".so" not in fields[5]:
            inodes[fields[5]] = int(fields[4])
    return inodes
