"""A disk that stops at a chosen step: every write, sync and change of a name counts as one."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

STEPS = ("pwrite", "fsync", "fdatasync", "ftruncate", "link", "replace", "unlink")


class CrashingDisk:
    """From step number `crash_at` on nothing reaches the disk, as when a process is killed.

    `lose_power` then takes back what was written and not synced, each write or not as `seed` says.
    """

    def __init__(self, crash_at: int | None, code: int = errno.EIO) -> None:
        self.crash_at = crash_at
        self.code = code
        self.n_steps = 0
        self.has_crashed = False
        self._lock = threading.Lock()
        self._unsynced: dict[int, list[tuple[int, bytes]]] = {}
        self._real = {name: getattr(os, name) for name in STEPS}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in STEPS:
            patch.setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Any:
        real = self._real[name]

        def step(*args: Any, **options: Any) -> Any:
            with self._lock:
                if self.crash_at is not None and self.n_steps >= self.crash_at:
                    self.has_crashed = True
                if self.has_crashed:
                    raise OSError(self.code, os.strerror(self.code))
                self.n_steps += 1
                inode = os.fstat(args[0]).st_ino if isinstance(args[0], int) else 0
                n_before = len(self._unsynced.get(inode, ()))
                if name == "pwrite":
                    fd = os.open(f"/proc/self/fd/{args[0]}", os.O_RDONLY)
                    before = os.pread(fd, len(args[1]), args[2])
                    os.close(fd)
                    self._unsynced.setdefault(inode, []).append((args[2], before))
            # Real syncs take most of the time, and this disk has no power to lose.
            done = None if name.endswith("sync") else real(*args, **options)
            if name in ("fsync", "fdatasync"):
                with self._lock:
                    del self._unsynced.get(inode, [])[:n_before]
            return done

        return step

    def lose_power(self, folders: Iterable[Path], seed: int) -> None:
        chance = random.Random(seed)
        for folder in folders:
            for path in folder.iterdir():
                for offset, before in reversed(self._unsynced.get(path.lstat().st_ino, [])):
                    if path.is_file() and chance.random() < 0.7:
                        with path.open("r+b") as file:
                            file.seek(offset)
                            file.write(before)
