"""`repair`, `diff`, and `inspect` and `verify` on files with mixed layouts and volumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import colibri_format as cf
from colibri_repack import cmd_diff, cmd_inspect, cmd_repair, cmd_verify
from helpers.forge import layout_of, sample_plan, write_sample

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_sample(tmp_path / "a.colibri")
    return tmp_path / "a.colibri"


def hit(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 0xFF
    path.write_bytes(data)


def test_repair_restores_and_says_what(path: Path, capsys: Capture) -> None:
    sound = path.read_bytes()
    hit(path, 40)

    assert cmd_repair.main([str(path), "--dry-run"]) == 0
    assert "would restore the superblock at the start" in capsys.readouterr().out
    assert path.read_bytes() != sound
    assert cmd_repair.main([str(path), "--json"]) == 0
    (restored,) = json.loads(capsys.readouterr().out)["restored"]
    assert restored["offset"] == 0
    assert path.read_bytes() == sound
    assert cmd_repair.main([str(path)]) == 0
    assert "nothing to restore" in capsys.readouterr().out


def test_repair_refuses_what_is_lost(path: Path, capsys: Capture) -> None:
    hit(path, 40, path.stat().st_size - 40)

    assert cmd_repair.main([str(path)]) == 1

    captured = capsys.readouterr()
    assert "error[superblock-checksum]" in captured.err
    assert "nothing was written" in captured.err
    assert cmd_repair.main([str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "superblock-checksum"


def test_diff_of_equal_files_is_silent_about_places(path: Path, capsys: Capture) -> None:
    write_sample(path.with_name("b.colibri"))

    assert cmd_diff.main([str(path), str(path.with_name("b.colibri"))]) == 0
    assert "no difference" in capsys.readouterr().out


def test_diff_names_blocks_and_metadata(path: Path, capsys: Capture) -> None:
    other = path.with_name("b.colibri")
    write_sample(other, sample_plan(metadata={"tool": "x" * 200}), seed=1)

    assert cmd_diff.main([str(path), str(other)]) == 1
    text = capsys.readouterr().out
    assert "blocks: layer 2, other content" in text
    assert "(202 characters)" in text
    assert cmd_diff.main([str(path), str(other), "--json"]) == 1
    kinds = {d["kind"] for d in json.loads(capsys.readouterr().out)["differences"]}
    assert kinds == {"tensor", "file", "metadata", "blocks"}
    assert cmd_diff.main([str(path), str(path.with_name("none"))]) == 1
    assert "error[file-not-found]" in capsys.readouterr().err


def test_inspect_tells_of_a_file_that_describes_no_model(path: Path, capsys: Capture) -> None:
    assert cmd_inspect.main([str(path), "--blocks", "--tensors", "--files"]) == 0
    assert "not known: the file describes no model" in capsys.readouterr().out
    assert cmd_inspect.main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["top_k"] is None
    assert found["token_bytes"] is None


def test_inspect_tells_each_layout_of_a_mixed_layer(tmp_path: Path, capsys: Capture) -> None:
    a, b = layout_of("q8_0", 64, 96), layout_of("f16", 64, 96)
    path = tmp_path / "mixed.colibri"
    write_sample(
        path,
        sample_plan(n_layers=1, layer_layouts=[[a, b, None, b, b]], present=None, tensors=[]),
    )

    assert cmd_inspect.main([str(path), "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert [(x["layer"], x["n_experts"], x["segments"][0]["dtype"]) for x in layouts] == [
        (0, 3, "f16"),
        (0, 1, "q8_0"),
    ]
    assert cmd_inspect.main([str(path), "--layer", "0"]) == 0
    assert cmd_verify.main([str(path)]) == 0


def test_striped_file_is_inspected_without_and_verified_with_its_volumes(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    path = tmp_path / "a.colibri"
    with cf.Writer(path, sample_plan(volumes=["v"]), volume_folders=[folder]) as writer:
        for layer in (0, 2):
            for expert in (0, 1, 2, 3, 4):
                if (layer, expert) != (2, 3):
                    layout = writer.plan.layout(layer, expert)
                    assert layout is not None
                    writer.write_block(layer, expert, bytes(sum(s.size for s in layout.segments)))
        for tensor in writer.plan.tensors:
            writer.write_tensor(tensor.name, bytes(tensor.size))
        for file in writer.plan.files:
            writer.write_file(file.name, bytes(file.size))

    assert cmd_inspect.main([str(path), "--blocks"]) == 0
    assert "volume v" in capsys.readouterr().out
    assert cmd_verify.main([str(path)]) == 1
    assert "error[volume-missing]" in capsys.readouterr().err
    assert cmd_verify.main([str(path), "--volume", str(folder)]) == 0
    assert cmd_repair.main([str(path), "--volume", str(folder)]) == 0
    capsys.readouterr()
    (volume,) = folder.iterdir()
    hit(volume, 8192)
    assert cmd_verify.main([str(path), "--volume", str(folder)]) == 1
    assert "of volume 1" in capsys.readouterr().err
