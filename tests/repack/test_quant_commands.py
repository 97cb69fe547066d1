from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import colibri_format
from colibri_repack import cmd_repack
from helpers.mix_models import mix_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with mix_model("dense") as builder:
        return builder.write(tmp_path / "m.gguf")


def run(source: Path, output: Path, *options: str) -> int:
    return cmd_repack.main([str(source), str(output), *options])


def types(path: Path) -> set[str]:
    with colibri_format.open(path) as file:
        return set(file.metadata["types"])


def test_mix_and_dense_type_are_taken(source: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "m.colibri"

    assert run(source, output, "--quant", "q4_k_m", "--dense-quant", "bf16") == 0
    assert types(output) == {"f32", "bf16", "q4_k", "q6_k"}
    report = capsys.readouterr().out
    assert all(name in report for name in ("q4_k", "q6_k", "bf16"))


def test_the_dry_run_plans_the_same_bytes(source: Path, tmp_path: Path, capsys: Capture) -> None:
    options = ("--quant", "q4_k", "--dense-quant", "q8_0", "--json")
    assert run(source, tmp_path / "m.colibri", *options, "--dry-run") == 0
    planned = json.loads(capsys.readouterr().out)

    assert run(source, tmp_path / "m.colibri", *options) == 0

    done = json.loads(capsys.readouterr().out)
    assert planned["file_size"] == done["file_size"] == (tmp_path / "m.colibri").stat().st_size


def test_a_gguf_is_requantised_only_when_allowed(
    tmp_path: Path, capsys: Capture, demo_gguf: Path
) -> None:
    output = tmp_path / "m.colibri"

    assert run(demo_gguf, output, "--quant", "q4_0") == 1
    assert "error[requantize]" in capsys.readouterr().err
    assert run(demo_gguf, output, "--quant", "q4_0", "--allow-requantize") == 0
    assert "quantised twice" in capsys.readouterr().out
    assert types(output) == {"f32", "q4_0"}


@pytest.fixture
def demo_gguf() -> Path:
    root = Path(__file__).parent.parent.parent
    data = root / "packages/colibri-bench/src/colibri_bench/data"
    return next(data.glob("*.gguf"))


def imatrix(path: Path, columns: int) -> Path:
    name = b"blk.0.attn_q.weight"
    head = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 1, columns)
    path.write_bytes(head + np.linspace(0, 1, columns, dtype="<f4").tobytes())
    return path


def test_the_importance_matrix_is_recorded_and_changes_bytes(source: Path, tmp_path: Path) -> None:
    matrix = imatrix(tmp_path / "i.dat", 256)
    plain, weighed = tmp_path / "a.colibri", tmp_path / "b.colibri"

    assert run(source, plain, "--quant", "q3_k") == 0
    assert run(source, weighed, "--quant", "q3_k", "--imatrix", str(matrix)) == 0

    with colibri_format.open(plain) as a, colibri_format.open(weighed) as b:
        assert b.metadata["imatrix"] == "i.dat"
        differing = {
            name for name in a.tensors if (a.tensor(name).read() != b.tensor(name).read()).any()
        }
        assert differing == {"blk.0.attn_q.weight"}


def test_an_importance_matrix_of_another_model_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: Capture
) -> None:
    matrix = imatrix(tmp_path / "i.dat", 128)
    options = ("--quant", "q3_k", "--imatrix", str(matrix))

    assert run(source, tmp_path / "m.colibri", *options, "--dry-run") == 1
    assert "error[imatrix-size]" in capsys.readouterr().err


def test_the_importance_matrix_is_not_overwritten(
    source: Path, tmp_path: Path, capsys: Capture
) -> None:
    matrix = imatrix(tmp_path / "i.dat", 256)
    before = matrix.read_bytes()

    assert run(source, matrix, "--quant", "q3_k", "--imatrix", str(matrix), "--force") != 0
    assert "error[output-is-input]" in capsys.readouterr().err
    assert matrix.read_bytes() == before
