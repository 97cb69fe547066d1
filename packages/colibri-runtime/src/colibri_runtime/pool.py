"""Aligned memory for blocks: one anonymous mapping, cut into slots."""

from __future__ import annotations

import mmap
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import StorageError, UsageError

HUGE_PAGE: Final = 2 * 2**20
"""Bytes of a huge page on x86-64 and on arm64 with 4 KiB pages; large arenas start a multiple."""

LEAST_HUGE_ARENA: Final = 8 * HUGE_PAGE
"""Arenas below stand in ordinary pages: aligning them could cost over an eighth of their size."""

_RANGE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What the kernel gave: `huge_bytes` of the arena's `arena_bytes` stand in huge pages.

    `huge_bytes` is None where /proc/self/smaps does not tell; `notes` says what was refused.
    """

    n_slots: int
    slot_bytes: int
    arena_bytes: int
    huge_bytes: int | None
    notes: tuple[str, ...] = ()


def can_give_back() -> bool:
    """Whether memory of a mapping can be given back to the system: not where this is no Linux
    (madvise(2): MADV_DONTNEED frees at once there alone), nor while a process locks its memory."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        page[0] = 1
        try:
            page.madvise(mmap.MADV_DONTNEED)
        except OSError:
            return False
        return page[0] == 0


def pool_bytes(n_slots: int, slot_bytes: int) -> int:
    """Bytes that a pool of equal slots maps, what a large arena may lose to alignment included."""
    return mapped_bytes(n_slots * slot_bytes)


def mapped_bytes(arena_bytes: int) -> int:
    """Bytes mapped for an arena: its own, and what a large one may lose to its alignment."""
    return arena_bytes + (HUGE_PAGE if arena_bytes >= LEAST_HUGE_ARENA else 0)


