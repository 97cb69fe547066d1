"""Volume files: their pages, and finding them by content (spec, section 6 and 11.10)."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .checksum import checksum
from .errors import FormatCode, FormatError, StorageError
from .header import CHECKSUM_OFFSET, MAJOR, MINOR
from .layout import PAGE, Extent, Volume

VOLUME_MAGIC: Final = b"\x89CLV\r\n\x1a\n"
VOLUME_SUFFIX: Final = ".colibri-volume"

_HEAD: Final = struct.Struct("<8sHHIQ16sQQII255s")


@dataclass(frozen=True, slots=True)
class VolumePage:
    """The first page of a volume, and its last; `number` counts from 1."""

    number: int
    volume: Volume
    align_log2: int


def encode_page(page: VolumePage) -> bytes:
    """The 4,096 bytes that `parse_page` reads back as `page`."""
    label = page.volume.label.encode()
    data = bytearray(PAGE)
    _HEAD.pack_into(
        data,
        0,
        VOLUME_MAGIC,
        MAJOR,
        MINOR,
        page.number,
        page.volume.file_size,
        page.volume.digest,
        page.volume.data.offset,
        page.volume.data.size,
        page.align_log2,
        len(label),
        label,
    )
    struct.pack_into("<Q", data, CHECKSUM_OFFSET, checksum(data[:CHECKSUM_OFFSET]))
    return bytes(data)


def parse_page(data: bytes) -> VolumePage | None:
    """The page that `data` is, None if it is not sound."""
    if len(data) != PAGE or data[:8] != VOLUME_MAGIC:
        return None
    (_, major, _, number, file_size, digest, offset, length, align_log2, label_length, label) = (
        _HEAD.unpack_from(data, 0)
    )
    stored = struct.unpack_from("<Q", data, CHECKSUM_OFFSET)[0]
    is_sound = (
        major == MAJOR
        and stored == checksum(data[:CHECKSUM_OFFSET])
        and label_length <= 255
        and not any(label[label_length:])
        and not any(data[_HEAD.size : CHECKSUM_OFFSET])
    )
    # Not UTF-8: no record can have it, and the page, though sound, matches none.
    text = label[:label_length].decode(errors="surrogateescape")
    volume = Volume(text, Extent(offset, length), digest)
    if not is_sound or volume.file_size != file_size:
        return None
    return VolumePage(number, volume, align_log2)


@dataclass(frozen=True, slots=True)
class FoundVolume:
    """A volume's open file; whoever has it closes `fd`."""

    path: Path
    fd: int
    file_size: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    file_size: int
    head: VolumePage | None
    tail: VolumePage | None


def _candidates(folders: Sequence[Path]) -> Iterator[_Candidate]:
    for folder in folders:
        try:
            paths = sorted(path for path in folder.iterdir() if path.name.endswith(VOLUME_SUFFIX))
        except OSError as error:
            raise StorageError.of(error, folder, "listing the folder of volumes") from error
        for path in paths:
            candidate = _look_at(path)
            if candidate is not None:
                yield candidate


def _look_at(path: Path) -> _Candidate | None:
    """The pages of a file; None for what is no regular file or cannot be read."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        size = status.st_size
        head, tail = os.pread(fd, PAGE, 0), os.pread(fd, PAGE, max(size - PAGE, 0))
    except OSError:
        return None
    finally:
        os.close(fd)
    return _Candidate(path, size, parse_page(head), parse_page(tail))


def find_volumes(
    volumes: Sequence[Volume], align_log2: int, folders: Sequence[Path], where: str
) -> list[FoundVolume]:
    """Each volume's file, opened, in the order of `volumes`.

    Raises:
        FormatError: `volume-missing`, `volume-mismatch`, `truncated`, `trailing-bytes`.
        StorageError: a folder that cannot be listed.
    """
    candidates = list(_candidates(folders))
    found: list[FoundVolume] = []
    try:
        for number, volume in enumerate(volumes, 1):
            found.append(_find(candidates, number, volume, align_log2, folders, where))
    except BaseException:
        for item in found:
            os.close(item.fd)
        raise
    return found


def _find(
    candidates: Sequence[_Candidate],
    number: int,
    volume: Volume,
    align_log2: int,
    folders: Sequence[Path],
    where: str,
) -> FoundVolume:
    place = f"{where}: volume {number} ({volume.label})"
    matches: list[tuple[_Candidate, VolumePage]] = []
    impostor: _Candidate | None = None
    for candidate in candidates:
        pages = [page for page in (candidate.head, candidate.tail) if page is not None]
        named = [p for p in pages if (p.number, p.volume.label) == (number, volume.label)]
        same = [page for page in named if page.volume.digest == volume.digest]
        if same:
            matches.append((candidate, same[0]))
        elif named:
            impostor = impostor or candidate
    if matches:
        # A copy that was cut short must not hide a whole one.
        whole = [match for match in matches if match[0].file_size == volume.file_size]
        return _take(*(whole or matches)[0], VolumePage(number, volume, align_log2), place)
    if impostor is not None:
        raise FormatError(
            FormatCode.VOLUME_MISMATCH,
            place,
            f"{impostor.path} has its label and number but other content",
            f"the volume with digest {volume.digest.hex()}",
            "it belongs to another file or another version: restore the right one",
        )
    raise FormatError(
        FormatCode.VOLUME_MISSING,
        place,
        f"is in none of {', '.join(str(folder) for folder in folders)}",
        f"a file *{VOLUME_SUFFIX} of {volume.file_size} bytes with digest {volume.digest.hex()}",
        "name the folder that holds it",
    )


def _take(candidate: _Candidate, page: VolumePage, required: VolumePage, place: str) -> FoundVolume:
    if page != required:
        raise FormatError(
            FormatCode.VOLUME_MISMATCH,
            place,
            f"the page of {candidate.path} says {page}",
            f"{required} is recorded",
        )
    if candidate.file_size != required.volume.file_size:
        is_short = candidate.file_size < required.volume.file_size
        raise FormatError(
            FormatCode.TRUNCATED if is_short else FormatCode.TRAILING_BYTES,
            place,
            f"{candidate.path} has {candidate.file_size} bytes",
            f"{required.volume.file_size} are recorded",
        )
    warnings = [
        f"the page at the {end} of volume {required.number} ({candidate.path}) is damaged"
        for end, seen in (("start", candidate.head), ("end", candidate.tail))
        if seen != page
    ]
    try:
        fd = os.open(candidate.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError.of(error, candidate.path, "opening a volume") from error
    return FoundVolume(candidate.path, fd, candidate.file_size, tuple(warnings))
