"""Every disk engine on real files, and what the kernel refuses: by seccomp, limits and devices."""

import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from colibri_format import StorageError, UsageError
from colibri_format.checksum import checksum
from colibri_format.layout import block_seed
from colibri_runtime import disk_choice, disk_files
from colibri_runtime._native import Native, native
from colibri_runtime.blocks import block_slot_bytes
from colibri_runtime.disk import BlockRead, EngineName
from colibri_runtime.disk_choice import open_engine
from colibri_runtime.disk_files import Alignment, BlockFile, IoMode, file_system
from colibri_runtime.disk_ring import AioRing, Request, UringRing
from colibri_runtime.pool import Pool
from helpers.blocks import make_source, small_layout
from helpers.disk_children import open_one, read_all
from helpers.rings import n_descriptors, open_plain, read_of, ring_of
from helpers.sandbox import (
    IO_SETUP,
    IO_SUBMIT,
    IO_URING_ENTER,
    IO_URING_REGISTER,
    IO_URING_SETUP,
    run_child,
)

NAMES = [name for name in EngineName if name is not EngineName.AUTO]
KEYS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.fixture
def source(tmp_path):
    return make_source(
        tmp_path / "a.colibri", layouts=[small_layout(), small_layout()], n_experts=3
    )


@pytest.fixture
def pool(source):
    pool = Pool(6, block_slot_bytes(source))
    yield pool
    pool.close()


@pytest.fixture
def engine_of(source, pool):
    made = []

    def make(name, **options):
        try:
            engine = open_one(name, source, pool, **options)
        except StorageError as error:
            if error.code != "io-unavailable":
                raise
            pytest.skip(str(error))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def needs_library():
    if native().library is None:
        pytest.skip(f"no C library: {native().reason}")


def assert_right(source, read):
    assert read.error is None
    assert np.array_equal(read.buffer[: read.size], source.payload[read.layer, read.expert])


def fetch(engine, read):
    engine.submit(read)
    (done,) = engine.wait()
    assert done is read
    return read


# Each engine


@pytest.mark.parametrize("name", EngineName)
def test_every_block_is_read_right(source, pool, engine_of, name):
    engine = engine_of(name)

    for _ in range(3):
        pool.slot(0).base[:] = 0
        assert read_all(engine, source, pool) == []
    report = engine.report()
    assert name in (report.engine, EngineName.AUTO)
    assert json.loads(json.dumps(asdict(report)))["mode"] in ("direct", "buffered")
    assert (report.mode is IoMode.DIRECT) == (report.reason == "")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [0, 1, 512, 4096, 5000])
