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
    what they need. Where it cannot be set (a user other than root, no such disk) it is left, and
    where it has that value already, as during another run: whoever set it sets it back.
    """
    place = _knob(file, root)
    if place is None:
        yield "not known (no block device was found)"
        return
    ours = str(size_kb)
    with ExitStack() as stack:
        try:
            before = place.read_text().strip()
            if before != ours:
                stack.enter_context(undone_if_killed(set_back(place, ours, before)))
                stack.callback(_set_back, place, ours, before)
                place.write_text(ours)
        except OSError as error:
            found = f"left as it is ({error.strerror or error})"
        else:
            found = f"{size_kb} KiB, {before} KiB before and after"
        yield found


def _set_back(knob: Path, ours: str, before: str) -> None:
    """As `undo.set_back`: nothing where someone else has set another value by now."""
    if knob.read_text().strip() == ours:
        knob.write_text(before)


def _knob(file: Path, root: Path) -> Path | None:
    number = file.stat().st_dev
    device = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    for folder in (device, device.resolve().parent):
        knob = folder / "queue/read_ahead_kb"
        if knob.exists():
            return knob
    return None
