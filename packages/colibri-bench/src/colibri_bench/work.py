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