def test_a_file_cut_while_open_is_a_short_read_and_other_blocks_are_fine(
    source, pool, engine_of, name, cut
):
    engine = engine_of(name)
    read = read_of(source, pool, (1, 2))
    os.truncate(source.path, read.offset + cut)

    fetch(engine, read)

    assert (read.error.code, read.error.filename) == ("short-read", str(source.path))
    assert f"after {cut} of" in str(read.error)
    assert_right(source, fetch(engine, read_of(source, pool, (1, 1))))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_cut_inside_the_padding_is_whole(source, pool, engine_of, name):
    engine = engine_of(name)
    pool.slot(0)[:] = 0xAA
    read = read_of(source, pool, (1, 2))
    os.truncate(source.path, read.offset + read.size)

    assert_right(source, fetch(engine, read))
    assert not read.buffer[read.size : read.length].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_block_is_named_and_other_blocks_are_fine(source, pool, engine_of, name):
    with open(source.path, "r+b") as file:
        file.seek(int(source.index[0, 1]["offset"]) + 77)
        file.write(bytes([source.payload[0, 1][77] ^ 8]))
    engine = engine_of(name)

    read = fetch(engine, read_of(source, pool, (0, 1)))

    assert read.error.code == "block-checksum"
    assert f"{source.path}: block L0/E1 at {read.offset:#x}" in str(read.error)
    assert read.n_rereads == 1
    assert_right(source, fetch(engine, read_of(source, pool, (0, 2))))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_two_files_are_read_by_number(source, pool, tmp_path, name):
    other = make_source(tmp_path / "b.colibri", layouts=[small_layout()], n_experts=3, seed=1)
    third = make_source(tmp_path / "c.colibri", layouts=[small_layout()], n_experts=1, seed=2)
    files = [BlockFile(s.path, read_of(s, pool), s.file_size) for s in (source, other)]
    try:
        engine = open_engine(name, files)
    except StorageError as error:
        pytest.skip(str(error))
    number = engine.add_file(open_plain(third.path))
    reads = [
        read_of(source, pool, (0, 1), 0),
        read_of(other, pool, (0, 1), 1, file=1),
        read_of(third, pool, (0, 0), 2, file=number),
    ]

    for read in reads:
        engine.submit(read)
    done = []
    while len(done) < 3:
        done += engine.wait()
    engine.close()

    for read, origin in zip(reads, (source, other, third), strict=True):
        assert_right(origin, read)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_off_every_boundary_are_read_right(tmp_path, name):
    """A stranger's file: offsets, lengths and slots of any value, the last block at its end."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, 40_000, dtype=np.uint8)
    path = tmp_path / "raw"
    path.write_bytes(data.tobytes())
    memory = np.zeros(4 * 16384 + 3, np.uint8)[3:]
    places = [(4096, 8192), (0, 100), (517, 9000), (30_001, 9999)]
    reads = [
        BlockRead(
            layer=0,
            expert=i,
            offset=offset,
            length=size,
            size=size,
            checksum=checksum(data[offset : offset + size], block_seed(0, i)),
            slot=i,
            buffer=memory[i * 16384 : (i + 1) * 16384],
        )
        for i, (offset, size) in enumerate(places)
    ]
    aligned = Pool(1, 16384)
    probe = BlockRead(0, 0, 4096, 8192, 8192, None, 0, aligned.slot(0))
    try:
        engine = open_engine(name, [BlockFile(path, probe)])
    except StorageError as error:
        pytest.skip(str(error))

    for read in reads:
        assert fetch(engine, read).error is None
    report = engine.report()
    engine.close()

    for read, (offset, size) in zip(reads, places, strict=True):
        assert np.array_equal(read.buffer[:size], data[offset : offset + size])
    if report.mode is IoMode.DIRECT:
        assert report.n_buffered_reads == len(reads)


@pytest.mark.parametrize("name", NAMES)
def test_a_read_can_be_cancelled_until_it_begins(source, pool, engine_of, name):
    engine = engine_of(name, depth=1, n_threads=1)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS)]
    for read in reads:
        engine.submit(read)

    cancelled = {id(read) for read in reversed(reads) if engine.cancel(read)}
    left = len(reads) - len(cancelled)
    done = []
    while len(done) < left:
        done += engine.wait()

    assert engine.poll() == []
    assert not cancelled.intersection(map(id, done))
    for read in done:
        assert_right(source, read)


@pytest.mark.parametrize("name", NAMES)
def test_closing_with_reads_in_flight_ends_them_first(source, pool, engine_of, name):
    engine = engine_of(name)
    reads = [read_of(source, pool, key, slot) for slot, key in enumerate(KEYS)]
    for read in reads:
        engine.submit(read)
    engine.flush()

    engine.close()
    pool.slot(0).base[:] = 7

    assert (pool.slot(0).base == 7).all()
    with pytest.raises(UsageError) as caught:
        engine.submit(reads[0])
    assert caught.value.code == "engine-closed"


@pytest.mark.parametrize("name", NAMES)
def test_descriptors_are_given_back(source, pool, engine_of, name):
    fetch(engine_of("threads"), read_of(source, pool))  # whatever opens but once
    before = n_descriptors()
    engine = engine_of(name)
    fetch(engine, read_of(source, pool))

    engine.close()

    assert n_descriptors() == before


@pytest.mark.parametrize("name", NAMES)
def test_a_process_may_end_with_reads_in_flight(tmp_path, name):
    if name in disk_choice._RINGS:
        needs_library()
    assert run_child("helpers.disk_children:leave_in_the_middle", str(tmp_path / "a"), name) == []


# Choosing


def refuse(number):
    def ring(depth):
        raise OSError(number, os.strerror(number))

    return ring


def test_auto_takes_the_first_engine_that_reads_directly(source, pool, engine_of):
    engine = engine_of("auto")

    report = engine.report()

    if report.mode is IoMode.DIRECT and not report.tried:
        assert report.engine == "uring"
    else:
        assert report.tried[0].engine == "uring"
        assert report.tried[0].reason


@pytest.mark.parametrize("name", [EngineName.URING, EngineName.AIO])
def test_without_a_thread_blocks_are_checked_where_they_are_waited_for(
    source, pool, engine_of, monkeypatch, name
):
    def refuse(*_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("colibri_runtime.disk_choice.WorkerRing", refuse)
    engine = engine_of(name)

    assert_right(source, fetch(engine, read_of(source, pool, (1, 2))))
    assert "no thread that reads on and checks" in engine.report().notes[-1]


def test_auto_says_what_was_refused_and_why(source, pool, engine_of, monkeypatch):
    monkeypatch.setitem(disk_choice._RINGS, EngineName.URING, refuse(errno.EPERM))
    monkeypatch.setitem(disk_choice._RINGS, EngineName.AIO, refuse(errno.EAGAIN))

    report = engine_of("auto").report()

    assert report.engine == "threads"
    assert [(trial.engine, trial.reason[-8:]) for trial in report.tried] == [
        ("uring", " (EPERM)"),
        ("aio", "(EAGAIN)"),
    ]


def test_auto_reads_through_the_page_cache_where_nothing_is_direct(
    source, pool, engine_of, monkeypatch
):
    monkeypatch.setattr(disk_choice, "prove", lambda *arguments: "no")
    monkeypatch.setattr(disk_files, "prove", lambda *arguments: "a refusal")

    engine = engine_of("auto")
    report = engine.report()

    assert (report.engine, report.mode) == ("threads", IoMode.BUFFERED)
    assert {trial.engine for trial in report.tried} == {"uring", "aio"}
    assert read_all(engine, source, pool) == []


def test_auto_works_without_the_c_library(source, pool, engine_of, monkeypatch):
    monkeypatch.setattr("colibri_runtime.disk_ring.native", lambda: Native(None, "not built"))
    monkeypatch.setattr("colibri_runtime.disk_files.native", lambda: Native(None, "not built"))

    engine = engine_of("auto")
    report = engine.report()

    assert report.engine == "threads"
    assert all("no C library: not built" in trial.reason for trial in report.tried)
    assert read_all(engine, source, pool) == []


@pytest.mark.parametrize("name", [EngineName.URING, EngineName.AIO])
def test_an_engine_asked_for_by_name_is_not_replaced(source, pool, monkeypatch, name):
    monkeypatch.setitem(disk_choice._RINGS, name, refuse(errno.EPERM))

    with pytest.raises(StorageError) as caught:
        open_one(name, source, pool)

    assert (caught.value.code, caught.value.errno) == ("io-unavailable", errno.EPERM)
    assert "--io auto" in str(caught.value)


@pytest.mark.parametrize("name", EngineName)
def test_buffered_reads_can_be_asked_for(source, pool, engine_of, name):
    engine = engine_of(name, direct=False)

    report = engine.report()

    assert (report.mode, report.reason) == (IoMode.BUFFERED, "not asked for")
    assert read_all(engine, source, pool) == []


@pytest.mark.parametrize("name", NAMES)
def test_without_a_block_nothing_is_proven(source, name):
    try:
        engine = open_engine(name, [BlockFile(source.path)])
    except StorageError as error:
        pytest.skip(str(error))
    report = engine.report()
    engine.close()

    assert report.mode is IoMode.BUFFERED
    assert report.reason


@pytest.mark.parametrize("name", EngineName)
@pytest.mark.parametrize("change", ["gone", "longer"])
def test_a_file_that_is_not_what_it_was_is_refused(source, pool, name, change):
    if change == "gone":
        source.path.unlink()
    else:
        os.truncate(source.path, source.file_size + 1)

    with pytest.raises(StorageError) as caught:
        open_one(name, source, pool)

    if caught.value.code == "io-unavailable":
        pytest.skip(str(caught.value))
    assert caught.value.code == {"gone": "file-not-found", "longer": "file-changed"}[change]


@pytest.mark.parametrize(
    ("name", "options", "option"),
    [
        ("fast", {}, "--io"),
        ("uring", {"depth": 0}, "--io-depth"),
        ("uring", {"depth": 5000}, "--io-depth"),
        ("threads", {"n_threads": 65}, "--io-threads"),
        ("uring", {"split_bytes": -1}, "split_bytes"),
    ],
)
def test_knobs_out_of_range_are_named(source, pool, name, options, option):
    with pytest.raises(UsageError) as caught:
        open_one(name, source, pool, **options)

    assert caught.value.code == "bad-option"
    assert option in str(caught.value)


# What direct reads want


def test_addresses_and_offsets_are_told_apart(source, pool, monkeypatch):
    for wants, words in (
        (Alignment(1 << 30, 512), "slots stand at"),
        (Alignment(512, 1 << 20), "repack with that alignment"),
        (Alignment(0, 0), "only through the page cache"),
    ):
        monkeypatch.setattr(disk_files, "direct_alignment", lambda fd, wants=wants: wants)
        monkeypatch.setattr(disk_files, "file_system", lambda device: None)
        engine = open_one("threads", source, pool)
        report = engine.report()

        assert report.mode is IoMode.BUFFERED
        assert words in report.reason or "no O_DIRECT" in report.reason
        assert read_all(engine, source, pool) == []
        engine.close()


def test_the_kernel_tells_what_the_disk_wants(source):
    needs_library()
    with open(source.path, "rb") as file:
        wants = disk_files.direct_alignment(file.fileno())
    if wants is None:
        pytest.skip("kernel or file system do not tell (statx STATX_DIOALIGN)")

    assert wants.memory & (wants.memory - 1) == 0
    assert wants.offset & (wants.offset - 1) == 0


def test_a_bad_descriptor_has_no_alignment():
    assert disk_files.direct_alignment(-1) is None


@pytest.mark.parametrize("name", NAMES)
def test_memory_file_systems_are_not_called_direct(pool, name):
    folder = Path("/dev/shm")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        pytest.skip("/dev/shm is not there or cannot be written to")
    path = folder / f"colibri-test-{os.getpid()}.colibri"
    try:
        source = make_source(path, layouts=[small_layout()] * 2, n_experts=3)
        engine = open_one(name, source, pool)
        errors = read_all(engine, source, pool)
        report = engine.report()
        engine.close()
    except StorageError as error:
        pytest.skip(str(error))
    finally:
        path.unlink(missing_ok=True)

    assert errors == []
    assert report.mode is IoMode.BUFFERED
    assert "in memory" in report.reason or name is EngineName.MMAP


def test_file_systems_are_known_by_their_number(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 27 0:21 / /proc rw,nosuid - proc proc rw\n"
        "27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw\n"
    )

    assert file_system(os.makedev(254, 0), table) == "ext4"
    assert file_system(os.makedev(0, 21), table) == "proc"
    assert file_system(os.makedev(0, 99), table) is None
    assert file_system(os.makedev(254, 0), tmp_path / "absent") is None


# What the kernel refuses


def child(tmp_path, name, **options):
    needs_library()
    forbidden = {str(number): error for number, error in options.pop("forbidden", {}).items()}
    return run_child(
        "helpers.disk_children:read_under",
        str(tmp_path / "a.colibri"),
        name,
        forbidden,
        options.get("pins", True),
    )


def test_a_container_without_io_uring_gets_another_engine(tmp_path):
    found = child(tmp_path, "auto", forbidden={IO_URING_SETUP: errno.EPERM})

    assert found["errors"] == []
    assert found["report"]["engine"] in ("aio", "threads")
    assert found["report"]["tried"][0] == {
        "engine": "uring",
        "reason": "Operation not permitted (EPERM)",
    }


def test_a_container_without_any_queue_gets_threads(tmp_path):
    found = child(tmp_path, "auto", forbidden={IO_URING_SETUP: errno.ENOSYS, IO_SETUP: errno.EPERM})

    assert found["errors"] == []
    assert found["report"]["engine"] == "threads"
    assert [
        "ENOSYS" in t["reason"] or "EPERM" in t["reason"] for t in found["report"]["tried"]
    ] == [
        True,
        True,
    ]


def test_a_queue_that_opens_but_does_nothing_is_not_taken(tmp_path):
    found = child(tmp_path, "auto", forbidden={IO_URING_ENTER: errno.EPERM})

    assert found["errors"] == []
    assert found["report"]["engine"] in ("aio", "threads")
    assert "EPERM" in found["report"]["tried"][0]["reason"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("uring", IO_URING_SETUP),
        ("uring", IO_URING_ENTER),
        ("aio", IO_SETUP),
        ("aio", IO_SUBMIT),
    ],
)
def test_an_engine_asked_for_where_it_is_forbidden_is_an_error(tmp_path, name, call):
    found = child(tmp_path, name, forbidden={call: errno.EPERM})

    assert (found["code"], found["errno"]) == ("io-unavailable", errno.EPERM)


def test_refused_registration_costs_nothing_else(tmp_path):
    found = child(tmp_path, "uring", forbidden={IO_URING_REGISTER: errno.EPERM})
    if found.get("code") == "io-unavailable":
        pytest.skip(found["message"])

    assert found["errors"] == []
    assert found["report"]["engine"] == "uring"
    assert [note.split(":")[0] for note in found["report"]["notes"]] == [
        "registered buffers",
        "registered files",
    ]


def test_memory_that_may_not_be_pinned_is_read_into_all_the_same(tmp_path):
    found = child(tmp_path, "uring", pins=False)
    if found.get("code") == "io-unavailable":
        pytest.skip(found["message"])

    assert found["errors"] == []
    assert found["report"]["notes"] == ["registered buffers: Cannot allocate memory (ENOMEM)"]


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>
static int calls;
/* Of each five reads: interrupted, refused for now, cut short, and two left alone. */
#define SHIM(name)                                                                     \
    ssize_t name(int fd, const struct iovec *v, int n, off_t at)                       \
    {                                                                                  \
        ssize_t (*next)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, #name); \
        struct iovec cut = *v;                                                         \
        switch (__atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED) % 5) {                 \
        case 1: errno = EINTR; return -1;                                              \
        case 2: errno = EAGAIN; return -1;                                             \
        case 3: if (cut.iov_len > 4096) cut.iov_len = 4096; return next(fd, &cut, 1, at); \
        default: return next(fd, v, n, at);                                            \
        }                                                                              \
    }
SHIM(preadv)
SHIM(preadv64)
"""


