"""What the machine tells of memory: what is available, what this process has and had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Kernels write "no limit" as a number near 2^63 (cgroup v1) or as the word `max` (v2).
_NO_LIMIT: Final = 2**60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated: MemAvailable, or less where a cgroup leaves less.

    A cgroup's page cache can be given up, so inactive file pages do not count as used (proc(5);
    the kernel's admin-guide/cgroup-v1/memory and cgroup-v2). None where the system does not tell.
    """
    found = [_kilobytes(root / "proc/meminfo", "MemAvailable"), *_cgroup_rooms(root)]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def rss_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process holds now (VmRSS); None where the system does not tell."""
    return _kilobytes(root / "proc/self/status", "VmRSS")


def peak_rss_bytes(root: Path = Path("/")) -> int | None:
    """The most that this process ever held (VmHWM); None where the system does not tell."""
    return _kilobytes(root / "proc/self/status", "VmHWM")


def reset_peak_rss(root: Path = Path("/")) -> bool:
    """Whether the peak could be set back to what is held now (proc(5), clear_refs)."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kilobytes(path: Path, name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", _text(path), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What each memory cgroup above this process has left."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            mount, names = (
                "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            )
        elif not controllers:
            mount = "sys/fs/cgroup"
            names = ("memory.max", "memory.current")
        else:
            continue
        folder = root / mount
        inside = folder / path.strip("/")
        # Within a container the named group may not be visible: the mount's root then is it.
        chain = [inside, *inside.parents] if inside.is_dir() else [folder]
        for group in chain:
            limit = _number(group / names[0])
            if limit is not None and limit < _NO_LIMIT:
                used = (_number(group / names[1]) or 0) - _idle_cache(group)
                yield max(0, limit - max(0, used))
            if group == folder:
                break


def _idle_cache(group: Path) -> int:
    stat = _text(group / "memory.stat")
    match = re.search(r"^total_inactive_file (\d+)", stat, re.MULTILINE) or re.search(
        r"^inactive_file (\d+)", stat, re.MULTILINE
    )
    return int(match.group(1)) if match else 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
