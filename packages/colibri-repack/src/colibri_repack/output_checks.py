"""What is checked before the first byte of an output is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from colibri_format import StorageError

from .errors import RepackError


def check_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Raise `output-is-input` if writing `output` could touch one of `inputs`.

    Looks at the files themselves, not at their names: links and other spellings count.
    """
    part = output.parent / f"{output.name}.part"
    inputs = tuple(inputs)
    for candidate in (output, part):
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


def check_space(sizes: Iterable[tuple[Path, int]]) -> None:
    """Raise unless the folders have room for files of these sizes, `(folder, bytes)` each.

    Folders of one file system share its space.

    Raises:
        StorageError: `disk-full` naming the folder, or the kernel's error, as `file-not-found`.
    """
    needed: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for folder, size in sizes:
        try:
            device = folder.stat().st_dev
        except OSError as error:
            raise StorageError.of(error, folder, "looking at the output's folder") from error
        needed[device] = needed.get(device, 0) + size
        folders.setdefault(device, folder)
    for device, size in needed.items():
        folder = folders[device]
        try:
            status = os.statvfs(folder)
        except OSError as error:
            raise StorageError.of(error, folder, "looking at the output's folder") from error
        free = status.f_bavail * status.f_frsize
        if free < size:
            raise StorageError(
                "disk-full",
                folder,
                f"{free} bytes are free",
                f"the output takes {size}",
                "free some space or choose another folder",
                errno=errno.ENOSPC,
            )