def test_reads_survive_a_system_that_stutters(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the shim")
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True
    )
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD", ""), str(shim)]))

    found = run_child(
        "helpers.disk_children:read_under",
        str(tmp_path / "a.colibri"),
        "threads",
        env={"LD_PRELOAD": preload},
    )

    assert found["errors"] == []


def losetup(*arguments):
    command = shutil.which("losetup")
    if command is None or sys.platform != "linux":
        pytest.skip("no losetup")
    result = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no loop devices here: {result.stderr.strip()}")
    return result.stdout.strip()


@pytest.mark.parametrize("name", [EngineName.URING, EngineName.AIO, EngineName.THREADS])
def test_a_device_that_loses_its_end_gives_an_io_error(source, pool, name):
    """A block device whose lower half is gone: the kernel's own EIO, not ours."""
    device = Path(losetup("--find", "--show", str(source.path)))
    try:
        engine = open_engine(name, [BlockFile(device, read_of(source, pool))])
        before = fetch(engine, read_of(source, pool, (0, 1)))
        lost = read_of(source, pool, (1, 2))
        os.truncate(source.path, lost.offset)

        assert_right(source, before)
        fetch(engine, lost)
        after = fetch(engine, read_of(source, pool, (0, 2), 1))
        engine.close()
    except StorageError as error:
        pytest.skip(str(error))
    finally:
        losetup("--detach", str(device))

    assert (lost.error.code, lost.error.errno) == ("io-error", errno.EIO)
    assert str(device) in str(lost.error)
    assert_right(source, after)


