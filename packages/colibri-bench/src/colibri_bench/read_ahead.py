"""The read-ahead of the disk a file lies on, set for a while: page faults depend on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .undo import set_back, undone_if_killed


@contextmanager
def read_ahead(file: Path, size_kb: int, root: Path = Path("/")) -> Iterator[str]:
    """Sets the disk's read-ahead to `size_kb` KiB and back again; yields what came of it.

    Virtual machines are found with 8 MiB, which makes page faults of mapped models read 64 times
    what they need. Where it cannot be set (a user other than root, no such disk) it is left.
    """
    place = _knob(file, root)
    if place is None:
        yield "not known (no block device was found)"
        return
    with ExitStack() as stack:
        try:
            before = place.read_text().strip()
            stack.enter_context(undone_if_killed(set_back(place, str(size_kb), before)))
            place.write_text(str(size_kb))
        except OSError as error:
            yield f"left as it is ({error.strerror or error})"
            return
        try:
            yield f"{size_kb} KiB, {before} KiB before and after"
        finally:
            place.write_text(before)


def _knob(file: Path, root: Path) -> Path | None:
    number = file.stat().st_dev
    device = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    for folder in (device, device.resolve().parent):
        knob = folder / "queue/read_ahead_kb"
        if knob.exists():
            return knob
    return None
