"""What is checked before the first byte of an output is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from colibri_format import StorageError
from colibri_format.journal import journal_path
from colibri_format.output import part_path

from .errors import RepackError


def check_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Raise `output-is-input` if writing `output` could touch one of `inputs`.

    Looks at the files themselves, not at their names: links and other spellings count.
    """
    inputs = tuple(inputs)
    for candidate in (output, part_path(output), journal_path(output)):
        for path in inputs:
            try:
                is_same = candidate.samefile(path)
            except OSError:
                is_same = False
            if is_same:
                raise RepackError(
                    "output-is-input",
                    output,
                    f"{candidate.name} is the input {path}",
                    "an output of its own",
                    "choose another output name",
                )


def check_space(files: Iterable[tuple[Path, int]]) -> None:
    """Raise unless there is room for files of these names and sizes in bytes.

    Folders of one file system share its space; what an unfinished output takes already is room.

    Raises:
        StorageError: `disk-full` naming the folder, or the kernel's error, as `file-not-found`.
    """
    needed: dict[int, int] = {}
    there: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for path, size in files:
        folder = path.parent
        device = _device(folder)
        needed[device] = needed.get(device, 0) + size
        there[device] = there.get(device, 0) + _allocated(part_path(path))
        folders.setdefault(device, folder)
    for device, size in needed.items():
        folder = folders[device]
        try:
            status = os.statvfs(folder)
        except OSError as error:
            raise StorageError.of(error, folder, "looking at the output's folder") from error
        free = status.f_bavail * status.f_frsize
        if free + there[device] < size:
            has = f" and {there[device]} taken by the unfinished output" if there[device] else ""
            raise StorageError(
                "disk-full",
                folder,
                f"{free} bytes are free{has}",
                f"the output takes {size} there",
                "free some space or choose another folder",
                errno=errno.ENOSPC,
            )


def _device(folder: Path) -> int:
    try:
        return folder.stat().st_dev
    except OSError as error:
        raise StorageError.of(error, folder, "looking at the output's folder") from error


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
