"""A written file is complete under its name, or there is none."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format as cf
from helpers.forge import code_of, fill, layout_of, sample_plan, write_sample


def test_same_content_gives_same_bytes_and_other_content_another_uuid(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.colibri" for n in range(3)]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        write_sample(path, seed=seed)

    data = [path.read_bytes() for path in paths]

    assert data[0] == data[1]
    with cf.open(paths[0]) as first, cf.open(paths[2]) as other:
        assert first.uuid != other.uuid
        assert first.uuid.version == 8


def test_order_and_chunking_of_writes_do_not_show(tmp_path: Path) -> None:
    plan = sample_plan()
    write_sample(tmp_path / "a.colibri", plan)
    with cf.open(tmp_path / "a.colibri") as file, cf.Writer(tmp_path / "b.colibri", plan) as writer:
        for name in reversed(file.files):
            writer.write_file(name, file.read_file(name))
        for layer, expert in reversed(np.argwhere(file.index["size"] != 0).tolist()):
            block = file.expert(layer, expert).read()
            with writer.block(layer, expert) as sink:
                for segment in file.expert(layer, expert).segments:
                    for start in range(segment.offset, segment.offset + segment.size, 1000):
                        sink.write(block[start : min(start + 1000, segment.offset + segment.size)])
        for name in file.tensors:
            writer.write_tensor(name, file.tensor(name).read())

    assert (tmp_path / "a.colibri").read_bytes() == (tmp_path / "b.colibri").read_bytes()


def test_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"

    with pytest.raises(KeyboardInterrupt), cf.Writer(path, sample_plan()) as writer:
        writer.write_file("config.json", bytes(10))
        raise KeyboardInterrupt

    assert list(tmp_path.iterdir()) == []


def test_name_appears_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"

    with cf.Writer(path, sample_plan()) as writer:
        fill(writer)
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.colibri.part"]

    assert [entry.name for entry in tmp_path.iterdir()] == ["a.colibri"]
    assert writer.uuid


def test_existing_file_is_kept_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    path.write_bytes(b"precious")

    assert code_of(lambda: write_sample(path)) == "file-exists"
    assert path.read_bytes() == b"precious"
    with pytest.raises(ValueError), cf.Writer(path, sample_plan(), overwrite=True):
        raise ValueError
    assert path.read_bytes() == b"precious"
    with cf.Writer(path, sample_plan(), overwrite=True) as writer:
        fill(writer)
    cf.open(path).close()


def test_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"

    with pytest.raises(cf.StorageError) as caught, cf.Writer(path, sample_plan()) as writer:
        fill(writer)
        path.write_bytes(b"precious")

    assert caught.value.code == "file-exists"
    assert path.read_bytes() == b"precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.colibri"]


def test_stale_part_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.colibri.part").write_bytes(bytes(4096) + b"\xff" * 10_000_000)

    write_sample(tmp_path / "a.colibri")

    with cf.open(tmp_path / "a.colibri") as file:
        assert file.verify() == []


def test_second_writer_of_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    with (tmp_path / "a.colibri.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        assert code_of(lambda: write_sample(path)) == "output-busy"

    assert (tmp_path / "a.colibri.part").exists()


def test_devices_pipes_and_links_are_never_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "nowhere")

    def write(path: Path) -> str | None:
        def attempt() -> None:
            with cf.Writer(path, sample_plan(), overwrite=True) as writer:
                fill(writer)

        return code_of(attempt)

    assert write(pipe) == "not-a-file"
    assert write(Path("/dev/null")) == "not-a-file"
    assert write(Path()) == "is-a-directory"
    assert code_of(lambda: write_sample(link)) == "file-exists"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe"]


def test_part_file_that_leads_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    part = tmp_path / "a.colibri.part"

    for make in (
        lambda: part.symlink_to(precious),
        lambda: part.hardlink_to(precious),
        lambda: os.mkfifo(part),
        part.mkdir,
    ):
        make()
        assert code_of(lambda: write_sample(tmp_path / "a.colibri")) in (
            "not-a-file",
            "is-a-directory",
        )
        assert precious.read_bytes() == b"precious"
        part.rmdir() if part.is_dir() and not part.is_symlink() else part.unlink()


def test_writer_that_comes_between_open_and_lock_gets_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.colibri"
    first = cf.Writer(path, sample_plan(), overwrite=True).__enter__()
    written = fill(first)
    real = fcntl.flock
    calls: list[int] = []

    def lock(fd: int, operation: int) -> None:
        # The second writer has opened the unfinished file; now the first one finishes it.
        calls.append(fd)
        if len(calls) == 1:
            first.__exit__(None, None, None)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    with cf.Writer(path, sample_plan(), overwrite=True) as second:
        assert len(calls) == 2
        with cf.open(path) as file:
            assert file.read_file("config.json") == written["file config.json"]
            assert file.verify() == []
        fill(second, seed=1)

    with cf.open(path) as file:
        assert file.verify() == []


def test_part_file_of_someone_else_is_kept(tmp_path: Path) -> None:
    part = tmp_path / "a.colibri.part"
    part.write_bytes(b"half of a download")

    assert code_of(lambda: write_sample(tmp_path / "a.colibri")) == "part-exists"
    assert part.read_bytes() == b"half of a download"


def test_part_file_replaced_meanwhile_is_not_published(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"

    with pytest.raises(cf.StorageError) as caught, cf.Writer(path, sample_plan()) as writer:
        fill(writer)
        part = tmp_path / "a.colibri.part"
        part.unlink()
        part.write_bytes(b"other")

    assert caught.value.code == "output-replaced"
    assert not path.exists()
    assert part.read_bytes() == b"other"


def test_missing_folder_and_folder_as_output_are_named(tmp_path: Path) -> None:
    assert code_of(lambda: write_sample(tmp_path / "no" / "a.colibri")) == "file-not-found"
    assert code_of(lambda: write_sample(tmp_path)) == "is-a-directory"


def test_full_disk_leaves_nothing_and_keeps_errno(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)

    with pytest.raises(cf.StorageError) as caught:
        write_sample(tmp_path / "a.colibri")

    assert (caught.value.code, caught.value.errno) == ("disk-full", 28)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("skipped", ["L0/E1", "tensor blk.1.norm", "file empty.txt"])
def test_missing_part_is_named(skipped: str, tmp_path: Path) -> None:
    plan = sample_plan()
    source = tmp_path / "a.colibri"
    written = write_sample(source, plan)

    def incomplete() -> None:
        with cf.Writer(tmp_path / "b.colibri", plan) as writer:
            for name in written.keys() - {skipped}:
                kind, _, rest = name.partition(" ")
                if kind == "file":
                    writer.write_file(rest, written[name])
                elif kind == "tensor":
                    writer.write_tensor(rest, written[name])
                else:
                    layer, expert = kind[1:].split("/E")
                    writer.write_block(int(layer), int(expert), written[name])

    with pytest.raises(cf.UsageError) as caught:
        incomplete()

    assert caught.value.code == "not-written"
    assert skipped.rsplit(maxsplit=1)[-1] in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.colibri"]


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    def attempt(action: Any) -> str | None:
        def run() -> None:
            with cf.Writer(tmp_path / "a.colibri", sample_plan()) as writer:
                action(writer)

        return code_of(run)

    def twice(writer: cf.Writer) -> None:
        writer.write_file("empty.txt", b"")
        writer.write_file("empty.txt", b"")

    def block_twice(writer: cf.Writer) -> None:
        fill(writer)
        writer.write_block(0, 0, b"")

    def tensor_twice(writer: cf.Writer) -> None:
        fill(writer)
        writer.write_tensor("blk.1.norm", bytes(60))

    assert attempt(twice) == "written-twice"
    assert attempt(block_twice) == "written-twice"
    assert attempt(tensor_twice) == "written-twice"
    assert attempt(lambda w: w.write_block(1, 0, b"")) == "no-such-expert"
    assert attempt(lambda w: w.write_block(9, 0, b"")) == "no-such-expert"
    assert attempt(lambda w: w.write_block(2, 3, b"")) == "no-such-expert"
    assert attempt(lambda w: w.write_tensor("x", b"")) == "no-such-tensor"
    assert attempt(lambda w: w.write_file("x", b"")) == "no-such-file"
    assert attempt(lambda w: w.write_block(0, 0, bytes(7))) == "bad-length"
    assert attempt(lambda w: w.write_file("config.json", bytes(11))) == "bad-length"
    assert attempt(lambda w: w.uuid) == "not-written"


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("bad-geometry", {"n_layers": 0}),
        ("bad-alignment", {"alignment": 4095}),
        ("bad-alignment", {"alignment": 2048}),
        ("bad-alignment", {"alignment": 2**22}),
        ("bad-plan", {"layer_layouts": [None]}),
        ("bad-plan", {"present": np.ones((3, 4), np.bool_)}),
        ("bad-plan", {"present": np.ones((3, 5), np.bool_)}),
        ("bad-plan", {"block_order": np.tile(np.arange(4), (3, 1))}),
        ("bad-plan", {"block_order": np.zeros((3, 5), np.int64)}),
        ("bad-plan", {"tensors": [cf.TensorSpec("a", cf.DTYPES["f32"], (2,), 3)]}),
        ("bad-plan", {"tensors": [cf.TensorSpec("a", cf.DTYPES["f32"], (1,) * 5)]}),
        ("bad-name", {"tensors": [cf.TensorSpec("", cf.DTYPES["f32"], (2,))]}),
        ("bad-name", {"tensors": [cf.TensorSpec("a\n", cf.DTYPES["f32"], (2,))]}),
        ("bad-name", {"tensors": [cf.TensorSpec("a" * 256, cf.DTYPES["f32"], (2,))]}),
        ("bad-name", {"tensors": [cf.TensorSpec("a", cf.DTYPES["f32"], (2,))] * 2}),
        ("bad-name", {"files": [cf.FileSpec("../x", 1)]}),
        ("bad-name", {"files": [cf.FileSpec("\ud800", 1)]}),
        ("bad-interleave", {"tensors": [cf.TensorSpec("a", cf.DTYPES["q8_0"], (8, 32), None, 16)]}),
        ("bad-metadata", {"metadata": {"a": 1.5}}),
        ("bad-metadata", {"metadata": {"a": 2**60}}),
        ("bad-metadata", {"metadata": {1: "a"}}),
        ("bad-metadata", {"metadata": {"a": "\ud800"}}),
    ],
)
def test_plan_refuses(code: str, changes: dict[str, Any]) -> None:
    assert code_of(lambda: sample_plan(**changes)) == code


def test_plan_refuses_layout_of_foreign_make() -> None:
    layout = layout_of("f32", 8, 8)
    moved = cf.Layout(layout.segments, layout.block_size + 1)
    empty = cf.Layout((), 0)

    for bad in (moved, empty):
        assert (
            code_of(lambda bad=bad: cf.plan_layout(n_layers=1, n_experts=1, layer_layouts=[bad]))
            == "bad-plan"
        )


def test_plan_tells_padding_and_size_to_the_byte(tmp_path: Path) -> None:
    plan = sample_plan()
    write_sample(tmp_path / "a.colibri", plan)

    assert plan.file_size == (tmp_path / "a.colibri").stat().st_size
    padded = sum(-(-int(size) // 4096) * 4096 for size in plan.index["size"].ravel())
    payload = 5 * 3 * 64 * 96 // 32 * 34 + 4 * 3 * 64 * 96 * 2
    assert plan.padding_bytes == padded - payload
    assert plan.padding_share == pytest.approx((padded - payload) / padded)
    assert plan.index_bytes == 15 * 24
    assert plan.n_blocks == 9
