"""When what was written becomes durable, and is entered in the journal."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .errors import StorageError
from .journal import ItemKind, Journal, JournalRecord
from .output import OutputFile
from .threads import start_thread

EVERY_BYTES: Final = 256 * 2**20
EVERY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Resume:
    """Asks a writer to keep a journal, and to go on with what an earlier one left unfinished.

    `facts` name what the content is made from; work begun with other facts is refused, unless
    `restart` gives it up, or the facts that differ start with `trusted`. What was written is made
    durable and entered in the journal every `every_bytes` or `every_seconds`, whichever is first.
    """

    facts: Mapping[str, str]
    restart: bool = False
    trusted: str | None = None
    every_bytes: int = EVERY_BYTES
    every_seconds: float = EVERY_SECONDS

    def differences(self, then: Mapping[str, str]) -> list[str]:
        """What is not as it was `then`, in words; facts that are trusted are left out."""
        found = []
        for name in sorted(self.facts.keys() | then.keys()):
            if self.trusted is not None and name.startswith(self.trusted):
                continue
            old, new = then.get(name), self.facts.get(name)
            if old != new:
                found.append(f"{name}: {old or 'nothing'} then, {new or 'nothing'} now")
        return found


@dataclass(frozen=True, slots=True)
class _Pending:
    kind: ItemKind
    a: int
    b: int
    checksum: int
    output: OutputFile
    ticket: int
    """How much its file had taken when the item was complete."""


class Checkpoints:
    """Enters items in a journal once they are on the disk: never before, so that it does not lie.

    A thread of its own syncs the files while others go on writing. One thread may call.
    """

    def __init__(
        self,
        journal: Journal,
        outputs: Sequence[OutputFile],
        resume: Resume,
        *,
        first_batch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal = journal
        self.sync_seconds = 0.0
        self._outputs = tuple(outputs)
        self._resume = resume
        self._clock = clock
        self._batch = first_batch
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_requested = False
        self._error: StorageError | None = None
        self._bytes = 0
        self._time = clock()
        self._thread = start_thread(self._run, "colibri-journal")

    def add(self, kind: ItemKind, a: int, b: int, checksum: int, output: OutputFile) -> None:
        """Takes note of an item that was given to `output` completely.

        Raises:
            StorageError: an earlier sync or entry failed.
        """
        if self._error is not None:
            raise self._error
        item = _Pending(kind, a, b, checksum, output, output.accepted_bytes)
        with self._lock:
            self._pending.append(item)
        if self._is_requested:
            return
        accepted = sum(each.accepted_bytes for each in self._outputs)
        is_due = accepted - self._bytes >= self._resume.every_bytes
        if is_due or self._clock() - self._time >= self._resume.every_seconds:
            self._bytes, self._time = accepted, self._clock()
            self._is_requested = True
            self._requests.put(True)

    def finish(self) -> None:
        """Returns when every item is on the disk and entered.

        Raises:
            StorageError: the kernel refused.
        """
        self._stop()
        if self._error is not None:
            raise self._error
        for output in self._outputs:
            output.flush()
        self._save()

    def rescue(self) -> None:
        """Enters what can still be made durable, and says nothing of what cannot."""
        self._stop()
        for output in self._outputs:
            with contextlib.suppress(StorageError):
                output.flush()
        if self._error is None:
            with contextlib.suppress(StorageError):
                self._save()

    def close(self) -> None:
        """Ends the thread."""
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._requests.put(False)
            self._thread.join()

    def _run(self) -> None:
        while self._requests.get():
            try:
                self._save()
            except StorageError as error:
                # A failed sync may not be repeated: the kernel tells of lost pages only once.
                self._error = error
                return
            finally:
                self._is_requested = False

    def _save(self) -> None:
        with self._lock:
            ready = [item for item in self._pending if item.output.written_bytes >= item.ticket]
        if not ready:
            return
        start = self._clock()
        for output in dict.fromkeys(item.output for item in ready):
            output.sync()
        self.journal.append(
            [JournalRecord(item.kind, item.a, item.b, item.checksum, self._batch) for item in ready]
        )
        self._batch += 1
        entered = set(map(id, ready))
        with self._lock:
            self._pending = [item for item in self._pending if id(item) not in entered]
        self.sync_seconds += self._clock() - start
