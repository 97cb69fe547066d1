"""Mixed layouts, and blocks striped over volume files that are recognised by content."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format as cf
from colibri_format.header import Incompat, Region
from helpers.forge import Forge, code_of, fill, layout_of, sample_plan, write_sample

A, B = layout_of("q8_0", 64, 96), layout_of("f16", 64, 96)


def mixed_plan(**changes: Any) -> cf.FilePlan:
    """Two layers of four experts; the second mixes two layouts and lacks an expert."""
    return sample_plan(
        **{
            "n_layers": 2,
            "n_experts": 4,
            "layer_layouts": [A, [B, None, A, B]],
            "present": None,
            "tensors": [],
            "files": [],
        }
        | changes
    )


def striped_plan(**changes: Any) -> cf.FilePlan:
    return sample_plan(**{"volumes": ["fast", "slow"]} | changes)


def write_striped(folder: Path, seed: int = 0) -> tuple[Path, dict[str, bytes]]:
    """A striped file in `folder`, its volumes in `folder/one` and `folder/two`."""
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
    path = folder / "model.colibri"
    with cf.Writer(path, striped_plan(), volume_folders=[folder / "one", folder / "two"]) as writer:
        written = fill(writer, seed)
    return path, written


def folders(path: Path) -> list[Path]:
    return [path.parent / "one", path.parent / "two"]


@pytest.mark.parametrize("volumes", [[], ["fast", "slow"]])
def test_blocks_stand_in_the_order_asked_for(tmp_path: Path, volumes: list[str]) -> None:
    order = np.array([[3, 1, 0, 2], [2, 3, 1, 0]])
    plan = mixed_plan(block_order=order, volumes=volumes)

    written = write_sample(tmp_path / "m.colibri", plan)

    with cf.open(tmp_path / "m.colibri") as file:
        for layer, experts in enumerate([[3, 1, 0, 2], [2, 3, 0]]):
            for volume in range(len(volumes) + 1):
                here = [e for e in experts if file.expert(layer, e).volume == volume]
                at = [file.expert(layer, expert).offset for expert in here]
                assert at == sorted(at)
            for expert in experts:
                block = file.expert(layer, expert)
                data = block.read()
                parts = [data[s.offset : s.offset + s.size].tobytes() for s in block.segments]
                assert b"".join(parts) == written[f"L{layer}/E{expert}"]
        assert file.verify() == []
    assert plan.file_size == mixed_plan(volumes=volumes).file_size


def test_experts_of_a_mixed_layer_have_their_own_layouts(tmp_path: Path) -> None:
    path = tmp_path / "mixed.colibri"
    written = write_sample(path, mixed_plan())

    with cf.open(path) as file:
        assert file.superblock.incompat == Incompat.MIXED_LAYOUTS
        assert file.is_mixed(1)
        assert not file.is_mixed(0)
        assert file.expert(1, 0).layout == file.expert(1, 3).layout == B
        assert file.expert(1, 2).layout == file.expert(0, 0).layout == A
        assert code_of(lambda: file.layout(1)) == "mixed-layer"
        assert code_of(lambda: file.expert(1, 1)) == "no-such-expert"
        block = file.expert(1, 3).read()
        payload = b"".join(block[s.offset :][: s.size].tobytes() for s in B.segments)
        assert payload == written["L1/E3"]
        assert file.verify() == []


def test_plan_without_need_sets_no_feature() -> None:
    assert sample_plan().incompat == 0
    assert mixed_plan(layer_layouts=[A, [A, None, A, A]]).incompat == 0
    assert mixed_plan().incompat == Incompat.MIXED_LAYOUTS
    assert striped_plan().incompat == Incompat.STRIPED
    assert code_of(lambda: mixed_plan().layout(1)) == "mixed-layer"


def test_mixed_layer_without_the_feature_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    write_sample(path)
    forge = Forge(path.read_bytes())
    forge.patch_region(Region.TABLES, forge.record_offset("layer", 0), b"\xfe\xff\xff\xff")

    assert code_of(lambda: cf.open(forge.write(path))) == "bad-layer"


def test_blocks_take_turns_over_volumes_and_come_back(tmp_path: Path) -> None:
    path, written = write_striped(tmp_path)

    with cf.open(path, volumes=folders(path)) as file:
        assert [v.label for v in file.volumes] == ["fast", "slow"]
        assert [file.expert(0, n).volume for n in range(5)] == [1, 2, 1, 2, 1]
        for layer, expert in np.argwhere(file.index["size"] != 0).tolist():
            handle = file.expert(layer, expert)
            block = handle.read()
            payload = b"".join(block[s.offset :][: s.size].tobytes() for s in handle.segments)
            assert payload == written[f"L{layer}/E{expert}"]
        assert file.verify() == []
        assert file.warnings == ()
        assert [p.parent.name for p in file.volume_paths] == ["one", "two"]


def test_volumes_are_found_beside_the_file_and_under_any_name(tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path)
    for n, folder in enumerate(folders(path)):
        (volume,) = folder.iterdir()
        volume.rename(tmp_path / f"renamed-{9 - n}.colibri-volume")

    with cf.open(path) as file:
        assert [p.name for p in file.volume_paths] == [
            "renamed-9.colibri-volume",
            "renamed-8.colibri-volume",
        ]
        assert file.verify() == []


def test_missing_volume_is_named(tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path)

    with pytest.raises(cf.FormatError) as caught:
        cf.open(path, volumes=folders(path)[:1])

    assert caught.value.code == "volume-missing"
    assert "volume 2 (slow)" in str(caught.value)
    assert code_of(lambda: cf.open(path, volumes=[tmp_path / "nowhere"])) == "file-not-found"


def test_file_opens_without_its_volumes_to_look_at(tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path)

    with cf.open(path, volumes=None) as file:
        assert file.index.shape == (3, 5)
        assert file.volume_paths == ()
        assert code_of(lambda: file.expert(0, 0).read()) == "no-such-volume"
        assert code_of(file.verify) == "no-such-volume"
        assert file.read_file("config.json")


def test_what_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path)
    os.mkfifo(tmp_path / "a.colibri-volume")
    (tmp_path / "b.colibri-volume").mkdir()
    (tmp_path / "c.colibri-volume").symlink_to("nowhere")
    (tmp_path / "d.colibri-volume").write_bytes(b"short")

    with cf.open(path, volumes=folders(path)) as file:
        assert len(file.volume_paths) == 2


def test_short_copy_of_a_volume_hides_no_whole_one(tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path)
    (volume,) = folders(path)[0].iterdir()
    (tmp_path / "copy.colibri-volume").write_bytes(volume.read_bytes()[:8192])

    with cf.open(path, volumes=folders(path)) as file:
        assert file.volume_paths[0] == volume
        assert file.verify() == []


def test_swapped_volume_is_named(tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path / "a", seed=1)
    other, _ = write_striped(tmp_path / "b", seed=2)
    (mine,) = folders(path)[1].iterdir()
    (foreign,) = folders(other)[1].iterdir()
    shutil.copy(foreign, mine)

    with pytest.raises(cf.FormatError) as caught:
        cf.open(path, volumes=folders(path))

    assert caught.value.code == "volume-mismatch"
    assert str(mine) in str(caught.value)


@pytest.mark.parametrize(("n_bytes", "code"), [(-4096, "truncated"), (4096, "trailing-bytes")])
def test_volume_of_wrong_size_is_refused(n_bytes: int, code: str, tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path)
    (volume,) = folders(path)[0].iterdir()
    os.truncate(volume, volume.stat().st_size + n_bytes)

    assert code_of(lambda: cf.open(path, volumes=folders(path))) == code


def test_damage_in_a_volume_is_found_and_its_pages_are_repaired(tmp_path: Path) -> None:
    path, _ = write_striped(tmp_path)
    (volume,) = folders(path)[1].iterdir()
    sound = volume.read_bytes()
    for place in (50, len(sound) - 60):
        broken = bytearray(sound)
        broken[place] ^= 1
        volume.write_bytes(broken)
        with cf.open(path, volumes=folders(path)) as file:
            assert len(file.warnings) == 1
            (found,) = file.verify()
            assert (found.code, found.volume) == ("superblock-checksum", 2)
        (restored,) = cf.repair(path, volumes=folders(path))
        assert restored.path == volume
        assert volume.read_bytes() == sound
    with cf.open(path, volumes=folders(path)) as file:
        place = file.expert(0, 1).offset + 9
    broken = bytearray(sound)
    broken[place] ^= 1
    volume.write_bytes(broken)
    with cf.open(path, volumes=folders(path)) as file:
        (found,) = file.verify()
        assert (found.code, found.layer, found.expert, found.volume) == ("block-checksum", 0, 1, 2)
        assert code_of(lambda: file.expert(0, 1).read()) == "block-checksum"


def test_volumes_without_the_feature_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    write_sample(path)
    forge = Forge(path.read_bytes())
    forge.patch_region(Region.TABLES, 20, struct.pack("<I", 1))

    assert code_of(lambda: cf.open(forge.write(path))) == "table-count"


def test_blocks_may_stay_in_the_file_itself(tmp_path: Path) -> None:
    chosen = np.zeros((3, 5), np.uint16)
    chosen[0, 2] = 1
    path = tmp_path / "a.colibri"
    write_sample(path, sample_plan(volumes=["v"], block_volumes=chosen))

    with cf.open(path) as file:
        assert [file.expert(0, n).volume for n in range(5)] == [0, 0, 1, 0, 0]
        assert file.verify() == []


def test_interrupted_writer_leaves_no_volume(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), cf.Writer(tmp_path / "a.colibri", striped_plan()):
        raise KeyboardInterrupt

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("bad-name", {"volumes": ["a/b"]}),
        ("bad-name", {"volumes": ["a", "a"]}),
        ("bad-plan", {"volumes": ["v"] + [str(n) for n in range(1024)]}),
        ("bad-plan", {"volumes": ["v"], "block_volumes": np.full((3, 5), 2, np.uint16)}),
        ("bad-plan", {"volumes": ["v"], "block_volumes": np.zeros((1, 5), np.uint16)}),
        ("bad-plan", {"layer_layouts": [A, None, [B]]}),
    ],
)
def test_plan_refuses_volumes_that_cannot_be(code: str, changes: dict[str, Any]) -> None:
    assert code_of(lambda: sample_plan(**changes)) == code


def test_writer_needs_a_folder_for_each_volume(tmp_path: Path) -> None:
    assert (
        code_of(
            lambda: cf.Writer(tmp_path / "a.colibri", striped_plan(), volume_folders=[tmp_path])
        )
        == "bad-volumes"
    )
