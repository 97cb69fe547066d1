from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import colibri_format
from colibri_repack import cmd_inspect, cmd_repack, cmd_verify
from helpers.gguf_models import gguf_model
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import write_folder

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")
    output = tmp_path / "m.colibri"
    assert cmd_repack.main([str(source), str(output)]) == 0
    return output


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def test_repack_prints_the_report(tmp_path: Path, capsys: Capture) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")

    assert cmd_repack.main([str(source), str(tmp_path / "m.colibri")]) == 0
    out, err = capsys.readouterr()

    for text in ("qwen3moe", "11 a layer, top-3", "padding", "index", "read per token", "type f32"):
        assert text in out
    assert "warning" in out
    assert str(tmp_path / "m.colibri") in out
    assert err == ""


def test_repack_takes_named_input_and_output(tmp_path: Path) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")
    arguments = ["--input", str(source), "--output", str(tmp_path / "m.colibri")]

    assert cmd_repack.main([*arguments, "--block-size", "16K"]) == 0

    with colibri_format.open(tmp_path / "m.colibri") as file:
        assert file.geometry.alignment == 16_384


def test_repack_json_is_one_object_and_silent(tmp_path: Path, capsys: Capture) -> None:
    folder = write_folder(tmp_path / "hf", dict(random_state("mixtral")), CONFIGS["mixtral"])

    code = cmd_repack.main([str(folder), str(tmp_path / "m.colibri"), "--quant", "q8_0", "--json"])
    out, err = capsys.readouterr()
    record = json.loads(out)

    assert (code, err) == (0, "")
    assert (record["n_experts"], record["top_k"], record["quantisation"]) == (5, 2, "q8_0")
    assert record["types"]["q8_0"]["segments"] == 3 * 5 * 2
    assert record["file_size"] == (tmp_path / "m.colibri").stat().st_size


