"""Memory cgroups of our own, of either version: what a process may have, and what it had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Group:
    """A memory cgroup of our own, and the names its version gives to things."""

    folder: Path
    limit_name: str
    peak_name: str
    events_name: str

    def n_killed(self) -> int:
        fields = (self.folder / self.events_name).read_text().split()
        return int(dict(zip(fields[::2], fields[1::2], strict=True)).get("oom_kill", 0))

    def peak(self) -> int:
        return int((self.folder / self.peak_name).read_text())


def own_group() -> tuple[Path, bool] | None:
    """The memory cgroup this process is in, and whether it is of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount = Path("/sys/fs/cgroup/memory")
            inside = mount / path.strip("/")
            return (inside if inside.is_dir() else mount), True
    root = Path("/sys/fs/cgroup")
    return (root, False) if (root / "cgroup.controllers").exists() else None


@contextmanager
def memory_group(limit: int) -> Iterator[Group]:
    """A new group whose processes are killed above `limit` bytes; skips where there can be none."""
    try:
        found = own_group()
    except OSError as error:
        pytest.skip(f"there are no cgroups here: {error}")
    if found is None:
        pytest.skip("neither version of memory cgroups is mounted")
    parent, is_v1 = found
    folder = parent / f"colibri-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made below {parent}: {error}")
    try:
        if is_v1:
            group = Group(
                folder, "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"
            )
        else:
            group = Group(folder, "memory.max", "memory.peak", "memory.events")
        try:
            (folder / group.limit_name).write_text(str(limit))
            for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (folder / name).exists():
                    (folder / name).write_text(str(limit) if is_v1 else "0")
        except OSError as error:
            pytest.skip(f"the memory limit of {folder} cannot be set: {error}")
        yield group
    finally:
        folder.rmdir()
