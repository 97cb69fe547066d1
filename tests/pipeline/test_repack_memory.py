"""Peak memory of repacking models larger than any sensible buffer.

Each repack runs in a child process of its own; the figure is the highest resident set of that
process (VmHWM of proc_pid_status(5)), interpreter and libraries included. getrusage's ru_maxrss
would not do: after a vfork it starts with the parent's peak.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import colibri_format
import colibri_repack
from colibri_format import Role
from helpers import synthetic_models

pytestmark = pytest.mark.memory

LIMIT = 400 * 10**6
_CHILD = """
import json, re, sys
import colibri_repack
report = colibri_repack.repack(sys.argv[1], sys.argv[2], quant=sys.argv[3])
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"peak": peak, **report.to_record()}))
"""


def repack_in_child(source: Path, output: Path, quant: str) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, str(source), str(output), quant]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    rate = record["bytes_per_second"] / 1e6
    print(f"{quant}: peak {record['peak'] / 1e6:.0f} MB, {rate:.0f} MB/s of output")
    return record


@pytest.fixture
def roomy_path(tmp_path: Path) -> Path:
    free = shutil.disk_usage(tmp_path).free
    if free < 12 * 10**9:
        pytest.skip(f"needs 12 GB of free disk for a model and its repack, has {free / 1e9:.1f}")
    return tmp_path


def read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def test_peak_memory_of_a_pass_through_is_far_below_one_tensor(roomy_path: Path) -> None:
    source, output = roomy_path / "m.gguf", roomy_path / "m.colibri"
    n_layers, n_experts, hidden, width = 3, 160, 2048, 768
    synthetic_models.write_gguf(
        source, n_layers=n_layers, n_experts=n_experts, hidden=hidden, width=width
    )
    matrix = width * hidden * 2
    assert source.stat().st_size > 4 * 10**9
    assert n_experts * matrix > LIMIT

    record = repack_in_child(source, output, "keep")

    from colibri_repack import open_source

    tensors = open_source(source).tensors
    with colibri_format.open(output) as file:
        for layer, expert in ((0, 0), (1, 77), (2, 159)):
            data = file.expert(layer, expert).read()
            for number, matrix_name in enumerate(("gate", "up", "down")):
                tensor = tensors[f"blk.{layer}.ffn_{matrix_name}_exps.weight"]
                expected = read(source, tensor.offset + expert * matrix, matrix)
                assert data[number * matrix : (number + 1) * matrix].tobytes() == expected
    assert record["peak"] < LIMIT
    assert record["peak"] < record["peak_memory_estimate_bytes"]
    source.unlink()
    output.unlink()


def test_peak_memory_of_quantising_is_far_below_one_tensor(roomy_path: Path) -> None:
    source, output = roomy_path / "hf", roomy_path / "m.colibri"
    synthetic_models.write_bf16_folder(
        source, n_layers=1, n_experts=128, hidden=2048, width=768, vocab=40_000
    )
    assert (source / "model.safetensors").stat().st_size > 1.5 * 10**9

    record = repack_in_child(source, output, "q8_0")

    with colibri_format.open(output) as file:
        up = file.expert(0, 100).layout.segment(Role.UP)
        assert up is not None
        assert up.dtype.name == "q8_0"
        assert file.expert(0, 100).read().any()
    assert record["peak"] < LIMIT
    assert record["peak"] < record["peak_memory_estimate_bytes"]
    shutil.rmtree(source)
    output.unlink()


_EXPORT_CHILD = """
import json, re, sys
import colibri_repack
report = colibri_repack.export(sys.argv[1], sys.argv[2])
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"peak": peak, **report.to_record()}))
"""


def test_peak_memory_of_an_export_is_far_below_one_tensor(roomy_path: Path) -> None:
    source, packed, output = (roomy_path / name for name in ("m.gguf", "m.colibri", "out.gguf"))
    synthetic_models.write_gguf(source, n_layers=1, n_experts=160, hidden=2048, width=768)
    colibri_repack.repack(source, packed)

    command = [sys.executable, "-c", _EXPORT_CHILD, str(packed), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    record = json.loads(done.stdout)
    rate = record["bytes_per_second"] / 1e6
    print(f"export: peak {record['peak'] / 1e6:.0f} MB, {rate:.0f} MB/s")
    assert record["peak"] < LIMIT
    assert filecmp.cmp(source, output, shallow=False)
