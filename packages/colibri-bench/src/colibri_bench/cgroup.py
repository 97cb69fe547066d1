"""Control groups: a process and all its page cache under a memory limit, or a slower disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri_format import StorageError

from .undo import remove_group, undone_if_killed

_EMPTY_TRIES = 50
_EMPTY_PAUSE_S = 0.02


class MemoryGroup:
    """A memory cgroup of our own, version 1 or 2, made on entering and removed on leaving.

    `limit_bytes` bounds what its processes hold, page cache of the files they read included;
    None bounds nothing and only counts. Needs the right to make groups, as root has. Should this
    process be killed within, what runs in the group is killed as well and the group removed.

    Raises (on entering):
        StorageError: `no-cgroup` with what is missing.
    """

    def __init__(self, name: str, limit_bytes: int | None, root: Path = Path("/")) -> None:
        self.limit_bytes = limit_bytes
        self._root = root
        self._name = f"colibri-{name}-{os.getpid()}"
        self._folder: Path | None = None
        self._is_v1 = True
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        parent, self._is_v1 = self._parent()
        folder = parent / self._name
        try:
            folder.mkdir()
            self._folder = folder
            self._stack.enter_context(undone_if_killed(remove_group(folder)))
            if self.limit_bytes is not None:
                self._limit(folder, self.limit_bytes)
        except BaseException as error:
            # Interrupted, too: nobody leaves what was not entered.
            self._remove()
            self._stack.close()
            if isinstance(error, StorageError) or not isinstance(error, OSError):
                raise
            raise _unavailable(folder, f"cannot be made or limited: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()
        self._stack.close()

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that enters the group and then becomes `argv`.

        Entering first is what counts: memory stays charged to the group that touched it.
        """
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self._folder), *argv]

    @property
    def name(self) -> str:
        """The last part of the group's path, as its processes see it in /proc/self/cgroup."""
        return self._name

    @property
    def applied_bytes(self) -> int | None:
        """The limit that the kernel says is in force; None where it does not tell or has none."""
        return self._number("memory.limit_in_bytes" if self._is_v1 else "memory.max")

    @property
    def peak_bytes(self) -> int | None:
        """The most that was ever charged; None where the kernel does not tell."""
        name = "memory.max_usage_in_bytes" if self._is_v1 else "memory.peak"
        return self._number(name)

    @property
    def n_killed(self) -> int:
        """Processes that were killed for want of memory."""
        text = self._read("memory.oom_control" if self._is_v1 else "memory.events")
        fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return int(fields.get("oom_kill", 0))

    def _limit(self, folder: Path, limit_bytes: int) -> None:
        text = str(limit_bytes)
        if self._is_v1:
            (folder / "memory.limit_in_bytes").write_text(text)
            swap, value = folder / "memory.memsw.limit_in_bytes", text
        else:
            (folder / "memory.max").write_text(text)
            swap, value = folder / "memory.swap.max", "0"
        # Without swap accounting there is no such file, and without swap nothing to limit.
        if swap.exists():
            swap.write_text(value)

    def _parent(self) -> tuple[Path, bool]:
        """The group this process is in, and whether it is of version 1."""
        try:
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError as error:
            raise _unavailable(self._root / "proc/self/cgroup", str(error.strerror)) from error
        unified = None
        for line in lines:
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if "memory" in controllers.split(","):
                mount = self._root / "sys/fs/cgroup/memory"
                inside = mount / path.strip("/")
                return (inside if inside.is_dir() else mount), True
            if not controllers:
                unified = path
        mount = self._root / "sys/fs/cgroup"
        if unified is not None and (mount / "cgroup.controllers").exists():
            inside = mount / unified.strip("/")
            # A group with processes in it may not share out memory to groups below it: beside.
            parent = inside.parent if inside != mount and inside.is_dir() else mount
            return parent, False
        raise _unavailable(mount, "no memory controller is mounted")

    def _read(self, name: str) -> str:
        if self._folder is None:
            return ""
        try:
            return (self._folder / name).read_text()
        except OSError:
            return ""

    def _number(self, name: str) -> int | None:
        text = self._read(name).strip()
        return int(text) if text.isdigit() else None

    def _remove(self) -> None:
        if self._folder is None:
            return
        # A killed process leaves its group a moment after it was waited for.
        for _ in range(_EMPTY_TRIES):
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            if not self._folder.exists():
                break
            time.sleep(_EMPTY_PAUSE_S)
        self._folder = None


def _unavailable(where: Path, found: str) -> StorageError:
    return StorageError(
        "no-cgroup",
        where,
        found,
        "a memory cgroup (version 1 or 2) in which groups can be made",
        "run as root on a system that mounts one, or measure without limits",
    )
