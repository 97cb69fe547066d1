"""Changes to the machine that are undone even if this process is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from colibri_format import StorageError

_WATCHER: Final = Path(__file__).with_name("undo_watcher.py")


@dataclass(frozen=True, slots=True)
class Undo:
    """How something is undone: an action of `undo_watcher` and what it is given."""

    action: str
    arguments: tuple[str, ...]


def remove_files(paths: Sequence[Path]) -> Undo:
    """Removes files; those that are gone already are none the worse for it."""
    return Undo("remove-files", tuple(str(path.absolute()) for path in paths))


def set_back(knob: Path, ours: str, before: str) -> Undo:
    """Writes `before` to a file of the kernel's, unless it has another value than `ours` by now."""
    return Undo("set-back", (str(knob.absolute()), ours, before))


def remove_group(folder: Path) -> Undo:
    """Kills what still runs in a control group and removes it."""
    return Undo("remove-group", (str(folder.absolute()),))


def watcher_command(undo: Undo) -> list[str]:
    """What is run to watch: without site packages, so that it is small and starts at once."""
    return [sys.executable, "-I", "-S", str(_WATCHER), undo.action, *undo.arguments]


@contextmanager
def undone_if_killed(undo: Undo) -> Iterator[None]:
    """Within, a small process of a session of its own waits for this one to end, and then undoes.

    Nothing in a process can act on its own SIGKILL, or on the kernel's when memory runs out. The
    caller still undoes what it did before it leaves this; a second time does no harm. The watcher
    stays in the control groups that this process is in on entering.

    Raises:
        StorageError: what the kernel refused when the watcher was to be started.
    """
    try:
        watcher = subprocess.Popen(
            watcher_command(undo),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise StorageError.of(error, sys.executable, "starting a process that tidies up") from error
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watcher.communicate(b"tidy")
