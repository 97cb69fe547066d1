"""What commands left of themselves whose tidying up was killed along with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"colibri-(?:io|decode)-(\d+)(?:-\d+)?(?:\.bin)?")
_MOST_GROUPS: Final = 100_000


def find_leftovers(*folders: Path, root: Path = Path("/")) -> list[Path]:
    """Control groups, copies in memory and made-up files (in `folders`) that are named after a
    process which is no more."""
    places = (*folders, root / "dev/shm")
    found = [path for folder in places for path in _entries(folder) if not path.is_dir()]
    found += _groups(root / "sys/fs/cgroup")
    return sorted({path for path in found if _is_orphan(path, root)})


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _groups(top: Path) -> Iterator[Path]:
    """Groups with a name of ours; none has groups of its own."""
    for number, (folder, names, _) in enumerate(os.walk(top)):
        if number > _MOST_GROUPS:
            return
        for name in [name for name in names if _NAME.fullmatch(name)]:
            names.remove(name)
            yield Path(folder, name)


def _is_orphan(path: Path, root: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    return match is not None and not (root / "proc" / match[1]).exists()
