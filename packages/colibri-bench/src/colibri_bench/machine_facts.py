"""What machine a figure comes from."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = (
    "colibri-format", "colibri-repack", "colibri-runtime", "colibri-bench", "numpy", "xllamacpp"
)  # fmt: skip
_FEATURES: Final = ("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni",
                    "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The disk that a file lies on; None where the system does not tell."""

    device: str | None
    model: str | None
    is_rotational: bool | None
    file_system: str | None
    scheduler: str | None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Kernel, processor, memory, versions; sizes in bytes."""

    system: str
    cpu: str
    cpu_features: tuple[str, ...]
    n_cpus: int
    memory_bytes: int | None
    python: str
    packages: dict[str, str]
    disk: DiskFacts | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def describe_machine(file: Path | None = None, root: Path = Path("/")) -> MachineFacts:
    """This machine, and the disk of `file` where one is given."""
    cpu, features = _processor(root)
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu,
        cpu_features=features,
        n_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_bytes=_memory(root),
        python=sys.version.split()[0],
        packages=_versions(),
        disk=None if file is None else describe_disk(file, root),
    )


def describe_disk(file: Path, root: Path = Path("/")) -> DiskFacts:
    """The disk below `file`, as /sys and /proc/self/mountinfo tell of it (proc(5))."""
    number = file.stat().st_dev
    place = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not place.exists():
        return DiskFacts(None, None, None, _file_system(number, root), None)
    device = place.resolve()
    # A partition has no queue of its own: its disk, one folder up, has.
    disk = device if (device / "queue").exists() else device.parent
    rotational = _line(disk / "queue/rotational")
    chosen = re.search(r"\[(\w+[-\w]*)\]", _line(disk / "queue/scheduler") or "")
    return DiskFacts(
        device=device.name,
        model=_line(disk / "device/model"),
        is_rotational=None if rotational is None else rotational == "1",
        file_system=_file_system(number, root),
        scheduler=chosen.group(1) if chosen else None,
    )


def _file_system(number: int, root: Path) -> str | None:
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, after = line.partition(" - ")
        if len(fields.split()) > 2 and fields.split()[2] == wanted and after:
            return after.split()[0]
    return None


def _processor(root: Path) -> tuple[str, tuple[str, ...]]:
    text = _text(root / "proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags.group(1).split()) if flags else set()
    found = name.group(1).strip() if name else platform.processor() or platform.machine()
    return found, tuple(feature for feature in _FEATURES if feature in known)


def _memory(root: Path) -> int | None:
    match = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _line(path: Path) -> str | None:
    return _text(path).strip() or None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
