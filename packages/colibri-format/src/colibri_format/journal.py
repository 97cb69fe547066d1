"""The journal beside an unfinished file: what of it is on the disk, and what it is made from.

Layout, little-endian. Page-aligned header: magic, u32 version, u32 length of the facts, u64
XXH3-64 of them, the facts as canonical JSON, zero bytes up to a page. Then records of 32 bytes:
u32 kind, u32 a, u32 b, u32 batch, u64 checksum of the item, u64 seal. The seal is the XXH3-64 of
the 24 bytes before it, seeded with the header's digest and the record's number, so that neither a
torn record nor one of another journal passes. Records end where the first seal fails; the room of
all of them is on the disk from the start, so that a full disk cannot keep one from being written.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from .canonical import encode_canonical, parse_canonical
from .checksum import checksum
from .errors import FormatError, StorageError, UsageError
from .layout import PAGE, round_up
from .output import part_path, sync_folder

MAGIC: Final = b"\x89CLBJRN\n"
VERSION: Final = 1
VERSION_FACT: Final = "journal"
"""The only fact of a journal of another version, whose others cannot be read."""
MAX_FACTS: Final = 2**24
_HEAD: Final = struct.Struct("<8sIIQ")
_RECORD: Final = struct.Struct("<IIIIQQ")
_SEALED: Final = 24
_CHUNK: Final = 2**15 * _RECORD.size
_MASK: Final = 2**64 - 1


class ItemKind(IntEnum):
    """What a record is about; `PUBLISH` says that all files are whole and get their names now."""

    BLOCK = 1
    TENSOR = 2
    FILE = 3
    PUBLISH = 4


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """An item that is on the disk: a block `(a, b)`, or number `a` of the tensors or files."""

    kind: ItemKind
    a: int
    b: int
    checksum: int
    batch: int
    """Items with the same number became durable together."""


@dataclass(frozen=True, slots=True)
class FoundJournal:
    """A journal as an earlier writer left it; `facts` is None where its header is damaged."""

    facts: Mapping[str, str] | None
    records: tuple[JournalRecord, ...] = ()

    @property
    def is_publishing(self) -> bool:
        """Whether the files were whole, and may have their names already."""
        return any(record.kind is ItemKind.PUBLISH for record in self.records)


def journal_path(path: Path) -> Path:
    """The journal of the unfinished file of `path`."""
    return path.parent / f"{part_path(path).name}.journal"


class Journal:
    """The journal that this process writes; only while it holds the unfinished file's lock."""

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, str],
        records: Sequence[JournalRecord],
        n_records: int,
    ) -> None:
        """A new journal at `path` in the place of any other, with room for `n_records`.

        Raises:
            StorageError: `disk-full`, or the kernel's refusal.
            UsageError: `bad-metadata` for facts that no canonical JSON holds.
        """
        self.path = path
        text = encode_canonical(facts)
        self._digest = checksum(text)
        self._start = _records_start(len(text))
        self.n_records = 0
        """Records so far."""
        self.n_items = 0
        """Items among them."""
        head = _HEAD.pack(MAGIC, VERSION, len(text), self._digest) + text
        fresh = path.with_name(f"{path.name}.new")
        try:
            # A name that leads elsewhere is removed, never written through.
            fresh.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(fresh, flags, 0o666)
        except OSError as error:
            raise StorageError.of(error, fresh, "creating") from error
        try:
            _write(self._fd, bytes(self._start + _RECORD.size * n_records), 0)
            _write(self._fd, head, 0)
            self.append(records)
            os.fsync(self._fd)
            fresh.replace(path)
            sync_folder(path.parent)
        except OSError as error:
            os.close(self._fd)
            self._fd = -1
            if isinstance(error, StorageError):
                raise
            raise StorageError.of(error, path, "writing") from error

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Adds `records`, whose items are on the disk; returns when they are there, too.

        Raises:
            StorageError: the kernel refused.
        """
        data = bytearray()
        for number, record in enumerate(records, self.n_records):
            data += _encode(record, self._digest, number)
        try:
            _write(self._fd, bytes(data), self._start + _RECORD.size * self.n_records)
            os.fdatasync(self._fd)
        except OSError as error:
            raise StorageError.of(error, self.path, "writing") from error
        self.n_records += len(records)
        self.n_items += sum(record.kind is not ItemKind.PUBLISH for record in records)

    def close(self) -> None:
        """Leaves the journal as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Removes the journal: its file is finished, or given up."""
        self.close()
        try:
            self.path.unlink(missing_ok=True)
            sync_folder(self.path.parent)
        except OSError as error:
            raise StorageError.of(error, self.path, "removing") from error


def read_journal(path: Path) -> FoundJournal | None:
    """The journal at `path`; None where there is none, or nothing in it.

    Raises:
        StorageError: `not-a-journal` when a file of another kind has its name, or the kernel's
            refusal.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _foreign(path, "is a link") from error
        raise StorageError.of(error, path, "opening") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _foreign(path, "is no regular file")
        return _parse(fd, path, found.st_size)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError.of(error, path, "reading") from error
    finally:
        os.close(fd)


def _parse(fd: int, path: Path, size: int) -> FoundJournal | None:
    head = os.pread(fd, _HEAD.size, 0)
    if not any(head):
        return None
    if not head.startswith(MAGIC):
        raise _foreign(path, f"starts with {head[:8].hex(' ')}")
    damaged = FoundJournal(None)
    if len(head) < _HEAD.size:
        return damaged
    _, version, length, digest = _HEAD.unpack(head)
    if version != VERSION:
        return FoundJournal({VERSION_FACT: f"version {version}"})
    if length > MAX_FACTS or _records_start(length) > size:
        return damaged
    text = os.pread(fd, length, _HEAD.size)
    if checksum(text) != digest:
        return damaged
    facts = _parse_facts(text, path)
    if facts is None:
        return damaged
    return FoundJournal(facts, tuple(_read_records(fd, _records_start(length), digest)))


def _read_records(fd: int, offset: int, digest: int) -> Iterator[JournalRecord]:
    number = 0
    while data := os.pread(fd, _CHUNK, offset):
        for start in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
            record = _decode(data[start : start + _RECORD.size], digest, number)
            if record is None:
                return
            yield record
            number += 1
        offset += len(data)


def _parse_facts(text: bytes, path: Path) -> dict[str, str] | None:
    try:
        facts = parse_canonical(text, str(path))
    except (FormatError, UsageError):
        return None
    return facts if all(isinstance(value, str) for value in facts.values()) else None


def _records_start(length: int) -> int:
    return round_up(_HEAD.size + length, PAGE)


def _seal(data: bytes, digest: int, number: int) -> int:
    return checksum(data, (digest + number) & _MASK)


def _encode(record: JournalRecord, digest: int, number: int) -> bytes:
    data = _RECORD.pack(record.kind, record.a, record.b, record.batch, record.checksum, 0)
    return data[:_SEALED] + _seal(data[:_SEALED], digest, number).to_bytes(8, "little")


def _decode(data: bytes, digest: int, number: int) -> JournalRecord | None:
    kind, a, b, batch, value, seal = _RECORD.unpack(data)
    if seal != _seal(data[:_SEALED], digest, number) or kind not in tuple(ItemKind):
        return None
    return JournalRecord(ItemKind(kind), a, b, value, batch)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view = view[n:]
        offset += n


def _foreign(path: Path, found: str) -> StorageError:
    return StorageError(
        "not-a-journal",
        path,
        f"{found}: it is no journal of an unfinished file",
        "its name free, or a journal",
        "move it away",
    )
