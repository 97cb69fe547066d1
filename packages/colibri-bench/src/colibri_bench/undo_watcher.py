"""A process that undoes what another changed, should that one be killed: see `undo.py`.

Run by its path as `python -I -S undo_watcher.py ACTION ARGUMENT...` with a pipe as standard input.
A byte from it means that all is tidy; its end without one, that whoever held the other end is gone.
Only the standard library is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_GROUP_S = 60.0
_PAUSE_S = 0.05


def main(argv: Sequence[str]) -> int:
    """0 when all was tidy or has been undone, 1 when something remains."""
    action, *arguments = argv
    if os.read(0, 1):
        return 0
    try:
        _ACTIONS[action](arguments)
    except OSError:
        return 1
    return 0


def _remove_files(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()


def _set_back(arguments: Sequence[str]) -> None:
    """Writes `before` to a kernel's file unless another value than ours stands there by now."""
    path, ours, before = arguments
    with open(path, encoding="ascii") as file:
        if file.read().strip() != ours:
            return
    with open(path, "w", encoding="ascii") as file:
        file.write(before)


def _remove_group(arguments: Sequence[str]) -> None:
    """Kills what still runs in a control group and removes it; gives up after a minute."""
    (path,) = arguments
    for _ in range(int(_GROUP_S / _PAUSE_S)):
        with contextlib.suppress(OSError), open(f"{path}/cgroup.procs", encoding="ascii") as file:
            for line in file:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path(path).rmdir()
        if not Path(path).exists():
            return
        # What was killed leaves its group a moment later.
        time.sleep(_PAUSE_S)
    raise OSError(f"{path} stays")


_ACTIONS: dict[str, Callable[[Sequence[str]], None]] = {
    "remove-files": _remove_files,
    "set-back": _set_back,
    "remove-group": _remove_group,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
