"""A slower disk for this process: a block I/O cgroup with a limit on bytes read a second."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colibri_format import StorageError

from .undo import remove_group, undone_if_killed


@dataclass(frozen=True, slots=True)
class Throttle:
    """A limit in force: `group` is the control group, `device` MAJOR:MINOR of the disk."""

    group: Path
    device: str
    is_v1: bool

    @property
    def how(self) -> str:
        """`blkio.throttle.read_bps_device of 8:0`."""
        return f"{'blkio.throttle.read_bps_device' if self.is_v1 else 'io.max'} of {self.device}"

    def charged_bytes(self) -> int | None:
        """Bytes read from the disk that the kernel charged to the group; None where it does not
        tell (`blkio.throttle.io_service_bytes` of version 1, `io.stat` of version 2).

        What threads or the kernel's workers read for this process and is not in it went past the
        limit.
        """
        name = "blkio.throttle.io_service_bytes" if self.is_v1 else "io.stat"
        try:
            lines = (self.group / name).read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            words = line.split()
            # Devices that have read nothing may stand before another one in its line of io.stat.
            devices = [word for word in words if ":" in word and "=" not in word]
            if not devices or devices[-1] != self.device:
                continue
            fields = words[words.index(self.device) + 1 :]
            if self.is_v1 and fields[:1] == ["Read"]:
                return int(fields[1])
            for field in fields:
                key, _, value = field.partition("=")
                if key == "rbytes":
                    return int(value)
        return 0


@contextmanager
def throttled(file: Path, bytes_per_second: int, root: Path = Path("/")) -> Iterator[Throttle]:
    """Within the context this process reads the disk of `file` no faster; yields by what means.

    Version 1 (`blkio.throttle.read_bps_device`) or 2 (`io.max`); the process enters a group of its
    own and returns to its old one. Should it be killed within, the group is removed all the same.

    Raises:
        StorageError: `no-cgroup` with what is missing.
    """
    device = _disk_number(file, root)
    parent, home, is_v1 = _parent(root)
    group = parent / f"colibri-io-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise _unavailable(group, f"cannot be made: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        try:
            # Before this process enters: the watcher is to stay outside.
            stack.enter_context(undone_if_killed(remove_group(group)))
            try:
                if is_v1:
                    (group / "blkio.throttle.read_bps_device").write_text(
                        f"{device} {bytes_per_second}"
                    )
                else:
                    (group / "io.max").write_text(f"{device} rbps={bytes_per_second}")
                (group / "cgroup.procs").write_text(str(os.getpid()))
            except OSError as error:
                found = f"takes no limit on {device}: {error.strerror}"
                raise _unavailable(group, found) from error
            yield Throttle(group, device, is_v1)
        finally:
            with contextlib.suppress(OSError):
                (home / "cgroup.procs").write_text(str(os.getpid()))
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


def _parent(root: Path) -> tuple[Path, Path, bool]:
    """Where a group can be made, the group this process is in, and whether they are version 1."""
    v1, v2 = root / "sys/fs/cgroup/blkio", root / "sys/fs/cgroup"
    unified = ""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        raise _unavailable(root / "proc/self/cgroup", str(error.strerror)) from error
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "blkio" in controllers.split(",") and v1.is_dir():
            inside = v1 / path.strip("/")
            home = inside if inside.is_dir() else v1
            return home, home, True
        if not controllers:
            unified = path.strip("/")
    try:
        offered = (v2 / "cgroup.controllers").read_text().split()
    except OSError:
        offered = []
    if "io" in offered:
        # A group with processes in it may not share out I/O to groups below it: at the top.
        return v2, (v2 / unified if (v2 / unified).is_dir() else v2), False
    raise _unavailable(v2, "no block I/O controller is mounted")


def _unavailable(where: Path, found: str) -> StorageError:
    return StorageError(
        "no-cgroup",
        where,
        found,
        "a block I/O cgroup (version 1 or 2) in which groups can be made",
        "run as root where one is mounted (mount -t cgroup -o blkio cgroup /sys/fs/cgroup/blkio, "
        "or version 2 with +io in cgroup.subtree_control), or measure without --throttle",
    )