class Pool:
    """Slots in one arena, touched, so that they can be had for certain.

    `n_slots` slots of `slot_bytes` bytes each come first, then those of each `(n_slots,
    slot_bytes)` in `further`; they are numbered through. The arena never grows; one with
    `LEAST_HUGE_ARENA` bytes or more to touch starts at a multiple of 2 MiB and asks for huge
    pages. Slot sizes are multiples of the page size and slots stand without gaps: so they suit
    O_DIRECT.
    The pool owns the memory; arrays over it keep it alive after `close`.

    The last `n_lent` slots are not touched: they take memory as they are filled, until
    `give_back`.

    Attributes:
        arena: what is touched, `(n_bytes,) uint8`, to register with a kernel interface: what is
            lent must not be, since the kernel would keep what it was told of.
        addresses: of each slot's first byte.

    Raises:
        UsageError: `bad-slots` unless every size is a multiple of 4096.
        StorageError: `out-of-memory` when the kernel gives no such mapping.
    """

    def __init__(
        self, n_slots: int, slot_bytes: int, *further: tuple[int, int], n_lent: int = 0
    ) -> None:
        classes = ((n_slots, slot_bytes), *further)
        for number, size in classes:
            if number < 0 or size < 0 or size % 4096 or (number and not size):
                raise UsageError(
                    "bad-slots",
                    "pool",
                    f"{number} slots of {size} bytes",
                    "slots are a positive multiple of 4096 bytes",
                )
        self.n_slots = sum(number for number, _ in classes)
        self.n_lent = n_lent
        self.arena_bytes = sum(number * size for number, size in classes)
        self._map: mmap.mmap | None = None
        self._map_start = 0
        self._notes: list[str] = []
        self.sizes: tuple[int, ...] = tuple(s for number, s in classes for _ in range(number))
        self._kept_bytes = kept = sum(self.sizes[: self.n_slots - n_lent])
        whole = self._map_arena() if self.arena_bytes else np.empty(0, np.uint8)
        self.arena = whole[:kept]
        address = int(whole.__array_interface__["data"][0])
        read_only = whole.view()
        read_only.flags.writeable = False
        self.addresses: list[int] = []
        self._slots: list[NDArray[np.uint8]] = []
        self._read_only: list[NDArray[np.uint8]] = []
        start = 0
        for size in self.sizes:
            self.addresses.append(address + start)
            self._slots.append(whole[start : start + size])
            self._read_only.append(read_only[start : start + size])
            start += size
        self._huge = huge_bytes(address, kept) if self.sizes else 0

    def _map_arena(self) -> NDArray[np.uint8]:
        size, kept = self.arena_bytes, self._kept_bytes
        try:
            # Python's default is MAP_SHARED, which the kernel backs by shmem: no huge pages there.
            self._map = mmap.mmap(
                -1, self.mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise StorageError(
                "out-of-memory",
                "pool",
                f"the system maps no {self.mapped_bytes} bytes: {error.strerror}",
                "memory for every slot",
                "give a smaller --memory",
                errno=error.errno,
            ) from error
        whole = np.frombuffer(self._map, np.uint8)
        start = 0
        if kept >= LEAST_HUGE_ARENA:
            start = -int(whole.__array_interface__["data"][0]) % HUGE_PAGE
            # Where huge pages are larger than the 2 MiB that a plan allows for, none may begin in
            # what is touched and reach into what is lent.
            self._advise("MADV_HUGEPAGE", start, size if mmap.PAGESIZE == 4096 else kept)
        if size > kept and (kept < LEAST_HUGE_ARENA or mmap.PAGESIZE != 4096):
            aligned = -(-(start + kept) // mmap.PAGESIZE) * mmap.PAGESIZE
            if aligned < start + size:
                self._advise("MADV_NOHUGEPAGE", aligned, start + size - aligned)
        # A fork during a direct read into private memory corrupts it (open(2), O_DIRECT notes).
        self._advise("MADV_DONTFORK", start, size)
        arena = whole[start : start + size]
        self._map_start = start
        # The kernel gives pages at the first write: one in each, so that none is missing later.
        arena[: kept : mmap.PAGESIZE] = 0
        return arena

    def _advise(self, name: str, start: int, size: int) -> None:
        advice = getattr(mmap, name, None)
        if self._map is None or advice is None:
            self._notes.append(f"{name}: this platform has no such advice")
            return
        try:
            self._map.madvise(advice, start, size)
        except OSError as error:
            self._notes.append(f"{name} refused: {error.strerror}")

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest slot, 0 without slots."""
        return max(self.sizes, default=0)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space taken, what alignment loses included."""
        return self.arena_bytes - self._kept_bytes + mapped_bytes(self._kept_bytes)

    def slot(self, number: int) -> NDArray[np.uint8]:
        """The slot as `(n_bytes,) uint8`, for the one who reads a block into it."""
        return self._slots[number]

    def view(self, number: int) -> NDArray[np.uint8]:
        """The same, read-only, for those who use the block."""
        return self._read_only[number]

    def give_back(self, first: int) -> None:
        """Gives the memory of the slots from `first` on, which are lent, back to the system.

        They hold nothing afterwards and no read is under way into them; filling them takes memory
        again. Nothing is lent where the system takes none back (`can_give_back`).

        Raises:
            StorageError: the system refuses, as it does since memory was locked, say.
        """
        if self._map is None or sys.platform != "linux":
            return
        begin = self._map_start + sum(self.sizes[:first])
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self._map_start + self.arena_bytes
        if begin < end:
            try:
                self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            except OSError as error:
                raise StorageError.of(error, "pool", "giving memory back") from error

    def report(self) -> PoolReport:
        """What was got of the slots that are not lent, as found when the pool was made."""
        notes = list(self._notes)
        is_large = self._kept_bytes >= LEAST_HUGE_ARENA
        whole = self._kept_bytes // HUGE_PAGE * HUGE_PAGE
        if is_large and self._huge is not None and self._huge < whole:
            notes.append(
                f"{self._huge} of {self._kept_bytes} bytes are in huge pages: see "
                "/sys/kernel/mm/transparent_hugepage/enabled and free memory's fragmentation"
            )
        return PoolReport(self.n_slots, self.slot_bytes, self._kept_bytes, self._huge, tuple(notes))

    def close(self) -> None:
        """Gives the slots up; the memory goes with the last array over it."""
        self._slots = []
        self._read_only = []
        self.arena = np.empty(0, np.uint8)
        self._map = None


def huge_bytes(address: int, size: int, smaps: Path = Path("/proc/self/smaps")) -> int | None:
    """Bytes in anonymous huge pages among the mappings that overlap `[address, address + size)`.

    Read from the `AnonHugePages` lines (proc_pid_smaps(5)); None where there is no such file.
    """
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return None
    total = 0
    is_inside = False
    for line in lines:
        if match := _RANGE.match(line):
            start, end = (int(group, 16) for group in match.groups())
            is_inside = start < address + size and address < end
        elif is_inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total
