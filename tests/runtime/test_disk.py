"""Reads from disk, with what kernels and disks do to them."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from colibri_format import FormatError, StorageError
from colibri_runtime.blocks import block_slot_bytes, plan_read
from colibri_runtime.disk_faults import MAX_AGAIN
from colibri_runtime.disk_files import IoMode, OpenFile, open_blocks
from colibri_runtime.disk_threads import ThreadsEngine
from colibri_runtime.pool import Pool
from helpers.blocks import make_source, small_layout


@pytest.fixture
def source(tmp_path):
    return make_source(
        tmp_path / "a.colibri", layouts=[small_layout(), small_layout()], n_experts=3
    )


@pytest.fixture
def pool(source):
    pool = Pool(4, block_slot_bytes(source))
    yield pool
    pool.close()


def read_of(source, pool, key=(0, 0), slot=0):
    return plan_read(source, *key, slot=slot, buffer=pool.slot(slot))


class Disk:
    """`preadv` with a script: each entry is an errno, a count to cut the read to, or None."""

    def __init__(self, *script):
        self.script = list(script)
        self.offsets = []

    def __call__(self, fd, buffers, offset):
        self.offsets.append(offset)
        act = self.script.pop(0) if self.script else None
        if isinstance(act, OSError):
            raise act
        if act is not None:
            buffers = [buffers[0][:act]]
        return os.preadv(fd, buffers, offset)


def run(source, pool, disk=os.preadv, *, mode=IoMode.BUFFERED, key=(0, 0), sleep=None, **options):
    """One read through an engine; gives the read back."""
    file = open_blocks(source.path, probe=None, direct=False)
    file = OpenFile(file.path, file.fd, file.fd, mode)
    engine = ThreadsEngine([file], read=disk, sleep=sleep or (lambda seconds: None), **options)
    read = read_of(source, pool, key)
    engine.submit(read)
    (done,) = engine.wait()
    engine.close()
    assert done is read
    return read


def assert_right(source, read):
    assert read.error is None
    assert np.array_equal(read.buffer[: read.size], source.payload[read.layer, read.expert])


def test_a_block_is_read_whole_with_its_padding(source, pool):
    pool.slot(0)[:] = 0xAA

    read = run(source, pool, key=(1, 2))

    assert_right(source, read)
    assert read.n_bytes == read.length
    assert not read.buffer[read.size : read.length].any()


def test_a_short_read_goes_on_where_it_stopped(source, pool):
    disk = Disk(1000, 1)

    read = run(source, pool, disk)

    assert_right(source, read)
    assert disk.offsets == [read.offset, read.offset + 1000, read.offset + 1001]


def test_a_short_direct_read_goes_on_at_a_boundary(source, pool):
    disk = Disk(5000)

    read = run(source, pool, disk, mode=IoMode.DIRECT)

    assert_right(source, read)
    assert disk.offsets == [read.offset, read.offset + 4096]


def test_an_interrupted_read_is_made_again(source, pool):
    assert_right(source, run(source, pool, Disk(*[InterruptedError(errno.EINTR, "x")] * 3)))


def test_a_busy_disk_is_asked_again_ever_later(source, pool):
    slept = []

    read = run(source, pool, Disk(*[BlockingIOError(errno.EAGAIN, "x")] * 3), sleep=slept.append)

    assert_right(source, read)
    assert slept == [0.001, 0.002, 0.004]


def test_a_disk_that_stays_busy_is_an_error(source, pool):
    disk = Disk(*[BlockingIOError(errno.EAGAIN, "try again")] * (MAX_AGAIN + 1))

    read = run(source, pool, disk)

    assert isinstance(read.error, StorageError)
    assert read.error.code == "os-error"
    assert read.error.errno == errno.EAGAIN


def test_an_io_error_names_file_block_and_errno(source, pool):
    read = run(source, pool, Disk(OSError(errno.EIO, "Input/output error")), key=(1, 2))

    error = read.error
    assert isinstance(error, StorageError)
    assert error.code == "io-error"
    assert error.errno == errno.EIO
    assert error.filename == str(source.path)
    assert f"L1/E2 at {read.offset:#x}" in str(error)


def test_a_read_that_stops_before_the_end_of_the_file_is_tried_again(source, pool):
    slept = []

    read = run(source, pool, Disk(0, 0), sleep=slept.append)

    assert_right(source, read)
    assert slept == [0.001, 0.002]


def test_a_read_that_stops_again_and_again_is_a_short_read(source, pool):
    read = run(source, pool, Disk(*[0] * (MAX_AGAIN + 1)))

    assert read.error.code == "short-read"
    assert "again and again" in str(read.error)


def test_a_file_that_ends_inside_the_padding_is_whole(source, pool):
    pool.slot(0)[:] = 0xAA
    os.truncate(source.path, int(source.index[1, 2]["offset"]) + int(source.index[1, 2]["size"]))

    read = run(source, pool, key=(1, 2))

    assert_right(source, read)
    assert not read.buffer[read.size : read.length].any()


@pytest.mark.parametrize("mode", list(IoMode))
@pytest.mark.parametrize("cut", [0, 1, 4096, 5000])
def test_a_file_cut_inside_a_block_is_a_short_read(source, pool, mode, cut):
    offset = int(source.index[1, 2]["offset"])
    os.truncate(source.path, offset + cut)

    read = run(source, pool, mode=mode, key=(1, 2))

    assert isinstance(read.error, StorageError)
    assert read.error.code == "short-read"
    assert read.error.filename == str(source.path)
    assert f"after {cut} of" in str(read.error)


def flip(source, key, n=100):
    with open(source.path, "r+b") as file:
        file.seek(int(source.index[key]["offset"]) + n)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_caught_after_a_second_read(source, pool):
    flip(source, (0, 1))

    read = run(source, pool, key=(0, 1))

    assert isinstance(read.error, FormatError)
    assert read.error.code == "block-checksum"
    assert f"{source.path}: block L0/E1 at {read.offset:#x}" in str(read.error)
    assert read.n_rereads == 1
    assert read.n_bytes == 2 * read.length


def test_a_bit_flipped_on_the_way_is_read_again(source, pool):
    def disk(fd, buffers, offset, calls=[]):  # noqa: B006 - counts across calls
        n = os.preadv(fd, buffers, offset)
        if not calls:
            buffers[0][9] ^= 1
        calls.append(offset)
        return n

    read = run(source, pool, disk)

    assert_right(source, read)
    assert read.n_rereads == 1


def test_checks_can_be_left_out(source, pool):
    flip(source, (0, 1))

    read = run(source, pool, key=(0, 1), is_verified=False)

    assert read.error is None
    assert read.checksum_ns == 0


def test_an_unforeseen_failure_comes_back_with_its_read(source, pool):
    def disk(fd, buffers, offset):
        raise ZeroDivisionError

    assert isinstance(run(source, pool, disk).error, ZeroDivisionError)


class GatedEngine:
    """An engine of one thread whose reads wait at a gate; `order` is what reached the disk."""

    def __init__(self, source, pool):
        self.gate = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        self.order = []
        file = open_blocks(source.path, probe=None, direct=False)
        self.engine = ThreadsEngine([file], n_threads=1, read=self.read)
        self.reads = {}
        for slot, key in enumerate([(0, 0), (0, 1), (0, 2), (1, 0)]):
            self.reads[key] = read_of(source, pool, key, slot)
        self.keys = {read.offset: key for key, read in self.reads.items()}

    def read(self, fd, buffers, offset):
        self.order.append(self.keys[offset])
        self.reached.release()
        assert self.gate.acquire(timeout=10)
        return os.preadv(fd, buffers, offset)

    def submit(self, key, *, is_prefetch=False):
        self.reads[key].is_prefetch = is_prefetch
        self.engine.submit(self.reads[key])

    def finish(self, n):
        for _ in range(n):
            self.gate.release()
        done = []
        while len(done) < n:
            done += self.engine.wait()
        self.engine.close()


def test_demands_go_before_queued_prefetches(source, pool):
    gated = GatedEngine(source, pool)
    gated.submit((0, 0))
    assert gated.reached.acquire(timeout=10)
    gated.submit((0, 1), is_prefetch=True)
    gated.submit((0, 2))

    gated.finish(3)

    assert gated.order == [(0, 0), (0, 2), (0, 1)]


def test_a_promoted_prefetch_goes_before_other_prefetches(source, pool):
    gated = GatedEngine(source, pool)
    gated.submit((0, 0))
    assert gated.reached.acquire(timeout=10)
    gated.submit((0, 1), is_prefetch=True)
    gated.submit((0, 2), is_prefetch=True)
    gated.engine.promote(gated.reads[0, 2])

    gated.finish(3)

    assert gated.order == [(0, 0), (0, 2), (0, 1)]
    assert not gated.reads[0, 2].is_prefetch


def test_only_a_read_that_has_not_begun_can_be_cancelled(source, pool):
    gated = GatedEngine(source, pool)
    gated.submit((0, 0))
    assert gated.reached.acquire(timeout=10)
    gated.submit((0, 1), is_prefetch=True)
    gated.submit((0, 2))

    assert gated.engine.cancel(gated.reads[0, 1])
    assert gated.engine.cancel(gated.reads[0, 2])
    assert not gated.engine.cancel(gated.reads[0, 0])
    gated.finish(1)
    assert gated.order == [(0, 0)]


def test_closing_waits_for_reads_that_have_begun_and_drops_the_rest(source, pool):
    gated = GatedEngine(source, pool)
    gated.submit((0, 0))
    assert gated.reached.acquire(timeout=10)
    gated.submit((0, 1))
    gated.gate.release()

    gated.engine.close()
    gated.engine.close()

    assert gated.order == [(0, 0)]
    assert [read.offset for read in gated.engine.poll()] == [gated.reads[0, 0].offset]


# Opening


def probe_of(source, pool):
    return read_of(source, pool, (0, 0))


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this platform has no O_DIRECT")
def test_direct_mode_is_proven_by_a_read(source, pool):
    calls = []

    def read(fd, buffers, offset):
        calls.append((len(buffers[0]), offset))
        return len(buffers[0])

    file = open_blocks(source.path, probe=probe_of(source, pool), read=read)
    if file.mode is IoMode.BUFFERED:
        pytest.skip(f"{source.path.parent} has no direct mode: {file.reason}")
    file.close()

    probe = probe_of(source, pool)
    assert calls == [(probe.length, probe.offset)]
    assert file.reason == ""


def test_refusal_at_open_falls_back_and_says_so(source, pool):
    def open_file(path, flags):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.open(path, flags)

    file = open_blocks(source.path, probe=probe_of(source, pool), open_file=open_file)
    file.close()

    assert file.mode is IoMode.BUFFERED
    assert "EINVAL" in file.reason or "no O_DIRECT" in file.reason


@pytest.mark.parametrize("answer", [OSError(errno.EINVAL, "Invalid argument"), 512, 0])
def test_refusal_at_the_first_read_falls_back_and_says_so(source, pool, answer):
    def read(fd, buffers, offset):
        if isinstance(answer, OSError):
            raise answer
        return answer

    file = open_blocks(source.path, probe=probe_of(source, pool), read=read, open_file=plain_open)
    file.close()

    assert file.mode is IoMode.BUFFERED
    assert "direct read of a block" in file.reason or "no O_DIRECT" in file.reason


def plain_open(path, flags):
    return os.open(path, flags & ~getattr(os, "O_DIRECT", 0))


def test_memory_file_systems_work_whatever_they_refuse(pool):
    folder = Path("/dev/shm")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        pytest.skip("/dev/shm is not there or cannot be written to")
    path = folder / f"colibri-test-{os.getpid()}.colibri"
    try:
        source = make_source(path, layouts=[small_layout()], n_experts=2)
        file = open_blocks(path, probe=probe_of(source, pool), file_size=source.file_size)
        engine = ThreadsEngine([file])
        engine.submit(read_of(source, pool, (0, 1)))
        (read,) = engine.wait()
        report = engine.report()
        engine.close()
    finally:
        path.unlink(missing_ok=True)

    assert_right(source, read)
    assert (report.mode is IoMode.DIRECT) == (report.reason == "")


def test_buffered_mode_can_be_asked_for(source, pool):
    file = open_blocks(source.path, probe=probe_of(source, pool), direct=False)
    file.close()

    assert (file.mode, file.reason) == (IoMode.BUFFERED, "not asked for")


def test_direct_mode_is_not_claimed_without_proof(source):
    file = open_blocks(source.path, probe=None)
    file.close()

    assert file.mode is IoMode.BUFFERED
    assert "no block to prove" in file.reason


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StorageError) as caught:
        open_blocks(tmp_path / "none.colibri", probe=None)

    assert caught.value.code == "file-not-found"


def test_a_file_that_changed_its_size_is_refused(source):
    with pytest.raises(StorageError) as caught:
        open_blocks(source.path, probe=None, file_size=source.file_size + 1)

    assert caught.value.code == "file-changed"
