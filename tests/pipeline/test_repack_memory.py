"""`--memory` holds where it counts: under a cgroup limit that kills who exceeds it.

Each repack runs in a child process in a memory cgroup whose limit is the budget itself; the figure
is the group's peak, interpreter, libraries, page cache and kernel memory included.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import colibri_format
import colibri_repack
from colibri_format import Role
from colibri_repack import open_source
from helpers import synthetic_models
from helpers.memory_group import memory_group

pytestmark = pytest.mark.memory

MIB = 2**20
BUDGET = 128 * MIB
COMMAND = "import sys; from colibri_repack.cmd_repack import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("memory")
    free = shutil.disk_usage(path).free
    if free < 8 * 10**9:
        pytest.skip(f"needs 8 GB of free disk for models and repacks, has {free / 1e9:.1f}")
    yield path
    # pytest keeps folders of past runs: not this one.
    shutil.rmtree(path)


def repack_within(
    budget: int, source: Path, output: Path, *options: str, **environment: str
) -> dict[str, Any]:
    """The report of a repack in a process that enters the group before it becomes Python."""
    with memory_group(budget) as group:
        script = f'echo $$ > "{group.folder}/cgroup.procs" && exec "$@"'
        command = [sys.executable, "-c", COMMAND, str(source), str(output), "--json"]
        done = subprocess.run(
            ["sh", "-c", script, "sh", *command, "--memory", str(budget), *options],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        record: dict[str, Any] = json.loads(done.stdout)
        files = source.iterdir() if source.is_dir() else [source]
        size = sum(path.stat().st_size for path in files)
        print(
            f"\n{' '.join(options)}: source {size / MIB:.0f} MiB, budget {budget / MIB:.0f} MiB, "
            f"planned {record['peak_memory_estimate_bytes'] / MIB:.0f}, peak of the cgroup "
            f"{group.peak() / MIB:.1f} MiB; reads {record['read_mode']['mode']}, writes "
            f"{record['write_mode']['mode']}, {record['bytes_per_second'] / 1e6:.0f} MB/s of output"
        )
        assert group.n_killed() == 0
        assert group.peak() <= budget
        assert record["peak_memory_estimate_bytes"] <= budget
    return record


def read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def test_model_ten_times_the_budget_passes_through(folder: Path) -> None:
    source, output = folder / "m.gguf", folder / "m.colibri"
    n_experts, hidden, width = 96, 2048, 768
    synthetic_models.write_gguf(source, n_layers=2, n_experts=n_experts, hidden=hidden, width=width)
    matrix = width * hidden * 2
    assert source.stat().st_size > 10 * BUDGET
    assert n_experts * matrix > BUDGET

    repack_within(BUDGET, source, output, "--quant", "keep")

    tensors = open_source(source).tensors
    with colibri_format.open(output) as file:
        for layer, expert in ((0, 0), (1, 77), (1, 95)):
            data = file.expert(layer, expert).read()
            for number, matrix_name in enumerate(("gate", "up", "down")):
                tensor = tensors[f"blk.{layer}.ffn_{matrix_name}_exps.weight"]
                expected = read(source, tensor.offset + expert * matrix, matrix)
                assert data[number * matrix : (number + 1) * matrix].tobytes() == expected
    output.unlink()
    source.unlink()


MODELS: dict[str, tuple[Any, dict[str, Any], list[tuple[str, ...]]]] = {
    "bf16": (
        synthetic_models.write_bf16_folder,
        {"n_layers": 2, "n_experts": 72},
        [("--quant", "q4_k"), ("--quant", "q8_0", "--layout", "x16"), ("--quant", "f32")],
    ),
    "fp8": (
        synthetic_models.write_fp8_folder,
        {"n_layers": 3, "n_experts": 96},
        [("--fp8", "bf16"), ("--quant", "q4_k")],
    ),
    "mxfp4": (
        synthetic_models.write_gpt_oss_folder,
        {"n_layers": 6, "n_experts": 96, "is_mxfp4": True},
        [()],
    ),
    "turned": (
        synthetic_models.write_gpt_oss_folder,
        {"n_layers": 2, "n_experts": 72, "is_mxfp4": False},
        [("--quant", "q4_k")],
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_model_ten_times_the_budget_is_decoded_and_quantised(folder: Path, kind: str) -> None:
    write, sizes, runs = MODELS[kind]
    source, output = folder / kind, folder / f"{kind}.colibri"
    write(source, hidden=2048, width=768, vocab=20_000, **sizes)
    assert (source / "model.safetensors").stat().st_size > 10 * BUDGET

    for options in runs:
        repack_within(BUDGET, source, output, *options)

        with colibri_format.open(output) as file:
            up = file.expert(0, 50).layout.segment(Role.UP)
            assert up is not None
            assert file.expert(1, 50).read().any()
        output.unlink()
    shutil.rmtree(source)


def test_numpy_alone_keeps_within_the_budget(folder: Path) -> None:
    source, output = folder / "small", folder / "small.colibri"
    synthetic_models.write_bf16_folder(
        source, n_layers=1, n_experts=8, hidden=1024, width=256, vocab=2000
    )

    repack_within(BUDGET + 64 * MIB, source, output, "--quant", "q4_k", COLIBRI_NO_NATIVE="1")

    output.unlink()


def test_smallest_budget_that_the_error_names_works(folder: Path) -> None:
    source, output = folder / "least.gguf", folder / "least.colibri"
    synthetic_models.write_gguf(source, n_layers=1, n_experts=96, hidden=2048, width=768)
    command = [sys.executable, "-c", COMMAND, str(source), str(output), "--memory", "32M"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "error[budget-too-small]" in done.stderr
    least = int(done.stderr.split("--memory ")[1].split("M")[0]) * MIB
    record = repack_within(least, source, output)

    assert record["peak_memory_estimate_bytes"] <= least
    output.unlink()


_EXPORT_CHILD = """
import json, re, sys
import colibri_repack
report = colibri_repack.export(sys.argv[1], sys.argv[2])
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"peak": peak, **report.to_record()}))
"""


def test_peak_memory_of_an_export_is_far_below_one_tensor(folder: Path) -> None:
    source, packed, output = (folder / name for name in ("m.gguf", "m.colibri", "out.gguf"))
    synthetic_models.write_gguf(source, n_layers=1, n_experts=160, hidden=2048, width=768)
    colibri_repack.repack(source, packed)

    command = [sys.executable, "-c", _EXPORT_CHILD, str(packed), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    record = json.loads(done.stdout)
    rate = record["bytes_per_second"] / 1e6
    print(f"export: peak {record['peak'] / 1e6:.0f} MB, {rate:.0f} MB/s")
    assert record["peak"] < 150 * MIB  # one tensor of the model takes 150 MB and more
    assert filecmp.cmp(source, output, shallow=False)
