from __future__ import annotations

import json
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format
from colibri_format import DTYPES, ColibriError
from colibri_repack import VolumeFolder, cmd_repack, export, repack
from colibri_repack.cmd_diff import main as diff_main
from colibri_repack.cmd_export import main as export_main
from colibri_repack.cmd_inspect import main as inspect_main
from colibri_repack.cmd_repair import main as repair_main
from colibri_repack.cmd_verify import main as verify_main
from colibri_repack.striping import plan_volumes
from helpers.gguf_models import gguf_model
from helpers.quant_models import quant_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return gguf_model("qwen3moe").write(tmp_path / "in.gguf")


def code_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ColibriError) as caught:
        repack(*arguments, **options)
    return caught.value.code


def volumes_of(order: np.ndarray[Any, Any], *weights: int) -> list[list[int]]:
    return plan_volumes(order, np.ones(order.shape, np.bool_), weights).tolist()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if ".colibri" in path.name)


def test_blocks_are_dealt_in_turn_and_on_through_the_layers() -> None:
    order = np.tile(np.arange(3), (2, 1))

    assert volumes_of(order, 1, 1) == [[1, 2, 1], [2, 1, 2]]


def test_weights_are_shares_spread_evenly() -> None:
    (dealt,) = volumes_of(np.arange(12)[None], 1, 2)

    assert dealt == [2, 1, 2] * 4
    (uneven,) = volumes_of(np.arange(10)[None], 3, 1, 1)
    assert [uneven.count(n) for n in (1, 2, 3)] == [6, 2, 2]


def test_blocks_are_dealt_in_the_order_in_which_they_stand() -> None:
    assert volumes_of(np.array([[2, 0, 3, 1]]), 1, 1) == [[2, 2, 1, 1]]


def test_absent_experts_take_no_turn() -> None:
    present = np.array([[True, False, True, True]])

    assert plan_volumes(np.arange(4)[None], present, [1, 1]).tolist() == [[1, 0, 2, 1]]


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [("/a", "/a", 1), ("/a:2", "/a", 2), ("/a:b", "/a:b", 1), ("/a:2:1", "/a:2", 1),
     (":3", ":3", 1)],
)  # fmt: skip
def test_a_folder_may_have_a_weight(text: str, path: str, weight: int) -> None:
    assert VolumeFolder.parse(text) == VolumeFolder(Path(path), weight)