# The rings themselves


@pytest.mark.parametrize("kind", [UringRing, AioRing])
def test_more_requests_than_the_queue_has_room_for_are_left_over(source, pool, kind):
    ring = ring_of(kind, 4)
    with open(source.path, "rb") as file:
        address = pool.slot(0).base.__array_interface__["data"][0]
        requests = [
            Request(address + 4096 * i, 4096 * i, 4096, file.fileno(), -1, i) for i in range(9)
        ]
        first = ring.submit(requests)
        again = ring.submit(requests[first:])
        done = []
        while ring.in_flight():
            done += ring.reap(wait=True)
    ring.close()

    assert (first, again) == (4, -errno.EBUSY)
    assert sorted(tag for tag, _ in done) == list(range(len(done)))
    assert all(result == 4096 for _, result in done)


@pytest.mark.parametrize("kind", [UringRing, AioRing])
def test_a_bad_request_is_told_and_the_next_is_served(source, pool, kind):
    ring = ring_of(kind)
    with open(source.path, "rb") as file:
        address = pool.slot(0).base.__array_interface__["data"][0]
        found = []
        for fd, at in ((-1, address), (file.fileno(), 8), (file.fileno(), address)):
            n = ring.submit([Request(at, 0, 4096, fd, -1, 5)])
            found.append(n if n < 0 else ring.reap(wait=True)[0][1])
    ring.close()

    assert found == [-errno.EBADF, -errno.EFAULT, 4096]


