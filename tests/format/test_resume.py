"""Whatever step a writer is stopped at, the next one ends with the same bytes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format as cf
from colibri_format.checkpoints import Checkpoints
from colibri_format.journal import (
    ItemKind,
    Journal,
    JournalRecord,
    journal_path,
    read_journal,
)
from colibri_format.output import OutputFile
from colibri_format.page_memory import page_memory
from colibri_format.write_behind import WriteBehind
from helpers.crash import CrashingDisk
from helpers.forge import code_of, fill, sample_plan, write_sample

FACTS = {"source": "m.gguf", "option quant": "keep", "input 0": "inode 7"}
NAME = "a.colibri"


def resume(**changes: Any) -> cf.Resume:
    return cf.Resume(**{"facts": FACTS, "every_bytes": 8192, "every_seconds": 1e9} | changes)


def go_on(folder: Path, plan: cf.FilePlan, *, overwrite: bool = False, **changes: Any) -> cf.Writer:
    """Writes whatever is not written yet; the number of items that were not is `n_written`."""
    folders = [folder / volume.label for volume in plan.volumes]
    for volume_folder in folders:
        volume_folder.mkdir(exist_ok=True)
    writer = cf.Writer(
        folder / NAME,
        plan,
        volume_folders=folders,
        resume=resume(**changes),
        buffer_bytes=4096,
        overwrite=overwrite,
    )
    with writer:
        writer.n_written = fill_missing(writer)  # type: ignore[attr-defined]
    return writer


def fill_missing(writer: cf.Writer) -> int:
    rng = np.random.default_rng(0)
    plan, n = writer.plan, 0
    for layer, expert in np.argwhere(plan.index["size"] != 0).tolist():
        layout = plan.layout(layer, expert)
        assert layout is not None
        payload = rng.bytes(sum(segment.size for segment in layout.segments))
        if not writer.has_block(layer, expert):
            writer.write_block(layer, expert, payload)
            n += 1
    for tensor in plan.tensors:
        data = rng.bytes(tensor.size)
        if not writer.has_tensor(tensor.name):
            writer.write_tensor(tensor.name, data)
            n += 1
    for file in plan.files:
        data = rng.bytes(file.size)
        if not writer.has_file(file.name):
            writer.write_file(file.name, data)
            n += 1
    return n


def content(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


PLANS: dict[str, dict[str, Any]] = {"one file": {}, "volumes": {"volumes": ["one", "two"]}}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> cf.FilePlan:
    return sample_plan(**PLANS[request.param])


@pytest.fixture
def expected(tmp_path: Path, plan: cf.FilePlan) -> Iterator[dict[str, bytes]]:
    folder = tmp_path / "expected"
    folder.mkdir()
    go_on(folder, plan)
    yield content(folder)


def count_steps(folder: Path, plan: cf.FilePlan, overwrite: bool) -> int:
    folder.mkdir()
    disk = CrashingDisk(None)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        go_on(folder, plan, overwrite=overwrite)
    return disk.n_steps


@pytest.mark.parametrize(("overwrite", "has_power"), [(False, True), (True, False)])
def test_stopped_at_any_step_it_goes_on_to_the_same_bytes(
    tmp_path: Path, plan: cf.FilePlan, expected: dict[str, bytes], overwrite: bool, has_power: bool
) -> None:
    n_steps = count_steps(tmp_path / "steps", plan, overwrite)
    n_items = plan.n_blocks + len(plan.tensors) + len(plan.files)
    n_resumed = 0
    for crash_at in range(n_steps):
        folder = tmp_path / f"{crash_at}"
        folder.mkdir()
        if overwrite:
            (folder / NAME).write_bytes(b"old")
        disk = CrashingDisk(crash_at)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            with contextlib.suppress(OSError):
                go_on(folder, plan, overwrite=overwrite)
            if not has_power:
                disk.lose_power([folder, *(folder / v.label for v in plan.volumes)], crash_at)

        shown = folder / NAME
        if shown.exists() and shown.read_bytes() != b"old":
            assert shown.read_bytes() == expected[NAME], crash_at
        if content(folder) != expected:
            with pytest.MonkeyPatch.context() as patch:
                CrashingDisk(None).install(patch)
                writer = go_on(folder, plan, overwrite=overwrite)
            n_resumed += writer.n_written < n_items  # type: ignore[attr-defined]
        assert content(folder) == expected, crash_at
    assert n_resumed > n_steps // 3


def stop_after(folder: Path, plan: cf.FilePlan, n_blocks: int = 5, **changes: Any) -> None:
    """Leaves unfinished work with some blocks in it."""
    with (
        pytest.raises(KeyboardInterrupt),
        cf.Writer(folder / NAME, plan, resume=resume(**changes), buffer_bytes=4096) as writer,
    ):
        rng = np.random.default_rng(0)
        for layer, expert in np.argwhere(plan.index["size"] != 0).tolist()[:n_blocks]:
            layout = plan.layout(layer, expert)
            assert layout is not None
            payload = rng.bytes(sum(segment.size for segment in layout.segments))
            writer.write_block(layer, expert, payload)
        raise KeyboardInterrupt


def test_interrupt_keeps_what_was_written_and_says_so(tmp_path: Path) -> None:
    plan = sample_plan()
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        cf.Writer(tmp_path / NAME, plan, resume=resume()) as writer,
    ):
        writer.write_tensor("blk.1.norm", bytes(60))
        raise KeyboardInterrupt

    assert "1 of " in caught.value.__notes__[0]
    assert "--restart" in caught.value.__notes__[0]
    assert sorted(content(tmp_path)) == [f"{NAME}.part", f"{NAME}.part.journal"]


def test_nothing_is_kept_when_nothing_was_written(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        cf.Writer(tmp_path / NAME, sample_plan(), resume=resume()),
    ):
        raise KeyboardInterrupt

    assert content(tmp_path) == {}


def test_abandoned_work_is_removed(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError),
        cf.Writer(tmp_path / NAME, sample_plan(), resume=resume()) as writer,
    ):
        writer.write_tensor("blk.1.norm", bytes(60))
        writer.abandon()
        raise ValueError

    assert content(tmp_path) == {}


@pytest.mark.parametrize(
    "facts",
    [FACTS | {"option quant": "q8_0"}, {"source": "m.gguf"}, FACTS | {"input 0": "inode 8"}],
)
def test_work_of_other_facts_is_refused_and_kept(tmp_path: Path, facts: dict[str, str]) -> None:
    stop_after(tmp_path, sample_plan())
    before = content(tmp_path)

    with pytest.raises(cf.StorageError, match=r"then, .* now") as caught:
        go_on(tmp_path, sample_plan(), facts=facts)

    assert caught.value.code == "unfinished-differs"
    assert content(tmp_path) == before


def test_work_of_another_plan_is_refused(tmp_path: Path) -> None:
    stop_after(tmp_path, sample_plan())

    assert code_of(lambda: go_on(tmp_path, sample_plan(alignment=8192))) == "unfinished-differs"


def test_trusted_facts_may_differ_and_are_then_the_new_ones(tmp_path: Path) -> None:
    plan = sample_plan()
    stop_after(tmp_path, plan)
    moved = FACTS | {"input 0": "inode 8"}

    stop_after_go_on = go_on(tmp_path, plan, facts=moved, trusted="input ")

    assert stop_after_go_on.n_written == 9 + len(plan.tensors) + len(plan.files) - 5  # type: ignore[attr-defined]


def test_restart_gives_up_what_was_done(tmp_path: Path) -> None:
    plan = sample_plan()
    stop_after(tmp_path, plan)

    writer = go_on(tmp_path, plan, facts={"other": "facts"}, restart=True)

    assert writer.n_written == 9 + len(plan.tensors) + len(plan.files)  # type: ignore[attr-defined]
    assert list(content(tmp_path)) == [NAME]


def test_writer_that_keeps_no_journal_leaves_unfinished_work_alone(tmp_path: Path) -> None:
    stop_after(tmp_path, sample_plan())
    before = content(tmp_path)

    assert code_of(lambda: write_sample(tmp_path / NAME)) == "part-exists"
    assert content(tmp_path) == before


def test_second_writer_is_refused_while_one_goes_on(tmp_path: Path) -> None:
    plan = sample_plan()
    stop_after(tmp_path, plan)

    with cf.Writer(tmp_path / NAME, plan, resume=resume()) as writer:
        assert code_of(lambda: go_on(tmp_path, plan)) == "output-busy"
        fill_missing(writer)

    assert list(content(tmp_path)) == [NAME]


@pytest.mark.parametrize("place", [0, 9, 20, 40])
def test_damaged_head_of_a_journal_begins_anew_and_is_noted(tmp_path: Path, place: int) -> None:
    plan = sample_plan()
    stop_after(tmp_path, plan)
    journal = tmp_path / f"{NAME}.part.journal"
    data = bytearray(journal.read_bytes())
    data[place] ^= 1
    journal.write_bytes(data)

    if place == 0:
        assert code_of(lambda: go_on(tmp_path, plan)) == "not-a-journal"
        return
    if place == 9:  # the version
        assert code_of(lambda: go_on(tmp_path, plan)) == "unfinished-differs"
        return
    writer = go_on(tmp_path, plan)
    assert "damaged" in writer.notes[0]
    assert writer.n_written == 9 + len(plan.tensors) + len(plan.files)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["empty", "zero", "short", "cut", "missing"])
def test_journal_that_says_nothing_begins_anew(tmp_path: Path, kind: str) -> None:
    plan = sample_plan()
    stop_after(tmp_path, plan)
    journal = tmp_path / f"{NAME}.part.journal"
    data = journal.read_bytes()
    if kind == "missing":
        journal.unlink()
    else:
        made = {"empty": b"", "zero": bytes(9000), "short": data[:12], "cut": data[:100]}[kind]
        journal.write_bytes(made)

    go_on(tmp_path, plan)

    assert list(content(tmp_path)) == [NAME]


@pytest.mark.parametrize("kind", ["text", "folder", "link", "pipe"])
def test_file_of_another_kind_in_the_journals_place_is_refused(tmp_path: Path, kind: str) -> None:
    journal = tmp_path / f"{NAME}.part.journal"
    if kind == "text":
        journal.write_text("dear diary")
    elif kind == "folder":
        journal.mkdir()
    elif kind == "link":
        journal.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(journal)

    assert code_of(lambda: go_on(tmp_path, sample_plan())) == "not-a-journal"


def test_records_end_at_the_first_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "j"
    records = [JournalRecord(ItemKind.BLOCK, 0, n, 99 + n, n) for n in range(5)]
    Journal(path, FACTS, records, 8).close()
    data = bytearray(path.read_bytes())
    data[4096 + 3 * 32 + 5] ^= 1
    path.write_bytes(data)

    found = read_journal(path)

    assert found is not None
    assert found.records == tuple(records[:3])
    assert found.facts == FACTS


def test_records_of_another_journal_do_not_pass(tmp_path: Path) -> None:
    records = [JournalRecord(ItemKind.BLOCK, 0, n, 99 + n, n) for n in range(5)]
    Journal(tmp_path / "a", FACTS, records, 8).close()
    Journal(tmp_path / "b", {"other": "facts"}, (), 8).close()
    data = (tmp_path / "b").read_bytes()[:4096] + (tmp_path / "a").read_bytes()[4096:]
    (tmp_path / "b").write_bytes(data)

    found = read_journal(tmp_path / "b")

    assert found is not None
    assert found.records == ()


def test_data_that_is_not_what_the_journal_says_is_written_again(tmp_path: Path) -> None:
    plan = sample_plan()
    stop_after(tmp_path, plan, every_bytes=10**9)
    offset = int(plan.index["offset"][0, 1])
    with (tmp_path / f"{NAME}.part").open("r+b") as file:
        file.seek(offset)
        file.write(b"lost")

    writer = go_on(tmp_path, plan)

    assert "1 of 5 items" in writer.notes[0]
    write_sample(tmp_path / "b.colibri", plan)
    assert (tmp_path / NAME).read_bytes() == (tmp_path / "b.colibri").read_bytes()


@pytest.mark.parametrize("lost", ["part", "volume"])
def test_unfinished_file_that_is_gone_begins_anew(tmp_path: Path, lost: str) -> None:
    plan = sample_plan(volumes=["one"] if lost == "volume" else [])
    stop_after(tmp_path, plan)
    part = tmp_path / ("a.one.colibri-volume.part" if lost == "volume" else f"{NAME}.part")
    part.unlink()

    with cf.Writer(tmp_path / NAME, plan, resume=resume()) as writer:
        fill_missing(writer)

    assert not any(name.endswith((".part", ".journal")) for name in content(tmp_path))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_that_is_full_or_fails_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    plan = sample_plan()
    real = os.pwrite
    limit = int(plan.index["offset"][2, 1])

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if offset >= limit:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(cf.StorageError) as caught:
        go_on(tmp_path, plan)
    monkeypatch.undo()

    assert caught.value.code == ("disk-full" if code == errno.ENOSPC else "io-error")
    assert "are kept" in caught.value.__notes__[0]
    assert not (tmp_path / NAME).exists()
    n_items = plan.n_blocks + len(plan.tensors) + len(plan.files)
    assert go_on(tmp_path, plan).n_written < n_items  # type: ignore[attr-defined]


def test_failed_sync_is_told_and_never_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sample_plan()
    real, calls = os.fdatasync, []

    def fdatasync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name.endswith(".part"):
            calls.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(cf.StorageError) as caught:
        go_on(tmp_path, plan)

    assert caught.value.code == "io-error"
    assert len(calls) == 1
    assert content(tmp_path) == {}


def test_items_are_entered_when_enough_came_or_enough_time_passed(tmp_path: Path) -> None:
    for every_bytes, seconds, n_syncs in ((1, 0.0, 1), (10**9, 0.0, 0), (10**9, 9.0, 1)):
        now = [0.0]
        entered: list[int] = []

        class FakeJournal:
            def append(self, records: list[JournalRecord]) -> None:
                entered.append(len(records))  # noqa: B023

        class FakeOutput:
            accepted_bytes = written_bytes = 100

            def sync(self) -> None:
                pass

        output: Any = FakeOutput()
        journal: Any = FakeJournal()
        checkpoints = Checkpoints(
            journal,
            [output],
            resume(every_bytes=every_bytes, every_seconds=5.0),
            clock=lambda: now[0],  # noqa: B023
        )
        now[0] = seconds
        checkpoints.add(ItemKind.BLOCK, 0, 0, 1, output)
        checkpoints.close()

        assert len(entered) == n_syncs


def test_file_system_without_direct_writes_gets_buffered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        flags = int(
            (Path("/proc/self/fdinfo") / str(fd)).read_text().split("flags:")[1].split()[0], 8
        )
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with cf.Writer(tmp_path / NAME, sample_plan()) as writer:
        fill(writer)

    assert writer.io_mode[0] == "buffered"
    assert "Invalid argument" in writer.io_mode[1]
    with cf.open(tmp_path / NAME) as file:
        assert file.verify() == []


def test_bytes_in_any_order_and_of_any_length_end_where_they_belong(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    expected = bytearray(200_000)
    path = tmp_path / "x"
    path.write_bytes(expected)
    fd = os.open(path, os.O_RDWR)
    behind = WriteBehind(fd, path, buffer_bytes=8192)
    places = np.sort(rng.choice(200_000, 120, replace=False))
    runs = list(zip(places[:-1].tolist(), places[1:].tolist(), strict=True))
    rng.shuffle(runs)
    for start, stop in runs:
        data = rng.bytes(stop - start)
        expected[start:stop] = data
        behind.put(start, data)
    behind.flush()
    behind.close()
    os.close(fd)

    assert path.read_bytes() == expected
    assert behind.written_bytes == behind.accepted_bytes == places[-1] - places[0]


def test_journal_stands_beside_the_unfinished_file() -> None:
    assert journal_path(Path("/a/m.colibri")) == Path("/a/m.colibri.part.journal")


def publishing(folder: Path, plan: cf.FilePlan) -> list[Path]:
    """Work that was stopped when all files were whole and none had its name; those files."""

    def stop(output: OutputFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputFile, "publish", stop)
        with contextlib.suppress(OSError):
            go_on(folder, plan)
    return [folder / path for path in content(folder) if path.endswith(".part")]


def test_whole_files_of_which_one_is_away_are_kept_until_restart(tmp_path: Path) -> None:
    plan = sample_plan(volumes=["one", "two"])
    parts = publishing(tmp_path, plan)
    away = next(path for path in parts if "one" in path.parts)
    moved = away.rename(tmp_path / "away")

    assert code_of(lambda: go_on(tmp_path, plan)) == "part-missing"
    assert all(path.exists() for path in parts if path != away)
    moved.rename(away)
    assert go_on(tmp_path, plan).n_written == 0  # type: ignore[attr-defined]


def test_restart_gives_up_files_that_are_whole(tmp_path: Path) -> None:
    plan = sample_plan(volumes=["one", "two"])
    away = next(path for path in publishing(tmp_path, plan) if "two" in path.parts)
    away.unlink()

    writer = go_on(tmp_path, plan, restart=True)

    assert writer.n_written == plan.n_blocks + len(plan.tensors) + len(plan.files)  # type: ignore[attr-defined]
    assert not any(path.endswith((".part", ".journal")) for path in content(tmp_path))


def test_what_is_begun_anew_without_a_journal_or_a_file_is_noted(tmp_path: Path) -> None:
    plan = sample_plan()
    for lost, word in ((f"{NAME}.part.journal", "no journal"), (f"{NAME}.part", "is gone")):
        folder = tmp_path / lost
        folder.mkdir()
        stop_after(folder, plan)
        (folder / lost).unlink()

        assert word in go_on(folder, plan).notes[0]


def test_a_thread_that_cannot_be_started_is_told_as_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(MemoryError, match="thread"):
        go_on(tmp_path, sample_plan())


def test_pages_that_the_system_does_not_give_are_told_as_want_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("colibri_format.page_memory.mmap.mmap", refuse)

    for size in (4096, 8 * 2**20):
        with pytest.raises(MemoryError, match=f"{size}|bytes"):
            page_memory(size)
