"""A slower disk for this process: a block I/O cgroup with a limit on bytes read a second."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from colibri_format import StorageError


@contextmanager
def throttled(file: Path, bytes_per_second: int, root: Path = Path("/")) -> Iterator[None]:
    """Within the context this process reads the disk of `file` no faster.

    Version 1 (`blkio.throttle.read_bps_device`) or 2 (`io.max`); the process enters a group of its
    own and returns to its old one.

    Raises:
        StorageError: `no-cgroup` with what is missing.
    """
    device = _disk_number(file, root)
    parent, is_v1 = _parent(root)
    group = parent / f"colibri-io-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise _unavailable(group, f"cannot be made: {error.strerror}") from error
    try:
        try:
            if is_v1:
                (group / "blkio.throttle.read_bps_device").write_text(
                    f"{device} {bytes_per_second}"
                )
            else:
                (group / "io.max").write_text(f"{device} rbps={bytes_per_second}")
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise _unavailable(group, f"takes no limit on {device}: {error.strerror}") from error
        yield
    finally:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            group.rmdir()


def _disk_number(file: Path, root: Path) -> str:
    """MAJOR:MINOR of the whole disk: limits are not taken for partitions."""
    number = file.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    place = root / f"sys/dev/block/{name}"
    if not place.exists():
        raise _unavailable(file, f"lies on no disk that the system tells of ({name})")
    device = place.resolve()
    disk = device if (device / "queue").exists() else device.parent
    return (disk / "dev").read_text().strip()


def _parent(root: Path) -> tuple[Path, bool]:
    v1 = root / "sys/fs/cgroup/blkio"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "blkio" in controllers.split(",") and v1.is_dir():
            inside = v1 / path.strip("/")
            return (inside if inside.is_dir() else v1), True
    v2 = root / "sys/fs/cgroup"
    controllers_file = v2 / "cgroup.controllers"
    if controllers_file.exists() and "io" in controllers_file.read_text().split():
        return v2, False
    raise _unavailable(v2, "no block I/O controller is mounted")


def _unavailable(where: Path, found: str) -> StorageError:
    return StorageError(
        "no-cgroup",
        where,
        found,
        "a block I/O cgroup (version 1 or 2) in which groups can be made",
        "run as root on a system that mounts one, or measure without --throttle",
    )