@pytest.mark.parametrize("kind", [UringRing, AioRing])
def test_an_idle_ring_gives_nothing_and_closes_twice(kind):
    ring = ring_of(kind)

    assert ring.reap(wait=True) == []
    assert ring.reap(wait=False) == []
    assert ring.in_flight() == 0
    ring.close()
    ring.close()


@pytest.mark.parametrize("kind", [UringRing, AioRing])
@pytest.mark.parametrize("depth", [0, 100_000])
def test_a_depth_out_of_range_is_refused(kind, depth):
    needs_library()
    with pytest.raises(OSError) as caught:
        kind(depth)

    assert caught.value.errno in (errno.EINVAL, errno.ENOSYS, errno.EPERM)


class PipeRead:
    """A request that ends when a signal, a while from now, has its handler write to the pipe."""

    def __init__(self, monkeypatch):
        self.ring = ring_of(UringRing)
        self.memory = np.zeros(4096, np.uint8)
        self.signals = 0
        reader, self.writer = os.pipe()
        self.reader = reader
        previous = signal.signal(signal.SIGALRM, self.write)
        self.restore = lambda: signal.signal(signal.SIGALRM, previous)
        address = self.memory.__array_interface__["data"][0]
        assert self.ring.submit([Request(address, 0, 4096, reader, -1, 9)]) == 1
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    def write(self, number, frame):
        self.signals += 1
        os.write(self.writer, b"x" * 4096)

    def close(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.restore()
        self.ring.close()
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe_read(monkeypatch):
    read = PipeRead(monkeypatch)
    yield read
    read.close()


def test_a_signal_ends_a_wait_so_that_its_handler_can_run(pipe_read):
    done = []
    while not done:
        done = pipe_read.ring.reap(wait=True)

    assert done == [[9, 4096]]
    assert pipe_read.signals == 1
    assert (pipe_read.memory == ord("x")).all()


def test_closing_waits_for_what_is_in_flight_whatever_signals_come(pipe_read):
    pipe_read.ring.close()

    assert pipe_read.signals == 1
    assert (pipe_read.memory == ord("x")).all()


def test_a_forgotten_ring_is_closed(source, pool):
    gc.collect()
    ring = ring_of(UringRing)
    count = n_descriptors()

    del ring
    gc.collect()

    assert n_descriptors() == count - 1


def test_memory_of_several_registered_pieces_is_read_into(source, pool, monkeypatch):
    monkeypatch.setattr("colibri_runtime.disk_ring.PIECE_BYTES", 8192)
    ring = ring_of(UringRing)
    arena = pool.slot(0).base.reshape(-1)
    try:
        ring.register_buffers(arena)
    except OSError as error:
        pytest.skip(f"no registered buffers: {error}")
    address = arena.__array_interface__["data"][0]
    with open(source.path, "rb") as file:
        ring.register_files([file.fileno()])
        for start, length in ((0, 4096), (4096, 8192), (8192, 8192), (arena.nbytes - 4096, 4096)):
            arena[:] = 0
            ring.submit([Request(address + start, 4096, length, file.fileno(), 0, 1)])
            assert ring.reap(wait=True) == [[1, length]]
            file.seek(4096)
            assert arena[start : start + length].tobytes() == file.read(length)
        ring.register_files([])
        ring.register_buffers(None)
        ring.submit([Request(address, 4096, 4096, file.fileno(), 0, 2)])
        assert ring.reap(wait=True) == [[2, 4096]]
    ring.close()
