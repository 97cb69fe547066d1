"""Which volume holds which block, and the folders that volumes go to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import StorageError

from .errors import RepackError

MAX_WEIGHT: Final = 1000
_WEIGHTED: Final = re.compile(r"(.+):(\d{1,9})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class VolumeFolder:
    """A folder that gets one volume, with `weight` shares of the blocks."""

    path: Path
    weight: int = 1

    @classmethod
    def parse(cls, text: str) -> VolumeFolder:
        """`DIR` or `DIR:WEIGHT`; a folder whose name ends like that is written with a weight.

        >>> VolumeFolder.parse("/ssd2:3")
        VolumeFolder(path=PosixPath('/ssd2'), weight=3)

        Raises:
            RepackError: `bad-volumes` for no name: it would mean the folder one is in.
        """
        if not text:
            raise RepackError("bad-volumes", "repack", "a volume's folder has no name",
                              "a folder for each volume")  # fmt: skip
        match = _WEIGHTED.fullmatch(text)
        return cls(Path(text)) if match is None else cls(Path(match[1]), int(match[2]))


def check_folders(folders: Sequence[VolumeFolder]) -> None:
    """Raise unless the folders are there, differ, and have weights from 1 to 1000.

    Raises:
        RepackError: `bad-volumes`.
        StorageError: `not-a-folder`, or the kernel's error, as `file-not-found`.
    """
    seen: dict[tuple[int, int], Path] = {}
    for folder in folders:
        if not 1 <= folder.weight <= MAX_WEIGHT:
            raise RepackError("bad-volumes", folder.path, f"has weight {folder.weight}",
                              f"1 to {MAX_WEIGHT}")  # fmt: skip
        try:
            status = folder.path.stat()
        except OSError as error:
            raise StorageError.of(error, folder.path, "looking at a volume's folder") from error
        if not folder.path.is_dir():
            raise StorageError("not-a-folder", folder.path, "is no folder",
                               "a folder for each volume")  # fmt: skip
        other = seen.setdefault((status.st_dev, status.st_ino), folder.path)
        if other is not folder.path:
            raise RepackError("bad-volumes", folder.path, f"is the same folder as {other}",
                              "each folder once: a volume a disk",
                              f"for a larger share give it a weight, as {other}:2")  # fmt: skip


def volume_labels(n_volumes: int) -> list[str]:
    """The names of so many volumes."""
    return [str(number) for number in range(1, n_volumes + 1)]


def plan_volumes(
    order: NDArray[np.int64], is_present: NDArray[np.bool_], weights: Sequence[int]
) -> NDArray[np.uint16]:
    """The volume of each block, from 1 on, `(n_layers, n_experts)`; 0 where there is none.

    Blocks are dealt to the volumes in turn, in the order in which they stand (`order`, as
    `plan_order` gives it), on from where the layer before ended. A volume of weight w gets w of
    sum(weights) blocks, spread evenly.
    """
    turn = np.array(_turn(weights), np.uint16)
    rows = np.arange(len(order))[:, None]
    standing = is_present[rows, order]
    dealt = np.zeros(order.shape, np.uint16)
    dealt[standing] = turn[np.arange(np.count_nonzero(standing)) % len(turn)]
    volumes = np.zeros(order.shape, np.uint16)
    volumes[rows, order] = dealt
    return volumes


def _turn(weights: Sequence[int]) -> list[int]:
    """Volume numbers, each as often as its weight, the further apart the better.

    The volume that lags most behind its share is next (smooth weighted round-robin).
    """
    total = sum(weights)
    credit = [0] * len(weights)
    turn = []
    for _ in range(total):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        best = max(range(len(weights)), key=lambda n: (credit[n], -n))
        credit[best] -= total
        turn.append(best + 1)
    return turn
