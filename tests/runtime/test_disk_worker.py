"""The thread that keeps a kernel's queue full: order, withdrawal, hashes, signals and its end."""

import errno
import gc
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from colibri_format.checksum import checksum
from colibri_runtime.disk_ring import AioRing, NativeRing, Request, UringRing
from colibri_runtime.disk_worker import MAX_ORDERS, WorkerRing
from helpers.rings import n_descriptors, ring_of

PAGE = 4096


@pytest.fixture(params=[UringRing, AioRing])
def kind(request):
    return request.param


@pytest.fixture
def worker_of():
    """Makes workers, which are closed in the end."""
    made = []

    def make(kind, depth=4, prefetch_depth=2, piece_bytes=0, entries=None):
        ring = ring_of(kind, entries or depth)
        worker = WorkerRing(ring, depth, prefetch_depth, piece_bytes)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.close()


class Stuck:
    """A worker of depth 1 whose only request waits for a pipe, so that all others stay queued."""

    def __init__(self, worker, path, **first):
        self.worker = worker
        self.memory = np.zeros((8, PAGE), np.uint8)
        self.address = self.memory.__array_interface__["data"][0]
        self.file = os.open(path, os.O_RDONLY)
        reader, self.writer = os.pipe()
        self.reader = reader
        self.submit(0, fd=reader, **first)

    def submit(self, tag, *, fd=None, is_ahead=False, n_pages=1, **more):
        request = Request(
            self.address + PAGE * tag, 0, PAGE * n_pages, self.file if fd is None else fd, -1, tag,
            is_ahead=is_ahead, **more,
        )  # fmt: skip
        assert self.worker.submit([request]) == 1

    def free(self):
        os.write(self.writer, b"x" * PAGE)

    def drain(self):
        """Tags in order of their ends."""
        tags = []
        while self.worker.in_flight():
            tags += [answer[0] for answer in self.worker.reap(wait=True)]
        return tags

    def close(self):
        for fd in (self.file, self.reader, self.writer):
            os.close(fd)


