"""Any single damage to head or tail is restored in place; two that meet are refused."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

import colibri_format as cf
from helpers.forge import Forge, code_of, region_extents, sample_plan, write_sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.colibri"
    write_sample(path)
    return path


def places(path: Path) -> list[tuple[int, int]]:
    """Every page and region copy: offset and length."""
    with cf.open(path) as file:
        found = [(offset, length) for _, offset, length in region_extents(file.superblock)]
        return [(0, 4096), *found, (file.file_size - 4096, 4096)]


def hit(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 0xFF
    path.write_bytes(data)


def test_any_single_damage_is_restored_to_the_bit(path: Path) -> None:
    sound = path.read_bytes()

    for offset, length in places(path):
        for place in (offset, offset + length - 1):
            hit(path, place)
            (restored,) = cf.repair(path)
            assert restored.offset == offset
            assert path.read_bytes() == sound
    assert cf.repair(path) == []


def test_all_of_head_or_all_of_tail_is_restored(path: Path) -> None:
    sound = path.read_bytes()
    every = places(path)
    half = len(every) // 2
    heads = [offset for offset, _ in every if offset < len(sound) // 2]
    tails = [offset for offset, _ in every if offset > len(sound) // 2]
    assert len(heads) == len(tails) == half

    for offsets in (heads, tails):
        hit(path, *offsets)
        assert len(cf.repair(path)) == half
        assert path.read_bytes() == sound


def test_dry_run_writes_nothing(path: Path) -> None:
    hit(path, 100)
    broken = path.read_bytes()

    (restored,) = cf.repair(path, is_dry_run=True)

    assert restored.place == "superblock at the start"
    assert path.read_bytes() == broken


def test_data_is_never_touched(path: Path) -> None:
    with cf.open(path) as file:
        place = file.expert(0, 0).offset
    hit(path, 50, place)

    cf.repair(path)

    with cf.open(path) as file:
        (found,) = file.verify()
        assert (found.code, found.offset) == ("block-checksum", place)


def test_two_bad_copies_are_refused_and_the_loss_is_said(path: Path) -> None:
    with cf.open(path) as file:
        pair = [offset for _, offset, _ in region_extents(file.superblock)][:2]
    hit(path, *pair)
    broken = path.read_bytes()

    with pytest.raises(cf.FormatError) as caught:
        cf.repair(path)

    assert caught.value.code == "region-checksum"
    assert "where the experts stand" in cf.describe_loss(caught.value)
    assert path.read_bytes() == broken


def test_unknown_ro_compat_feature_forbids_repair(path: Path) -> None:
    forge = Forge(path.read_bytes())
    forge.set_superblock(dataclasses.replace(forge.superblock, ro_compat=1)).write(path)
    hit(path, 5000)

    assert code_of(lambda: cf.repair(path)) == "unknown-ro-compat"


def test_interrupted_repair_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = path.read_bytes()
    heads = [offset for offset, _ in places(path) if offset < len(sound) // 2]
    real = os.fsync
    for stop in range(1, len(heads) + 1):
        hit(path, *heads)
        calls: list[int] = []

        def fail(fd: int, calls: list[int] = calls, stop: int = stop) -> None:
            calls.append(fd)
            if len(calls) == stop:
                raise OSError(5, "gone")
            real(fd)

        monkeypatch.setattr(os, "fsync", fail)
        assert code_of(lambda: cf.repair(path)) == "io-error"
        monkeypatch.setattr(os, "fsync", real)
        cf.repair(path)
        assert path.read_bytes() == sound


def test_locked_file_is_not_repaired(path: Path) -> None:
    hit(path, 50)
    with path.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        assert code_of(lambda: cf.repair(path)) == "output-busy"


def test_diff_names_what_differs(tmp_path: Path) -> None:
    def write(name: str, seed: int = 0, **changes: Any) -> cf.Reader:
        write_sample(tmp_path / name, sample_plan(**changes), seed)
        return cf.open(tmp_path / name)

    with (
        write("a") as a,
        write("b") as b,
        write("c", seed=1) as c,
        write("d", metadata={"tool": "other"}, alignment=8192) as d,
        write("e", tensors=[], files=[]) as e,
    ):
        assert cf.diff_files(a, b) == []
        kinds = {d.kind for d in cf.diff_files(a, c)}
        assert kinds == {"tensor", "file", "blocks"}
        found = {(x.kind, x.what): (x.first, x.second) for x in cf.diff_files(a, d)}
        assert found["geometry", "alignment"] == (4096, 8192)
        assert found["metadata", "tool"] == ('"vectors"', '"other"')
        assert found["metadata", "source"] == ('["é", 1, true, null]', None)
        assert not any(kind == "blocks" for kind, _ in found)
        missing = [x for x in cf.diff_files(a, e) if x.kind == "tensor"]
        assert len(missing) == 4
        assert all(x.second is None for x in missing)


def test_diff_tells_layouts_and_experts_by_layer(tmp_path: Path) -> None:
    a = tmp_path / "a.colibri"
    b = tmp_path / "b.colibri"
    layouts = sample_plan().layouts
    write_sample(a)
    write_sample(b, sample_plan(layer_layouts=[layouts[1], None, layouts[1]]))

    with cf.open(a) as first, cf.open(b) as second:
        (layout,) = [x for x in cf.diff_files(first, second) if x.kind == "layout"]

    assert layout.what == "layers 0"
    assert "q8_0" in layout.first
    assert "f16" in layout.second


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"a": 1}, {"a": True}, "a"),
        ({"a": 0}, {"a": False}, "a"),
        ({"a": [1]}, {"a": [True]}, "a"),
        ({"a": {}}, {}, "a"),
        ({"a": None}, {}, "a"),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, "a.b.c"),
    ],
)
def test_diff_tells_values_apart_as_json_does(
    first: dict[str, Any], second: dict[str, Any], what: str, tmp_path: Path
) -> None:
    for name, metadata in (("a", first), ("b", second)):
        write_sample(tmp_path / name, sample_plan(metadata=metadata))

    with cf.open(tmp_path / "a") as a, cf.open(tmp_path / "b") as b:
        (found,) = cf.diff_files(a, b)

    assert found.what == what
    assert found.first != found.second


def test_diff_tells_a_dotted_name_from_nested_ones(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", sample_plan(metadata={"a.b": 1}))
    write_sample(tmp_path / "b", sample_plan(metadata={"a": {"b": 1}}))

    with cf.open(tmp_path / "a") as a, cf.open(tmp_path / "b") as b:
        assert {x.what for x in cf.diff_files(a, b)} == {'"a.b"', "a"}
