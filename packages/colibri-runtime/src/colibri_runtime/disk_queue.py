"""The disk engines `uring` and `aio`: requests in a kernel's queue, and no thread."""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from colibri_format import StorageError, UsageError
from colibri_format.layout import block_seed, round_up

from .disk import BlockRead, IoReport, Trial, check_submit
from .disk_faults import (
    MAX_AGAIN,
    PASSING,
    again_ns,
    checksum_error,
    is_end,
    kernel_error,
    matches,
    short_read,
)
from .disk_files import IoMode, OpenFile, buffer_address, join_modes
from .disk_ring import MAX_REQUEST, Request, Ring
from .disk_worker import WorkerRing

LEAST_DEPTH: Final = 2
MOST_DEPTH: Final = 16
DEPTH_BYTES: Final = 4 * 2**20
"""In flight by default: one request is read while the next waits, more for small blocks. Deeper
queues bring blocks in together, late; docs/io.md."""

DEFAULT_SPLIT_BYTES: Final = 0
"""Whole blocks: pieces of any size gained nothing; docs/io.md."""

DEFAULT_PREFETCH_DEPTH: Final = 1

_WORD: Final = (1 << 64) - 1


def default_depth(block_bytes: int) -> int:
    """Requests of `block_bytes` to keep in flight where nobody says how many."""
    return max(LEAST_DEPTH, min(MOST_DEPTH, -(-DEPTH_BYTES // max(1, block_bytes))))


@dataclass(slots=True, eq=False)
class _Begun:
    """A read of which something was asked of the kernel: pieces not ended, and what they met."""

    read: BlockRead
    file: OpenFile
    address: int
    started_ns: int
    ended_ns: int | None = None
    n_pieces: int = 0
    end: int = 0
    hash: int | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Piece:
    """What a request is to bring: the `length` bytes of a block from its byte `begin` on."""

    begun: _Begun
    begin: int
    length: int
    is_direct: bool
    is_hashed: bool = False
    n_again: int = 0


class _Whole(tuple[BlockRead, int, int, bool]):
    """A block asked for in one request: its read, address, bytes asked for, whether directly."""

    __slots__ = ()


class QueueEngine:
    """Reads blocks through `ring`, at most `depth` requests in flight, demands before prefetches.

    Owns `ring` and `files` and closes them. A prefetch begins only while no demand is queued and
    fewer than `prefetch_depth` requests are in flight, so it delays a demand that comes next by
    no more than those. Requests are whole blocks, or `split_bytes` long; a ring with a backlog
    splits them itself.

    A ring with a backlog (`WorkerRing`) keeps to those rules itself: it is given every request at
    once, begins them while the caller computes, and hashes whole blocks. A block that such a ring
    brings in one piece and well costs no more than its request. With any other ring everything
    happens within calls, on the caller's thread: the device is kept busy as long as more than one
    request is in flight between two of them, checksums are checked just before a block is given
    back, and `wait` gives one block at a time, after the requests that follow have begun. A block
    whose checksum fails is read once more, then given back with the error; so is every other
    failure.

    `sleep` and `clock` stand in for `time.sleep` and `time.perf_counter_ns` in tests.
    """

    def __init__(
        self,
        ring: Ring,
        files: Sequence[OpenFile],
        *,
        depth: int = LEAST_DEPTH,
        split_bytes: int = DEFAULT_SPLIT_BYTES,
        prefetch_depth: int = DEFAULT_PREFETCH_DEPTH,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], int] = time.perf_counter_ns,
        is_verified: bool = True,
        tried: Sequence[Trial] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self._ring = ring
        self._files = list(files)
        self._depth = depth
        self._split_bytes = split_bytes
        self._most = ring.backlog or depth
        self._gives_whole = bool(ring.backlog) and ring.is_checking
        self._most_ahead = ring.backlog or min(prefetch_depth, depth)
        self._sleep = sleep
        self._clock = clock
        self._is_verified = is_verified
        self._tried = tuple(tried)
        self._notes = tuple(notes)
        self._demands: OrderedDict[int, BlockRead] = OrderedDict()
        self._prefetches: OrderedDict[int, BlockRead] = OrderedDict()
        self._demand_pieces: deque[_Piece] = deque()
        self._prefetch_pieces: deque[_Piece] = deque()
        self._later: list[tuple[int, _Piece]] = []
        self._in_flight: dict[int, _Piece | _Whole] = {}
        self._landed: deque[_Begun] = deque()
        self._done: deque[BlockRead] = deque()
        self._tag = 0
        self._n_buffered = 0
        self._is_closed = False

    @property
    def reads_directly(self) -> bool:
        """Whether any file is read past the page cache."""
        return any(file.mode is IoMode.DIRECT for file in self._files)

    def driver(self) -> tuple[int, Sequence[OpenFile], bool] | None:
        """For one who gives the ring's thread its requests from C, beside which this engine is only
        to be closed: the worker's address, the files, whether blocks are to be checked. None
        where the ring has no thread."""
        ring = self._ring
        if not isinstance(ring, WorkerRing):
            return None
        return ring.worker, self._files, self._is_verified

    def submit(self, read: BlockRead) -> None:
        check_submit(read, len(self._files), is_closed=self._is_closed)
        (self._prefetches if read.is_prefetch else self._demands)[id(read)] = read

    def flush(self) -> None:
        self._begin()

    def promote(self, read: BlockRead) -> None:
        read.is_prefetch = read.is_cancelled = False
        if self._prefetches.pop(id(read), None) is not None:
            self._demands[id(read)] = read
        elif self._prefetch_pieces:
            for piece in [p for p in self._prefetch_pieces if p.begun.read is read]:
                self._prefetch_pieces.remove(piece)
                self._demand_pieces.append(piece)
        if read.ticket:
            self._ring.promote(read.ticket)

    def cancel(self, read: BlockRead) -> bool:
        return (
            self._prefetches.pop(id(read), None) is not None
            or self._demands.pop(id(read), None) is not None
            or self._withdraw(read)
        )

    def poll(self) -> list[BlockRead]:
        if not self._is_busy():
            return []
        self._advance(wait=False)
        while self._landed:
            self._finish(self._landed.popleft())
        return self._give()

    def wait(self) -> list[BlockRead]:
        while not self._done:
            if not self._in_flight and not self._is_busy():
                raise UsageError(
                    "no-read", "disk engine", "no read is outstanding", "a submitted read"
                )
            self._advance(wait=not self._landed)
            while self._landed:
                self._finish(self._landed.popleft())
                if not self._ring.is_checking:
                    break
        return self._give() if self._ring.is_checking else [self._done.popleft()]

    def add_file(self, file: OpenFile) -> int:
        self._files.append(file)
        return len(self._files) - 1

    def report(self) -> IoReport:
        mode, reason = join_modes(self._files)
        return IoReport(
            engine=self._ring.name,
            mode=mode,
            reason=reason,
            n_threads=int(self._ring.is_checking),
            is_verified=self._is_verified,
            depth=self._depth,
            split_bytes=self._split_bytes,
            tried=self._tried,
            notes=self._notes,
            n_buffered_reads=self._n_buffered,
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for queue in (self._demands, self._prefetches, self._in_flight):
            queue.clear()
        for rest in (self._demand_pieces, self._prefetch_pieces, self._later, self._landed):
            rest.clear()
        try:
            self._ring.close()
        finally:
            for file in self._files:
                file.close()

    def _is_busy(self) -> bool:
        return bool(
            self._in_flight  # most often
            or self._done
            or self._landed
            or self._demands
            or self._prefetches
            or self._demand_pieces
            or self._prefetch_pieces
            or self._later
        )

    def _advance(self, *, wait: bool) -> None:
        """Begins what may begin and takes in what has ended; with `wait`, something, if it can."""
        self._begin()
        if not self._in_flight:
            if wait and not self._landed and not self._done and self._later:
                due = min(due for due, _ in self._later)
                self._sleep(max(0, due - self._clock()) / 1e9)
            return
        try:
            done = self._ring.reap(wait=wait and not self._landed and not self._done)
        except OSError as error:
            where = f"disk engine {self._ring.name}"
            raise StorageError.of(error, where, "waiting for reads") from error
        if not done and not self._ring.in_flight():
            # An exception, Ctrl-C say, came between the kernel's answer and our notes: ask again.
            for asked in reversed(self._in_flight.values()):
                self._queue_again(asked)
            self._in_flight.clear()
        for answer in done:
            asked = self._in_flight.pop(answer[0])
            if isinstance(asked, _Whole):
                self._take_whole(asked, answer)
                continue
            asked.begun.read.ticket = 0
            if self._ring.is_checking:
                self._note(asked, answer)
            self._take(asked, answer[1])
        self._begin()

    def _begin(self) -> None:
        """Fills the ring from the queues."""
        if self._later:
            self._wake()
        if (
            not (self._demands or self._prefetches or self._demand_pieces or self._prefetch_pieces)
            or len(self._in_flight) >= self._most
        ):
            return
        if self._gives_whole and not (self._demand_pieces or self._prefetch_pieces):
            self._begin_whole(self._demands)
            self._begin_whole(self._prefetches)
        while batch := self._next_batch():
            requests = []
            for piece in batch:
                begun = piece.begun
                self._tag = tag = (self._tag + 1) & 0xFFFFFFFF or 1
                self._in_flight[tag] = piece
                read, file, at = begun.read, begun.file, piece.begin
                is_other = file.fd != file.buffered_fd and not piece.is_direct
                self._n_buffered += is_other
                piece.is_hashed = (
                    self._ring.is_checking and self._is_verified and self._is_whole(piece)
                )
                if begun.n_pieces == 1 and self._ring.backlog:
                    read.ticket = tag
                requests.append(
                    Request(
                        begun.address + at,
                        read.offset + at,
                        piece.length,
                        file.buffered_fd if is_other else file.fd,
                        -1 if is_other else read.file,
                        tag,
                        block_seed(read.layer, read.expert) if piece.is_hashed else 0,
                        read.size if piece.is_hashed else 0,
                        read.is_prefetch,
                    )
                )
            n = self._ring.submit(requests)
            for request in requests[max(n, 0) :]:
                del self._in_flight[request.tag]
            for piece in batch[max(n, 0) :]:
                piece.begun.read.ticket = 0
            if n == len(batch):
                continue
            rest = batch[max(n, 0) :]
            if n < 0 and n != -errno.EINTR and not (-n in PASSING and self._in_flight):
                # Nothing is in flight that could make room, or the request itself is at fault.
                self._take(rest.pop(0), n)
            for piece in reversed(rest):
                self._queue_of(piece).appendleft(piece)
            if -n in PASSING:
                return

    def _begin_whole(self, queue: OrderedDict[int, BlockRead]) -> None:
        """Gives the ring the reads of `queue`, a request each, as far as they suit."""
        in_flight, files = self._in_flight, self._files
        tag = self._tag
        requests = []
        while queue and len(in_flight) < self._most:
            _, read = queue.popitem(last=False)
            file = files[read.file]
            address = read.address or buffer_address(read)
            is_direct, length = file.plan_request(
                read.offset, read.length, address, len(read.buffer)
            )
            if length > MAX_REQUEST:
                queue[id(read)] = read
                queue.move_to_end(id(read), last=False)
                break
            is_other = file.fd != file.buffered_fd and not is_direct
            self._n_buffered += is_other
            is_hashed = self._is_verified and read.checksum is not None
            read.ticket = tag = (tag + 1) & 0xFFFFFFFF or 1
            in_flight[tag] = _Whole((read, address, length, is_direct))
            requests.append(
                Request(
                    address,
                    read.offset,
                    length,
                    file.buffered_fd if is_other else file.fd,
                    -1 if is_other else read.file,
                    tag,
                    block_seed(read.layer, read.expert) if is_hashed else 0,
                    read.size if is_hashed else 0,
                    read.is_prefetch,
                )
            )
        self._tag = tag
        n = 0
        while n < len(requests) and (n_more := self._ring.submit(requests[n:])) > 0:
            n += n_more
        for request in reversed(requests[n:]):
            self._queue_again(in_flight.pop(request.tag))

    def _queue_again(self, asked: _Piece | _Whole) -> None:
        """Puts what was asked of the ring, or was to be, back where it came from."""
        if isinstance(asked, _Piece):
            asked.begun.read.ticket = 0
            self._queue_of(asked).appendleft(asked)
            return
        read = asked[0]
        read.ticket = 0
        queue = self._prefetches if read.is_prefetch else self._demands
        queue[id(read)] = read
        queue.move_to_end(id(read), last=False)

    def _take_whole(self, asked: _Whole, answer: Sequence[int]) -> None:
        """A block has come; unless all is well it goes the way of pieces from here on."""
        read, address, length, is_direct = asked
        _, result, found, begun_ns, ended_ns, hash_ns = answer
        read.ticket = 0
        is_hashed = self._is_verified and read.checksum is not None
        if result == length and (not is_hashed or found & _WORD == read.checksum):
            read.n_bytes += result
            read.read_ns += ended_ns - begun_ns
            read.checksum_ns += hash_ns
            read.ended_ns = ended_ns
            self._done.append(read)
            return
        if result == -errno.ECANCELED and read.is_cancelled:
            read.is_cut = True
            read.n_bytes += found
            self._done.append(read)
            return
        begun = _Begun(read, self._files[read.file], address, begun_ns, n_pieces=1, end=length)
        piece = _Piece(begun, 0, length, is_direct, is_hashed)
        self._note(piece, answer)
        self._take(piece, result)

    def _next_batch(self) -> list[_Piece]:
        batch: list[_Piece] = []
        while len(self._in_flight) + len(batch) < self._most:
            piece = self._next(len(self._in_flight) + len(batch))
            if piece is None:
                break
            batch.append(piece)
        return batch

    def _next(self, n_in_flight: int) -> _Piece | None:
        while True:
            if self._demand_pieces:
                piece = self._demand_pieces.popleft()
            elif self._demands:
                piece = self._start(self._demands.popitem(last=False)[1])
            elif n_in_flight >= self._most_ahead:
                return None
            elif self._prefetch_pieces:
                piece = self._prefetch_pieces.popleft()
            elif self._prefetches:
                piece = self._start(self._prefetches.popitem(last=False)[1])
            else:
                return None
            if piece.begun.error is None:
                return piece
            self._end(piece)  # the block is lost: its other pieces need not be read

    def _start(self, read: BlockRead) -> _Piece:
        """The first piece of a read that begins; the others are queued."""
        return self._cut(_Begun(read, self._files[read.file], buffer_address(read), self._clock()))

    def _cut(self, begun: _Begun) -> _Piece:
        read, file = begun.read, begun.file
        is_direct, length = file.plan_request(
            read.offset, read.length, begun.address, len(read.buffer)
        )
        begun.end = length
        step = MAX_REQUEST
        if self._split_bytes and not self._gives_whole:
            step = round_up(self._split_bytes, file.alignment.offset)
        begun.n_pieces = 1
        if length > step:
            queue = self._prefetch_pieces if read.is_prefetch else self._demand_pieces
            for begin in range(step, length, step):
                queue.append(_Piece(begun, begin, min(step, length - begin), is_direct))
                begun.n_pieces += 1
        return _Piece(begun, 0, min(step, length), is_direct)

    def _queue_of(self, piece: _Piece) -> deque[_Piece]:
        return self._prefetch_pieces if piece.begun.read.is_prefetch else self._demand_pieces

    def _wake(self) -> None:
        now = self._clock()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            self._queue_of(entry[1]).append(entry[1])

    def _take(self, piece: _Piece, result: int) -> None:
        """What follows from the kernel's answer to a request."""
        begun = piece.begun
        if result >= 0:
            begun.read.n_bytes += result
            if result < piece.length and self._goes_on(piece, result):
                return
        elif -result == errno.EINTR:
            self._queue_of(piece).appendleft(piece)
            return
        elif -result == errno.EINVAL and piece.is_direct:
            piece.is_direct = False
            self._queue_of(piece).appendleft(piece)
            return
        elif -result in PASSING and piece.n_again < MAX_AGAIN:
            self._put_off(piece)
            return
        elif begun.error is None:
            begun.error = kernel_error(
                begun.file.path, begun.read, OSError(-result, os.strerror(-result))
            )
        self._end(piece)

    def _goes_on(self, piece: _Piece, result: int) -> bool:
        """Whether a request that brought too little goes on; else what there is has come."""
        begun = piece.begun
        # A direct read goes on at a boundary only.
        step = begun.file.alignment.offset if piece.is_direct else 1
        if result >= step:
            piece.begin += result // step * step
            piece.length -= result // step * step
            self._queue_of(piece).appendleft(piece)
            return True
        stop = piece.begin + result
        if is_end(begun.file.buffered_fd, begun.read.offset + stop):
            begun.end = min(begun.end, stop)
        elif piece.n_again < MAX_AGAIN:
            self._put_off(piece)
            return True
        elif begun.error is None:
            begun.error = short_read(begun.file.path, begun.read, stop, is_end=False)
        return False

    def _put_off(self, piece: _Piece) -> None:
        self._later.append((self._clock() + again_ns(piece.n_again), piece))
        piece.n_again += 1

    def _end(self, piece: _Piece) -> None:
        """One piece less; after the last the read has landed, or failed."""
        begun = piece.begun
        begun.n_pieces -= 1
        if begun.n_pieces:
            return
        read = begun.read
        read.ended_ns = self._clock() if begun.ended_ns is None else begun.ended_ns
        read.read_ns += read.ended_ns - begun.started_ns
        if begun.error is None and begun.end < read.size:
            begun.error = short_read(begun.file.path, read, begun.end, is_end=True)
        if begun.error is not None:
            read.error = begun.error
            self._done.append(read)
            return
        if begun.end < read.length:
            read.buffer[begun.end : read.length] = 0
        self._landed.append(begun)

    def _finish(self, begun: _Begun) -> None:
        """Checks a block that has landed; gives it back, or reads it once more."""
        read = begun.read
        if read.checksum is not None and self._is_verified and not self._is_right(begun):
            if read.n_rereads == 0:
                # A bit that flipped on its way, unlike one on the disk, is not there again.
                read.n_rereads += 1
                begun.started_ns = self._clock()
                begun.ended_ns = begun.hash = None
                first = self._cut(begun)
                self._queue_of(first).appendleft(first)
                self._begin()
                return
            read.error = checksum_error(begun.file.path, read)
        self._done.append(read)

    def _give(self) -> list[BlockRead]:
        done = list(self._done)
        self._done.clear()
        return done

    def _withdraw(self, read: BlockRead) -> bool:
        """Whether the ring had not begun the only request of `read`, and gives it back."""
        tag = read.ticket
        if not tag:
            return False
        if not self._ring.withdraw(tag):
            read.is_cancelled = True
            return False
        del self._in_flight[tag]
        read.ticket = 0
        return True

    def _is_whole(self, piece: _Piece) -> bool:
        """Whether the request brings all of a block that has a checksum."""
        begun = piece.begun
        return (
            begun.read.checksum is not None
            and begun.n_pieces == 1
            and piece.begin == 0
            and piece.length >= begun.read.size
        )

    def _note(self, piece: _Piece, answer: Sequence[int]) -> None:
        """Keeps what a ring that hashes says beyond the result."""
        _, result, found, begun_ns, ended_ns, hash_ns = answer
        begun = piece.begun
        if begun.ended_ns is None:
            begun.started_ns = begun_ns
        begun.ended_ns = ended_ns
        if piece.is_hashed and result == piece.length:
            begun.hash = found & _WORD
            begun.read.checksum_ns += hash_ns

    def _is_right(self, begun: _Begun) -> bool:
        if begun.hash is not None:
            return begun.hash == begun.read.checksum
        return matches(begun.read)