def test_every_command_works_on_a_striped_file(
    tmp_path: Path, source: Path, capsys: Capture
) -> None:
    output, a, b = tmp_path / "m.colibri", tmp_path / "a", tmp_path / "b"
    arguments = [str(source), str(output), "--volume", str(a), "--volume", f"{b}:2", "--json"]
    folders = ["--volume", str(a), "--volume", str(b)]

    assert cmd_repack.main([*arguments, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert leftovers(tmp_path) == []
    assert cmd_repack.main(arguments) == 0
    record = json.loads(capsys.readouterr().out)

    assert record["volume_sizes"] == planned["volume_sizes"]
    sizes = [next(folder.iterdir()).stat().st_size for folder in (a, b)]
    assert list(record["volume_sizes"].values()) == sizes
    assert leftovers(tmp_path) == ["m.1.colibri-volume", "m.2.colibri-volume", "m.colibri"]
    with colibri_format.open(output, volumes=[a, b]) as file:
        assert file.verify() == []
        counts = [int((file.block_index.volumes == n).sum()) for n in (1, 2)]
        assert counts == [11, 22]
    assert verify_main([str(output), *folders]) == 0
    assert inspect_main([str(output)]) == 0
    assert "volume 2" in capsys.readouterr().out
    assert verify_main([str(output)]) == 1
    assert "error[volume-missing]" in capsys.readouterr().err
    with (a / "m.1.colibri-volume").open("r+b") as volume:
        volume.write(bytes(8))
    assert repair_main([str(output), *folders]) == 0
    assert repack(source, tmp_path / "one.colibri").facts.volume_sizes == {}
    assert diff_main([str(output), str(tmp_path / "one.colibri")]) == 1
    out = capsys.readouterr().out
    assert "volumes" in out
    assert "other content" not in out
    assert export_main([str(output), str(tmp_path / "out.gguf"), *folders]) == 0
    assert (tmp_path / "out.gguf").read_bytes() == source.read_bytes()


def test_export_needs_the_volumes(tmp_path: Path, source: Path) -> None:
    repack(source, tmp_path / "m.colibri", volumes=[tmp_path / "a"])

    with pytest.raises(ColibriError) as caught:
        export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    assert caught.value.code == "volume-missing"
    assert export(tmp_path / "m.colibri", tmp_path / "out.gguf", is_dry_run=True).file_size > 0


def test_a_missing_folder_is_named(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ColibriError, match="nowhere") as caught:
        repack(source, tmp_path / "m.colibri", volumes=[tmp_path / "a", tmp_path / "nowhere"])
    assert caught.value.code == "file-not-found"
    assert leftovers(tmp_path) == []


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, source: Path) -> None:
    assert code_of(source, tmp_path / "m.colibri", volumes=[source]) == "not-a-folder"


def test_the_same_folder_twice_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    folders = [tmp_path / "a", tmp_path / "link"]

    assert code_of(source, tmp_path / "m.colibri", volumes=folders) == "bad-volumes"


@pytest.mark.parametrize("weight", [0, 1001, -1])
def test_weights_out_of_range_are_refused(tmp_path: Path, source: Path, weight: int) -> None:
    folder = VolumeFolder(tmp_path / "a", weight)

    assert code_of(source, tmp_path / "m.colibri", volumes=[folder]) == "bad-volumes"


def test_a_folder_without_a_name_is_not_the_one_that_one_is_in(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cmd_repack.main([str(source), str(tmp_path / "m.colibri"), "--volume", ""])

    assert (status, leftovers(tmp_path)) == (2, [])
    assert "bad-volumes" in capsys.readouterr().err


def test_an_existing_volume_needs_force_and_survives(tmp_path: Path, source: Path) -> None:
    there = tmp_path / "b" / "m.2.colibri-volume"
    there.write_bytes(b"precious")
    folders = [tmp_path / "a", tmp_path / "b"]

    assert code_of(source, tmp_path / "m.colibri", volumes=folders) == "file-exists"
    assert there.read_bytes() == b"precious"
    assert leftovers(tmp_path) == ["m.2.colibri-volume"]
    repack(source, tmp_path / "m.colibri", volumes=folders, overwrite=True)
    with colibri_format.open(tmp_path / "m.colibri", volumes=folders) as file:
        assert file.verify() == []


def test_a_volume_is_never_the_input(tmp_path: Path, source: Path) -> None:
    (tmp_path / "a" / "m.1.colibri-volume").symlink_to(source)

    code = code_of(source, tmp_path / "m.colibri", volumes=[tmp_path / "a"], overwrite=True)

    assert code == "output-is-input"


def test_a_full_disk_of_one_volume_is_named_before_the_first_byte(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = namedtuple("space", ["f_bavail", "f_frsize"])
    monkeypatch.setattr(
        "colibri_repack.output_checks._device", lambda folder: {"a": 1, "b": 2}.get(folder.name, 0)
    )
    monkeypatch.setattr(os, "statvfs", lambda p: space(1 if Path(p).name == "b" else 2**30, 4096))

    with pytest.raises(ColibriError, match="/b: ") as caught:
        repack(source, tmp_path / "m.colibri", volumes=[tmp_path / "a", tmp_path / "b"])

    assert caught.value.code == "disk-full"
    assert leftovers(tmp_path) == []


def test_same_volumes_give_the_same_bytes(tmp_path: Path, source: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    repack(source, tmp_path / "m.colibri", volumes=folders)
    before = [path.read_bytes() for path in sorted(tmp_path.rglob("m.*"))]

    repack(source, tmp_path / "m.colibri", volumes=folders, overwrite=True)

    assert [path.read_bytes() for path in sorted(tmp_path.rglob("m.*"))] == before
    assert str(tmp_path).encode() not in b"".join(before)


def test_an_interrupted_repack_with_order_layout_and_volumes_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    source = quant_model(DTYPES["q8_0"]).write(tmp_path / "in.gguf")
    trace = tmp_path / "t.csv"
    trace.write_text(
        "turn,phase,step,layer,slot,expert,weight\n"
        + "".join(f"0,1,{n // 2},0,{n % 2},{n % 2 * 2},1\n" for n in range(8))
    )
    folders = {name: tmp_path / name for name in ("a", "b", "c", "d")}
    for folder in folders.values():
        folder.mkdir()

    def made(first: str, second: str, **options: Any) -> list[bytes]:
        volumes = [VolumeFolder(folders[first]), VolumeFolder(folders[second], 2)]
        output = folders[first] / "m.colibri"
        repack(source, output, order=trace, layout="x16", volumes=volumes, **options)
        paths = [path for folder in (first, second) for path in sorted(folders[folder].iterdir())]
        return [path.read_bytes() for path in paths]

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made("a", "b", progress=stop)

    assert not (folders["a"] / "m.colibri").exists()
    assert made("a", "b") == made("c", "d")