@pytest.fixture
def stuck(worker_of, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    stuck = Stuck(worker_of(UringRing, 1, 1), path)
    yield stuck
    stuck.worker.close()
    stuck.close()


def requests_of(path, memory, n, **more):
    address = memory.__array_interface__["data"][0]
    fd = os.open(path, os.O_RDONLY)
    return fd, [Request(address + PAGE * i, PAGE * i, PAGE, fd, -1, i, **more) for i in range(n)]


def reap_all(worker):
    answers = []
    while worker.in_flight():
        answers += worker.reap(wait=True)
    return answers


def test_all_requests_are_taken_and_each_is_answered_once(kind, worker_of, tmp_path):
    data = np.random.default_rng(0).integers(0, 256, (24, PAGE), np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    worker, memory = worker_of(kind, 2), np.zeros_like(data)
    fd, requests = requests_of(tmp_path / "file", memory, 24)

    assert worker.submit(requests) == 24
    answers = reap_all(worker)
    os.close(fd)

    assert sorted(answer[0] for answer in answers) == list(range(24))
    assert all(result == PAGE and begun <= ended for _, result, _, begun, ended, _ in answers)
    assert np.array_equal(memory, data)
    assert worker.reap(wait=True) == []


def test_what_was_read_is_hashed_as_the_format_does(kind, worker_of, tmp_path):
    data = np.random.default_rng(0).integers(0, 256, (8, PAGE), np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    worker, memory = worker_of(kind), np.zeros_like(data)
    fd, requests = requests_of(tmp_path / "file", memory, 8)
    sizes = [1, 16, 17, 240, 241, 1024, 4095, 4096]

    worker.submit([r._replace(seed=2**63 + r.tag, size=sizes[r.tag]) for r in requests])
    answers = reap_all(worker)
    os.close(fd)

    for tag, _, found, _, _, hash_ns in answers:
        assert found % 2**64 == checksum(data[tag, : sizes[tag]], 2**63 + tag)
        assert hash_ns > 0


def test_what_came_short_is_not_hashed(kind, worker_of, tmp_path):
    (tmp_path / "file").write_bytes(bytes(1000))
    worker, memory = worker_of(kind), np.zeros((1, PAGE), np.uint8)
    fd, requests = requests_of(tmp_path / "file", memory, 1, seed=1, size=500)

    worker.submit(requests)
    ((tag, result, found, _, _, hash_ns),) = reap_all(worker)
    os.close(fd)

    assert (tag, result, found, hash_ns) == (0, 1000, 0, 0)


@pytest.mark.parametrize("entries", [1, 3, 64])
@pytest.mark.parametrize("n_pages", [1, 2, 7, 150])
def test_a_request_in_pieces_is_whole_and_hashed(kind, worker_of, tmp_path, n_pages, entries):
    """150 pages are over 64 pieces: they are then longer."""
    data = np.random.default_rng(0).integers(0, 256, (3, n_pages * PAGE), np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    worker, memory = worker_of(kind, 2, 2, PAGE, entries), np.zeros_like(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    size = n_pages * PAGE - 5
    at = memory.__array_interface__["data"][0]
    worker.submit(
        [
            Request(at + n, n, n_pages * PAGE, fd, -1, tag, tag, size, tag == 1)
            for tag, n in enumerate(range(0, data.size, n_pages * PAGE))
        ]
    )
    answers = reap_all(worker)
    os.close(fd)

    assert np.array_equal(memory, data)
    assert {answer[0]: answer[1] for answer in answers} == dict.fromkeys(range(3), n_pages * PAGE)
    for tag, _, found, begun, ended, _ in answers:
        assert found % 2**64 == checksum(data[tag, :size], tag)
        assert begun < ended


@pytest.mark.parametrize("n_there", [0, 100, PAGE, PAGE + 1, 3 * PAGE - 1])
def test_pieces_beyond_the_end_of_a_file_are_a_short_read(kind, worker_of, tmp_path, n_there):
    (tmp_path / "file").write_bytes(bytes(n_there))
    worker, memory = worker_of(kind, 2, 2, PAGE, 8), np.zeros(3 * PAGE, np.uint8)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    at = memory.__array_interface__["data"][0]
    worker.submit([Request(at, 0, 3 * PAGE, fd, -1, 5, 0, 3 * PAGE)])
    ((tag, result, found, *_),) = reap_all(worker)
    os.close(fd)

    assert (tag, result, found) == (5, n_there, n_there // PAGE * PAGE)


def test_the_first_piece_that_fails_is_the_answer(kind, worker_of):
    worker, memory = worker_of(kind, 2, 2, PAGE, 8), np.zeros(3 * PAGE, np.uint8)
    at = memory.__array_interface__["data"][0]

    assert worker.submit([Request(at, 0, 3 * PAGE, -1, -1, 5)]) == 1
    assert [answer[:2] for answer in reap_all(worker)] == [[5, -errno.EBADF]]


@pytest.fixture
def stuck_ahead(worker_of, tmp_path):
    """A prefetch of three pieces, of which the first waits for a pipe."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    worker = worker_of(UringRing, 2, 1, PAGE, 8)
    stuck = Stuck(worker, path, is_ahead=True, n_pages=3)
    yield stuck
    stuck.worker.close()
    stuck.close()


def test_a_demand_begins_before_the_rest_of_a_prefetch(stuck_ahead):
    stuck_ahead.submit(4)
    assert stuck_ahead.worker.reap(wait=True)[0][0] == 4
    for _ in range(3):
        stuck_ahead.free()

    assert stuck_ahead.drain() == [0]


def test_the_rest_of_a_prefetch_that_is_withdrawn_is_not_read(stuck_ahead):
    assert not stuck_ahead.worker.withdraw(0)
    stuck_ahead.submit(4, is_ahead=True)
    stuck_ahead.free()
    answers = {answer[0]: answer[1:3] for answer in reap_all(stuck_ahead.worker)}

    assert answers == {0: [-errno.ECANCELED, PAGE], 4: [PAGE, 0]}


def test_a_prefetch_that_has_begun_in_part_can_be_promoted(stuck_ahead):
    stuck_ahead.worker.promote(0)
    stuck_ahead.submit(4)
    for _ in range(3):
        stuck_ahead.free()
    answers = {answer[0]: answer[1] for answer in reap_all(stuck_ahead.worker)}

    assert answers == {0: 3 * PAGE, 4: PAGE}


def test_a_request_that_the_kernel_refuses_is_answered_alone(kind, worker_of, tmp_path):
    (tmp_path / "file").write_bytes(bytes(PAGE))
    worker, memory = worker_of(kind), np.zeros((3, PAGE), np.uint8)
    fd, requests = requests_of(tmp_path / "file", memory, 1)

    worker.submit([requests[0]._replace(fd=-1, tag=7), requests[0]])
    answers = {answer[0]: answer[1] for answer in reap_all(worker)}
    os.close(fd)

    assert answers == {7: -errno.EBADF, 0: PAGE}


def test_no_more_than_its_orders_are_taken(stuck):
    most = stuck.worker.submit([])
    for _ in range(MAX_ORDERS // 16):
        most += stuck.worker.submit(
            [Request(stuck.address, 0, PAGE, stuck.file, -1, 3) for _ in range(16)]
        )

    assert most == MAX_ORDERS - 1
    assert stuck.worker.submit([Request(stuck.address, 0, PAGE, stuck.file, -1, 3)]) == -errno.EBUSY
    stuck.free()
    assert len(stuck.drain()) == MAX_ORDERS


def test_demands_go_before_prefetches(stuck):
    for tag, is_ahead in ((1, True), (2, False), (3, True), (4, False)):
        stuck.submit(tag, is_ahead=is_ahead)
    stuck.free()

    assert stuck.drain() == [0, 2, 4, 1, 3]


def test_a_promoted_prefetch_is_a_demand(stuck):
    for tag, is_ahead in ((1, True), (2, True), (3, False), (4, True)):
        stuck.submit(tag, is_ahead=is_ahead)
    stuck.worker.promote(2)
    stuck.worker.promote(0)
    stuck.worker.promote(99)
    stuck.free()

    assert stuck.drain() == [0, 3, 2, 1, 4]


def test_only_what_has_not_begun_can_be_withdrawn(stuck):
    for tag, is_ahead in ((1, True), (2, False), (3, True), (4, False), (5, False)):
        stuck.submit(tag, is_ahead=is_ahead)

    assert [stuck.worker.withdraw(tag) for tag in (0, 3, 5, 2, 2, 99)] == [
        False, True, True, True, False, False,
    ]  # fmt: skip
    stuck.submit(6)
    stuck.submit(7, is_ahead=True)
    stuck.free()

    assert stuck.drain() == [0, 4, 6, 1, 7]


def test_prefetches_begin_only_while_few_requests_are_in_flight(worker_of, tmp_path):
    (tmp_path / "file").write_bytes(bytes(PAGE))
    stuck = Stuck(worker_of(UringRing, 2, 1), tmp_path / "file")
    stuck.submit(1, is_ahead=True)
    stuck.submit(2)
    first = stuck.worker.reap(wait=True)[0][0]
    stuck.free()

    assert [first, *stuck.drain()] == [2, 0, 1]
    stuck.close()


def test_a_signal_ends_a_wait_so_that_its_handler_can_run(stuck):
    fired = []

    def free(number, frame):
        fired.append(number)
        stuck.free()

    previous = signal.signal(signal.SIGALRM, free)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        assert stuck.drain() == [0]
    finally:
        signal.signal(signal.SIGALRM, previous)

    assert fired == [signal.SIGALRM]


def test_closing_drops_what_is_queued_and_waits_for_what_is_in_flight(stuck):
    stuck.submit(1)
    freeing = threading.Timer(0.02, stuck.free)
    freeing.start()
    stuck.worker.close()
    stuck.worker.close()
    freeing.join()

    assert (stuck.memory[0] == ord("x")).all()
    assert not stuck.memory[1].any()


def test_a_forgotten_worker_ends_with_its_thread_and_queue():
    gc.collect()
    n_threads = n_threads_now()
    worker = WorkerRing(ring_of(UringRing, 4), 4, 2)
    count = n_descriptors()

    assert n_threads_now() == n_threads + 1
    del worker
    gc.collect()

    assert n_threads_now() == n_threads
    assert n_descriptors() == count - 1


def test_a_queue_that_takes_nothing_any_more_answers_each_request(tmp_path):
    """As if the queue's descriptor had been closed by someone."""
    (tmp_path / "file").write_bytes(bytes(PAGE))
    ring = ring_of(UringRing, 4)
    fd = max(int(path.name) for path in Path("/proc/self/fd").iterdir() if is_uring(path))
    worker = WorkerRing(ring, 4, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    spare = os.dup(fd)
    os.dup2(null, fd)
    memory = np.zeros((1, PAGE), np.uint8)
    file, requests = requests_of(tmp_path / "file", memory, 1)

    worker.submit(requests)
    ((_, result, *_),) = worker.reap(wait=True)

    os.dup2(spare, fd)
    for each in (null, spare, file):
        os.close(each)
    worker.close()
    assert result < 0


def is_uring(path):
    try:
        return "io_uring" in str(path.readlink())
    except OSError:
        return False


def n_threads_now():
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_worker_needs_the_library(monkeypatch):
    ring = ring_of(UringRing, 1)
    monkeypatch.setattr("colibri_runtime.disk_worker.native", lambda: NoLibrary)
    with pytest.raises(OSError) as caught:
        WorkerRing(ring, 1, 1)
    ring.close()

    assert caught.value.errno == errno.ENOSYS


class NoLibrary:
    library = None
    reason = "taken away"


def test_a_depth_of_none_is_refused():
    ring = ring_of(UringRing, 1)
    with pytest.raises(OSError) as caught:
        WorkerRing(ring, 0, 0)
    ring.close()

    assert caught.value.errno == errno.EINVAL
    assert isinstance(ring, NativeRing)


def test_whatever_is_withdrawn_while_others_are_hashed_ends_once(kind, worker_of, tmp_path):
    n_bytes, piece = 2**20, 2**18
    (tmp_path / "file").write_bytes(np.random.default_rng(1).bytes(n_bytes))
    file = os.open(tmp_path / "file", os.O_RDONLY)
    memory = np.zeros((6, n_bytes), np.uint8)
    start = memory.__array_interface__["data"][0]
    worker = worker_of(kind, 2, 3, piece, 16)
    rng = np.random.default_rng(7)

    def submit(tag, is_ahead):
        request = Request(
            start + n_bytes * tag, 0, n_bytes, file, -1, tag, size=n_bytes, is_ahead=is_ahead
        )
        assert worker.submit([request]) == 1

    for _ in range(400):
        ended, expected = [], []
        for tag in range(3):
            submit(tag, is_ahead=True)
        # A demand comes between the pieces of what is read ahead.
        for tag in (3, 4):
            spin(int(rng.integers(0, 300)))
            submit(tag, is_ahead=False)
            wrong = int(rng.integers(0, 3))
            if worker.withdraw(wrong):
                expected.append(wrong)
            ended += [answer[0] for answer in worker.reap(wait=False)]
        while worker.in_flight():
            ended += [answer[0] for answer in worker.reap(wait=True)]
            assert len(ended) <= 5
        assert sorted(ended + expected) == [0, 1, 2, 3, 4]
    os.close(file)


def spin(n):
    """For some microseconds, without giving the processor away."""
    for _ in range(n * 10):
        pass
