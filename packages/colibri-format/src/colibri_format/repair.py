"""Restoring the damaged copies of a file's head and tail from the sound ones (spec, section 13)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ColibriError, StorageError, UsageError
from .header import COPIED_REGIONS, find_unsoundness
from .layout import PAGE, round_up
from .reader import Reader
from .volume import VolumePage, encode_page


@dataclass(frozen=True, slots=True)
class Restored:
    """`size` bytes at `offset` of `path` that were, or would be, written over."""

    path: Path
    place: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Step:
    restored: Restored
    data: bytes


def repair(
    path: str | os.PathLike[str],
    *,
    volumes: Sequence[str | os.PathLike[str]] = (),
    is_dry_run: bool = False,
) -> list[Restored]:
    """Writes the sound copy over each damaged one; what was written, in that order.

    Head, tail and the pages of volumes are restored; data regions are never written to, so that
    damaged blocks stay (`Reader.verify` names them). Each copy is written and synced before the
    next is begun, and its source is not touched: an interruption costs nothing, and a second run
    goes on. With `is_dry_run` nothing is written.

    Raises:
        FormatError: the code of what cannot be restored: no sound copy is left, or it is no such
            file.
        UsageError: `unknown-ro-compat` if the file has features that this version must not
            rewrite.
        StorageError: `output-busy` while it is written or repaired elsewhere, or the kernel's
            error.
    """
    with Reader(path, volumes=volumes) as reader:
        if reader.superblock.ro_compat:
            raise UsageError(
                "unknown-ro-compat",
                reader.path,
                f"has ro_compat features {reader.superblock.ro_compat:#x}",
                "this version knows none and must not write to the file",
                "update colibri-format",
            )
        steps = _plan_steps(reader)
    if not is_dry_run:
        for target in dict.fromkeys(step.restored.path for step in steps):
            _write(target, [step for step in steps if step.restored.path == target])
    return [step.restored for step in steps]


def _plan_steps(reader: Reader) -> list[_Step]:
    """What to write, from the copies that `reader` found sound."""
    steps = []

    def put(path: Path, place: str, offset: int, data: bytes) -> None:
        steps.append(_Step(Restored(path, place, offset, len(data)), data))

    pages = {offset: reader.read_at(offset, PAGE) for offset in (0, reader.file_size - PAGE)}
    for (offset, page), end in zip(pages.items(), ("start", "end"), strict=True):
        if find_unsoundness(page, "") is not None:
            sound = next(p for p in pages.values() if find_unsoundness(p, "") is None)
            put(reader.path, f"superblock at the {end}", offset, sound)
    for region in COPIED_REGIONS:
        extent = reader.superblock.region(region)
        if not extent.length:
            continue
        copies = [reader.read_region_copy(region, is_tail=is_tail) for is_tail in (False, True)]
        for n, offset in enumerate((extent.offset, extent.copy_offset)):
            other = copies[1 - n]
            if copies[n] is None and other is not None:
                padded = other + bytes(round_up(extent.length, PAGE) - extent.length)
                end = ("start", "end")[n]
                put(reader.path, f"region {region.name.lower()} at the {end}", offset, padded)
    align_log2 = reader.superblock.align_log2
    for n, (volume, path) in enumerate(zip(reader.volumes, reader.volume_paths, strict=True), 1):
        page = encode_page(VolumePage(n, volume, align_log2))
        for offset, end in ((0, "start"), (volume.file_size - PAGE, "end")):
            if reader.read_at(offset, PAGE, n) != page:
                put(path, f"page at the {end} of volume {volume.label}", offset, page)
    return steps


def _write(path: Path, steps: Sequence[_Step]) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError.of(error, path, "opening to repair") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                "output-busy",
                path,
                "is locked by another process",
                "no other writer",
                errno=error.errno,
            ) from error
        for step in steps:
            _put(lambda view, at: os.pwrite(fd, view, at), step)
            os.fsync(fd)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError.of(error, path, "repairing", "run it again") from error
    finally:
        os.close(fd)


def _put(write: Callable[[memoryview, int], int], step: _Step) -> None:
    view, offset = memoryview(step.data), step.restored.offset
    while view:
        n = write(view, offset)
        view, offset = view[n:], offset + n


def describe_loss(error: ColibriError) -> str:
    """Why a file cannot be repaired, in words, from the error of opening it."""
    if error.code == "region-checksum":
        region = error.where.rpartition(" ")[2]
        lost = {
            "index": "where the experts stand",
            "checksums": "the checksums of the experts",
            "expert_layouts": "which layout each expert has",
            "volume_map": "which volume holds each expert",
            "tables": "layouts, dense tensors and embedded files",
            "metadata": "the description of the source",
            "extension": "data of a feature",
        }
        return f"both copies of the {region} are damaged, so {lost.get(region, region)} is lost"
    if error.code in ("bad-magic", "unsupported-version", "superblock-checksum"):
        return "neither end has a sound superblock of this version, or it is no .colibri file"
    if error.code in ("truncated", "trailing-bytes", "file-too-small"):
        return "the file has not its size: what is missing or too much is no damage to a copy"
    return "both ends say the same, so there is no other copy to restore it from"