def test_dry_run_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")

    assert cmd_repack.main([str(source), "--dry-run"]) == 0

    assert "--dry-run" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_repack_says_what_is_wrong_on_stderr(packed: Path, capsys: Capture) -> None:
    source = packed.with_name("in.gguf")
    capsys.readouterr()

    assert cmd_repack.main([str(source), str(packed)]) == 1
    assert capsys.readouterr().err.startswith("error[file-exists]: ")
    assert cmd_repack.main([str(source), str(packed), "--force"]) == 0
    assert cmd_repack.main([str(source), str(source), "--force"]) == 2
    assert "error[output-is-input]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["in.gguf"],
        ["a", "b", "--input", "c"],
        ["a", "b", "--block-size", "many"],
        ["a", "b", "--quant", "q9"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cmd_repack.main(arguments)

    assert caught.value.code == 2
    capsys.readouterr()


def test_block_size_that_is_no_power_of_two_is_usage(tmp_path: Path, capsys: Capture) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")

    assert cmd_repack.main([str(source), str(tmp_path / "m"), "--block-size", "5000"]) == 2
    assert "error[bad-alignment]" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_interrupt_keeps_the_work_and_the_same_command_goes_on(
    tmp_path: Path, name: str, status: int, capsys: Capture
) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")
    output = tmp_path / "m.colibri"
    # The process interrupts itself in the middle: no timing is involved.
    script = (
        "import os, signal, sys\n"
        "from colibri_repack import cmd_repack, api\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup has it ignored
        "real = api.convert\n"
        "def half(done, total):\n"
        f"    done > total // 2 and os.kill(os.getpid(), signal.{name})\n"
        "def stop(*a, progress=None, **k):\n"
        "    return real(*a, progress=half, **k)\n"
        "api.convert = stop\n"
        "sys.exit(cmd_repack.main(sys.argv[1:]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(output)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert "interrupted" in done.stderr
    assert "the same command goes on" in done.stderr
    assert not output.exists()
    assert (tmp_path / "m.colibri.part").exists()
    assert cmd_repack.main([str(source), str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed_bytes"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf", "m.colibri"]


def test_killed_in_the_middle_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")
    output = tmp_path / "m.colibri"
    script = (
        "import os, signal, sys, colibri_repack\n"
        "colibri_repack.repack(sys.argv[1], sys.argv[2],\n"
        "    progress=lambda d, t: d > t // 2 and os.kill(os.getpid(), signal.SIGKILL))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(output)], check=False, capture_output=True
    )

    assert done.returncode == -signal.SIGKILL
    assert not output.exists()
    assert cmd_repack.main([str(source), str(output)]) == 0


def test_inspect_shows_layouts_tensors_blocks_and_files(packed: Path, capsys: Capture) -> None:
    capsys.readouterr()

    assert cmd_inspect.main([str(packed), "--tensors", "--blocks", "--files"]) == 0

    out = capsys.readouterr().out
    for text in ("0-2", "gate", "40 x 96", "blk.2.ffn_gate_inp.weight", "gguf.json", "model.json"):
        assert text in out


def test_inspect_json_gives_every_block(packed: Path, capsys: Capture) -> None:
    capsys.readouterr()

    assert cmd_inspect.main([str(packed), "--json", "--blocks", "--layer", "1"]) == 0

    record = json.loads(capsys.readouterr().out)
    with colibri_format.open(packed) as file:
        assert [(b["offset"], b["size"]) for b in record["blocks"]] == [
            tuple(pair) for pair in file.index[1].tolist()
        ]
        assert record["uuid"] == str(file.uuid)
    assert [layout["layer"] for layout in record["layouts"]] == [1]
    assert [s["role"] for s in record["layouts"][0]["segments"]] == ["gate", "up", "down"]


def test_repack_and_inspect_tell_the_same_facts(tmp_path: Path, capsys: Capture) -> None:
    source = gguf_model("qwen3moe-tied-dense-layer").write(tmp_path / "in.gguf")
    output = tmp_path / "m.colibri"
    cmd_repack.main([str(source), str(output), "--json"])
    told = json.loads(capsys.readouterr().out)

    cmd_inspect.main([str(output), "--json", "--tensors", "--files"])
    found = json.loads(capsys.readouterr().out)

    assert {k: found[k] for k in found if k in told and k != "warnings"} == {
        k: told[k] for k in told if k in found and k != "warnings"
    }
    assert found["layouts"][1]["segments"] == []


def test_inspect_refuses_a_layer_that_is_not_there(packed: Path, capsys: Capture) -> None:
    capsys.readouterr()

    assert cmd_inspect.main([str(packed), "--layer", "3"]) == 2
    assert "error[no-such-layer]" in capsys.readouterr().err


def test_inspect_refuses_what_is_no_colibri_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100_000))

    assert cmd_inspect.main([str(path)]) == 1
    assert capsys.readouterr().err.startswith("error[")


def test_verify_finds_a_sound_file_sound(packed: Path, capsys: Capture) -> None:
    capsys.readouterr()

    assert cmd_verify.main([str(packed)]) == 0
    assert "sound" in capsys.readouterr().out


def test_verify_names_each_damaged_block(packed: Path, capsys: Capture) -> None:
    with colibri_format.open(packed) as file:
        offsets = [int(file.index["offset"][place]) for place in ((0, 3), (2, 10))]
    for offset in offsets:
        damage(packed, offset + 5)
    capsys.readouterr()

    assert cmd_verify.main([str(packed)]) == 1
    err = capsys.readouterr().err
    assert err.count("error[block-checksum]") == 2
    for place, offset in zip(("L0/E3", "L2/E10"), offsets, strict=True):
        assert place in err
        assert f"{offset:#x}" in err

    assert cmd_verify.main([str(packed), "--layer", "1"]) == 0
    capsys.readouterr()
    assert cmd_verify.main([str(packed), "--json", "--layer", "2"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [(d["layer"], d["expert"]) for d in record["damages"]] == [(2, 10)]
    assert not record["is_sound"]


def test_warnings_of_the_reader_are_shown(packed: Path, capsys: Capture) -> None:
    damage(packed, 100)
    capsys.readouterr()

    assert cmd_inspect.main([str(packed)]) == 0
    assert "warning: " in capsys.readouterr().err
    assert cmd_verify.main([str(packed)]) == 1
    assert "warning: " in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal to write to")
def test_bar_with_rate_and_time_left_is_shown_on_a_terminal(tmp_path: Path) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")
    leader, follower = os.openpty()
    script = "import sys; from colibri_repack.cmd_repack import main; sys.exit(main(sys.argv[1:]))"

    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(tmp_path / "m.colibri")],
        stdout=subprocess.PIPE,
        stderr=follower,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        check=False,
    )
    os.close(follower)
    shown = os.read(leader, 65_536).decode()
    os.close(leader)

    assert done.returncode == 0
    assert "repacking" in shown
    assert b"family" in done.stdout


def test_source_without_a_tokenizer_is_warned_of(tmp_path: Path, capsys: Capture) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")

    assert cmd_repack.main([str(source), str(tmp_path / "m.colibri"), "--json"]) == 0

    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert any("no tokenizer" in warning for warning in warnings)
