"""What is read, in what order, and what the figures say."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest

import colibri_format
from colibri_bench.cmd_bench import main
from colibri_bench.cmd_io import _parser
from colibri_bench.demo_model import demo_gguf
from colibri_bench.io_files import blocks_of, check_room, copies_in_memory, synthetic_file
from colibri_bench.io_plan import (
    PAGE,
    Extent,
    Reading,
    Way,
    check_shares,
    order_ways,
    parse_sizes,
    plan_blocks,
    plan_sizes,
    plan_ways,
    share_out,
    summarise,
)
from colibri_bench.io_run import read_extents
from colibri_bench.io_slots import SlotRotation, plan_slots
from colibri_bench.io_verdict import check_rows, verdict
from colibri_bench.page_cache import CacheState
from colibri_bench.results import load_results
from colibri_bench.throttle import throttled
from colibri_format import StorageError, UsageError
from colibri_format.command import Terminated
from colibri_repack import repack

MIB = 2**20


def reading(engine, gb_per_s, **changes):
    values = {
        "way": Way(engine, 4 if engine in ("uring", "threads") else None), "block_bytes": MIB,
        "round": 0, "phase": "re-read", "seconds": 1.0, "n_bytes": int(gb_per_s * 1e9),
        "latencies_s": [0.001, 0.002, 0.1], "cpu_s": 0.1, "n_major_faults": 0,
        "disk_bytes": int(gb_per_s * 1e9), "mode": "direct" if engine == "uring" else "buffered",
        "reason": "",
    }  # fmt: skip
    return Reading(**(values | changes))


def test_sizes_become_whole_pages():
    assert parse_sizes("3.5M,64K, 5000,64K") == [8192, 65536, 7 * MIB // 2]


@pytest.mark.parametrize("text", ["", "x", "0", "-1M", "1.xM"])
def test_sizes_that_cannot_be_are_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_sizes(text)

    assert caught.value.code == "bad-sizes"


def test_engines_that_queue_are_tried_at_each_depth():
    assert [way.name for way in plan_ways(["mmap", "uring"], [1, 8])] == [
        "mmap", "uring 1", "uring 8",
    ]  # fmt: skip


def test_shares_have_no_block_in_common_and_go_layer_after_layer():
    layers = plan_blocks(300 * MIB, MIB)
    shares = share_out(layers, 7, 20 * MIB, seed=1)

    every = [extent for share in shares for extent in share]
    assert len(set(every)) == len(every)
    assert all(sum(e.size for e in share) <= 22 * MIB for share in shares)
    layer_of = {extent: number for number, layer in enumerate(layers) for extent in layer}
    for share in shares:
        order = [layer_of[extent] for extent in share]
        assert order == sorted(order)
        assert [e.offset for e in share] != sorted(e.offset for e in share)


def test_too_few_blocks_for_all_ways_are_refused():
    with pytest.raises(UsageError) as caught:
        share_out([[Extent(0, 4096)]], 2, MIB, seed=1)

    assert caught.value.code == "too-few-blocks"


def test_readings_of_few_blocks_are_noticed():
    shares = {MIB: [[Extent(0, MIB)] * 16, [Extent(0, MIB)] * 15], 4096: [[Extent(0, 4096)] * 16]}

    (note,) = check_shares(shares, 8)
    assert note.startswith("blocks of 1 MiB: a reading has 15 of them")
    assert check_shares(shares, 7) == []


def test_each_round_begins_with_another_way():
    ways = plan_ways(["mmap", "buffered", "aio"], [1])

    assert [way.engine for _, way in order_ways(ways, 1)] == ["buffered", "aio", "mmap"]
    assert sorted(number for number, _ in order_ways(ways, 2)) == [0, 1, 2]


def test_rows_are_medians_over_rounds():
    row = summarise([reading("uring", speed, round=i) for i, speed in enumerate((2, 1, 4))])[0]

    assert (row.gb_per_s, row.slowest, row.fastest, row.n_rounds) == (2, 1, 4, 3)
    assert (row.p50_ms, row.p99_ms) == (2.0, 100.0)
    assert row.from_disk == 1.0


def test_reads_that_no_disk_made_are_noticed():
    rows = summarise([reading("buffered", 9, disk_bytes=0), reading("tmpfs", 9, disk_bytes=0)])

    assert check_rows(rows)[0].startswith("NOT COLD: less than half of what buffered read")


def test_direct_mode_that_is_none_is_noticed():
    assert "NOT DIRECT: uring" in check_rows(summarise([reading("uring", 2, mode="buffered")]))[0]


def test_rate_above_the_throttle_is_noticed():
    rows = summarise(
        [
            reading("uring", 0.26, charged_bytes=10**9),
            reading("buffered", 0.1, disk_bytes=10**9, charged_bytes=10**9),
            reading("tmpfs", 9),
        ]
    )

    assert check_rows(rows, throttle=10**9) == []
    assert check_rows(rows, throttle=2 * 10**8) == [
        "NOT THROTTLED: buffered got up to 1.00 GB/s from a disk that was to give 0.20"
    ]


def test_nothing_is_advised_by_figures_of_the_page_cache():
    words = verdict(summarise([reading("mmap", 9, disk_bytes=0)]), token_bytes=1)

    assert len(words) == 1
    assert words[0].startswith("NOT COLD")


def test_each_size_has_a_part_of_the_file_of_its_own():
    sizes = plan_sizes(100 * MIB, [MIB, 7 * MIB // 2])

    spans = [
        (min(e.offset for e in every), max(e.offset + e.size for e in every))
        for _, layers in sizes
        for every in [[e for layer in layers for e in layer]]
    ]
    assert spans == [(0, 50 * MIB), (50 * MIB, 99 * MIB)]


def test_verdict_takes_the_least_work_among_the_fastest():
    rows = summarise(
        [
            reading("uring", 2.0, cpu_s=0.02),
            reading("threads", 2.05, cpu_s=0.5, mode="direct"),
            reading("tmpfs", 8.0, disk_bytes=0),
            reading("uring", 0.5, block_bytes=65536),
        ]
    )
    words = " ".join(verdict(rows, token_bytes=10**8, compute_s=0.01))

    assert "--io uring with --io-depth 4: 2.00 GB/s" in words
    assert "64 KiB reach 24% of that: small experts cost speed here" in words
    assert "3.9 times as fast as the disk: the disk limits reading" in words
    assert "allows 20.5 tokens/s" in words
    assert "takes 49 ms (12 from a copy in memory): the disk is the bottleneck until 80%" in words


def test_verdict_says_when_the_disk_keeps_up():
    words = " ".join(verdict(summarise([reading("uring", 2.0)]), token_bytes=10**6, compute_s=0.01))

    assert "reading its experts takes 0 ms: compute is the bottleneck" in words


def test_blocks_of_a_model_are_whole_pages(demo_file):
    blocks = blocks_of(demo_file)

    assert len(blocks.layers) == 6
    assert all(e.size % 4096 == 0 == e.offset % 4096 for layer in blocks.layers for e in layer)
    assert blocks.token_bytes == 6 * 2 * blocks.largest
    with colibri_format.open(demo_file) as reader:
        dense = sum(tensor.size for tensor in reader.tensors.values())
        assert "output.weight" not in reader.tensors
    assert blocks.computed_bytes == blocks.token_bytes + dense


def test_made_up_file_is_removed(tmp_path):
    with synthetic_file(tmp_path, 3 * MIB) as path:
        assert path.stat().st_size == 3 * MIB

    assert not list(tmp_path.iterdir())


def test_room_is_looked_for_first(tmp_path):
    with pytest.raises(StorageError) as caught, synthetic_file(tmp_path, 2**60):
        pass

    assert caught.value.code == "disk-full"
    assert not list(tmp_path.iterdir())


def test_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StorageError) as caught:
        check_room(tmp_path / "absent", 1)

    assert caught.value.code == "file-not-found"


def test_copies_are_removed_after_a_failure(tmp_path):
    source = tmp_path / "model"
    source.write_bytes(b"x" * 100)
    folder = tmp_path / "memory"
    folder.mkdir()

    extents = [Extent(10, 5), Extent(40, 50)]

    with pytest.raises(RuntimeError), copies_in_memory([source], extents, folder) as made:
        copy = made[0].read_bytes()
        assert len(copy) == 100
        assert [copy[e.offset : e.offset + e.size] for e in extents] == [b"x" * 5, b"x" * 50]
        assert copy[:10] == bytes(10)
        raise RuntimeError

    assert not list(folder.iterdir())


@pytest.fixture
def slots(demo_file, monkeypatch):
    monkeypatch.setattr("colibri_bench.io_slots.POOL_BYTES", 0)
    rotation = SlotRotation(blocks_of(demo_file).largest, 4)
    yield rotation
    rotation.close()


@pytest.mark.parametrize("engine", ["mmap", "mmap willneed", "mmap random", "buffered", "threads"])
def test_every_way_reads_all_blocks(demo_file, engine, slots):
    blocks = blocks_of(demo_file)
    extents = blocks.layers[0][:5]
    way = Way(engine, 2 if engine == "threads" else None)
    timed = read_extents(way, blocks.paths, extents, slots)

    assert len(timed.latencies_s) == 5
    assert timed.n_bytes == sum(extent.size for extent in extents)


@pytest.mark.parametrize("engine", ["mmap", "threads"])
def test_slow_ways_read_less_rather_than_longer(demo_file, engine, slots):
    blocks = blocks_of(demo_file)
    way = Way(engine, 1 if engine == "threads" else None)
    timed = read_extents(way, blocks.paths, blocks.layers[0], slots, most_s=0.0)

    assert len(timed.latencies_s) == 1
    assert timed.n_bytes == blocks.layers[0][0].size


def test_slots_come_again_after_all_others(demo_file, slots):
    blocks = blocks_of(demo_file)
    for slot in range(slots.pool.n_slots):
        slots.pool.slot(slot)[:] = 0
    read_extents(Way("threads", 1), blocks.paths, blocks.layers[0][:3], slots)

    assert [bool(slots.pool.slot(n).any()) for n in range(4)] == [True, True, True, False]
    assert slots.take() == 3


def test_failed_reads_give_their_slots_back(demo_file, slots):
    beyond = Extent(2**40, PAGE)
    with pytest.raises(StorageError) as caught:
        read_extents(
            Way("threads", 2), [demo_file], [*blocks_of(demo_file).layers[0], beyond], slots
        )

    assert caught.value.code == "short-read"
    assert sorted(slots.take() for _ in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("slot_bytes", "available", "n_slots"),
    [
        (MIB, None, 320), (MIB, 2**40, 320), (7 * MIB // 2, 2**40, 91), (MIB, 400 * MIB, 100),
        (MIB, MIB, 8), (100 * MIB, 2**40, 8),
    ],
)  # fmt: skip
def test_pool_is_larger_than_caches_if_memory_allows(slot_bytes, available, n_slots):
    assert plan_slots(slot_bytes, 8, available) == n_slots


def test_reads_past_the_throttles_group_are_noticed():
    rows = summarise(
        [
            reading("uring", 0.1, charged_bytes=0),
            reading("aio", 0.1, charged_bytes=10**8),
            reading("tmpfs", 9),
        ]
    )

    assert check_rows(rows) == check_rows(rows, throttle=10**9)[:-1]
    assert check_rows(rows, throttle=10**9)[-1].startswith(
        "NOT CHARGED: the kernel did not charge what uring read"
    )


def test_what_no_group_could_be_charged_with_did_not_go_past_it():
    rows = summarise([reading("uring", 0.1), reading("aio", 0.1, disk_bytes=0, charged_bytes=0)])

    assert [row.charged for row in rows] == [None, None]
    assert not any("NOT CHARGED" in note for note in check_rows(rows, throttle=10**9))


def test_version_2_throttle_sends_the_process_home(tmp_path):
    file = disk_root(tmp_path, "0::/user/session\n")
    top = tmp_path / "sys/fs/cgroup"
    (top / "user/session").mkdir(parents=True)
    (top / "cgroup.controllers").write_text("io memory")

    with throttled(file, 10**6, tmp_path) as told:
        group = next(p for p in top.iterdir() if p.name.startswith("colibri-io"))
        assert (group / "io.max").read_text() == "8:0 rbps=1000000"
        assert told.how == "io.max of 8:0"
        (group / "io.stat").write_text("9:0 rbytes=7\n7:1 7:0 8:0 rbytes=4096 wbytes=0 rios=1\n")
        assert told.charged_bytes() == 4096
    assert (top / "user/session/cgroup.procs").read_text() == str(os.getpid())


def disk_root(tmp_path, controllers):
    file = tmp_path / "model"
    file.write_text("x")
    number = file.stat().st_dev
    disk = tmp_path / "sys/dev/block" / f"{os.major(number)}:{os.minor(number)}"
    (disk / "queue").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(controllers)
    return file


def test_throttle_of_version_1_holds_the_whole_disk(tmp_path):
    file = disk_root(tmp_path, "7:blkio:/\n")
    (tmp_path / "sys/fs/cgroup/blkio").mkdir(parents=True)

    with throttled(file, 10**6, tmp_path) as limit:
        group = next(p for p in (tmp_path / "sys/fs/cgroup/blkio").iterdir() if p.is_dir())
        assert (group / "blkio.throttle.read_bps_device").read_text() == "8:0 1000000"
        assert limit.charged_bytes() is None
        counts = "9:0 Read 7\n8:0 Read 4096\n8:0 Write 0\n8:0 Total 4096\n"
        (group / "blkio.throttle.io_service_bytes").write_text(counts)
        assert limit.charged_bytes() == 4096


def test_throttle_without_a_controller_is_refused(tmp_path):
    file = disk_root(tmp_path, "0::/\n")

    with pytest.raises(StorageError) as caught, throttled(file, 10**6, tmp_path):
        pass

    assert caught.value.code == "no-cgroup"


def test_throttle_that_the_kernel_refuses_leaves_no_group(tmp_path, monkeypatch):
    file = disk_root(tmp_path, "7:blkio:/\n")
    parent = tmp_path / "sys/fs/cgroup/blkio"
    parent.mkdir(parents=True)
    real = Path.write_text

    def refuse(self, text, *arguments, **options):
        if self.name.startswith("blkio."):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(self, text, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(StorageError) as caught, throttled(file, 10**6, tmp_path):
        pass

    assert caught.value.code == "no-cgroup"
    assert not [p for p in parent.iterdir() if p.is_dir()]


def run_io(monkeypatch, *options):
    # The page cache of the machine is no test's to empty.
    state = CacheState(False, "not dropped")
    monkeypatch.setattr("colibri_bench.io_bench.drop_caches", lambda *files: state)
    monkeypatch.setattr("colibri_bench.memory_rate._BYTES", 2**20)
    monkeypatch.setattr("colibri_bench.io_slots.POOL_BYTES", 2**22)
    return main(["io", *map(str, options)])


def test_command_reads_a_made_up_file(tmp_path, capsys, monkeypatch):
    options = ["--synthetic", "8M", "--folder", tmp_path, "--sizes", "256K", "--quick"]
    engines = ["--engines", "mmap,buffered,threads", "--out", tmp_path / "out"]

    assert run_io(monkeypatch, *options, *engines) == 0

    out = capsys.readouterr().out
    assert "not dropped" in out
    record = json.loads((tmp_path / "out/io.json").read_text())
    assert {row["engine"] for row in record["rows"]} == {"mmap", "buffered", "threads"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (Terminated(signal.SIGTERM), 143)]
)
def test_interrupted_command_keeps_what_it_has(error, status, tmp_path, capsys, monkeypatch):
    n_calls = 0

    def interrupted(*arguments):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 4:
            raise error
        return read_extents(*arguments)

    monkeypatch.setattr("colibri_bench.io_bench.read_extents", interrupted)
    options = ["--synthetic", "8M", "--folder", tmp_path, "--sizes", "256K", "--quick"]
    options += ["--engines", "buffered,threads", "--out", tmp_path / "out"]

    assert run_io(monkeypatch, *options) == status

    assert "interrupted after 1 of 10: what there is" in capsys.readouterr().err
    results = load_results(tmp_path / "out/io.json")
    assert not results.is_complete
    assert [row["engine"] for row in results.rows] == ["buffered", "buffered", "threads"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_command_reads_the_blocks_of_a_model(demo_file, capsys, monkeypatch):
    assert run_io(monkeypatch, demo_file, "--quick", "--engines", "buffered") == 0
    assert "NOT COLD: less than half of what buffered read" in capsys.readouterr().out


def test_command_reads_striped_models(tmp_path, capsys, monkeypatch, demo_file):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with demo_gguf() as source:
        repack(source, tmp_path / "m.colibri", volumes=folders)

    named = [option for folder in folders for option in ("--volume", folder)]

    options = ["--quick", "--engines", "threads", *named]
    assert run_io(monkeypatch, tmp_path / "m.colibri", *options) == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--engines", "sqpoll"], "bad-option"), (["--sizes", "x"], "bad-sizes")],
)
def test_command_refuses_what_cannot_be_measured(options, code, tmp_path, capsys, monkeypatch):
    options = ["--synthetic", "1M", "--folder", tmp_path, *options]

    assert run_io(monkeypatch, *options) == 2
    assert f"error[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--depths=0", "--depths=x", "--rounds=0", "--bytes=0"])
def test_command_line_is_checked(option, capsys):
    with pytest.raises(SystemExit):
        _parser().parse_args([option])

    assert "error" in capsys.readouterr().err
