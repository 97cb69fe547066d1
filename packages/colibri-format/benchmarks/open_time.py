"""How long opening a model of many experts takes, beside safetensors and gguf-py.

`python open_time.py [--layers 92] [--experts 896] [--rounds 15]`; needs safetensors and gguf.
Three files of the same model (tiny matrices: only headers matter) are made in a temporary folder
and opened in turn, warm. safetensors holds one tensor for each expert and matrix, as checkpoints
do; GGUF holds one stacked tensor for each layer and matrix, so it has 896 times fewer to list, and
cannot tell where an expert stands without arithmetic on shapes. Where there is a C compiler, the
reader in C opens the same file (c_reader.c).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import colibri_format as cf

MATRICES = (("gate_proj", (1, 2)), ("up_proj", (1, 2)), ("down_proj", (2, 1)))
DENSE = 12


def make_colibri(path: Path, n_layers: int, n_experts: int) -> None:
    f32 = cf.DTYPES["f32"]
    layout = cf.Layout.of(
        (
            cf.SegmentSpec(cf.Role.GATE, f32, (1, 2)),
            cf.SegmentSpec(cf.Role.UP, f32, (1, 2)),
            cf.SegmentSpec(cf.Role.DOWN, f32, (2, 1)),
        )
    )
    plan = cf.plan_layout(
        n_layers=n_layers,
        n_experts=n_experts,
        layer_layouts=[layout] * n_layers,
        tensors=[
            cf.TensorSpec(f"blk.{layer}.t{n}.weight", f32, (8,), layer)
            for layer in range(n_layers)
            for n in range(DENSE)
        ],
    )
    payload = bytes(24)
    with cf.Writer(path, plan) as writer:
        for layer in range(n_layers):
            for expert in range(n_experts):
                writer.write_block(layer, expert, payload)
        for tensor in plan.tensors:
            writer.write_tensor(tensor.name, bytes(tensor.size))


def make_safetensors(path: Path, n_layers: int, n_experts: int) -> None:
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": np.zeros(shape, np.float32)
        for layer in range(n_layers)
        for expert in range(n_experts)
        for name, shape in MATRICES
    }
    for layer in range(n_layers):
        for n in range(DENSE):
            tensors[f"model.layers.{layer}.t{n}.weight"] = np.zeros(8, np.float32)
    save_file(tensors, path)


def make_gguf(path: Path, n_layers: int, n_experts: int) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for layer in range(n_layers):
        for name, shape in MATRICES:
            data = np.zeros((n_experts, *shape), np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", data)
        for n in range(DENSE):
            writer.add_tensor(f"blk.{layer}.t{n}.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_safetensors(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        file.keys()


def main() -> int:
    """Prints medians and spread of all three, and look-up times of ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=92)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made: list[tuple[str, Path, Callable[[Path], object], list[float]]] = []
        for name, make, use in (
            ("colibri", make_colibri, lambda path: cf.open(path).close()),
            ("safetensors", make_safetensors, open_safetensors),
            ("gguf-py", make_gguf, gguf.GGUFReader),
        ):
            path = Path(folder) / f"model.{name}"
            make(path, arguments.layers, arguments.experts)
            made.append((name, path, use, []))
        for _ in range(arguments.rounds + 1):
            for _, path, use, times in made:
                start = time.perf_counter()
                use(path)
                times.append(1e3 * (time.perf_counter() - start))
        ours = made[0][3][1:]
        for name, path, _, times in made:
            ratio = statistics.median(t / o for t, o in zip(times[1:], ours, strict=True))
            print(
                f"{name:12} {path.stat().st_size / 2**20:8.1f} MiB  open "
                f"{statistics.median(times[1:]):8.1f} ms ({min(times[1:]):.1f} to "
                f"{max(times[1:]):.1f})  {ratio:6.1f} times ours"
            )
        with cf.open(made[0][1]) as file:
            index = file.index
            for name, look in (
                ("index[layer, expert]", lambda: index[17, 33]),
                ("expert(layer, expert)", lambda: file.expert(17, 33)),
            ):
                seconds = min(timeit.repeat(look, number=20_000, repeat=5)) / 20_000
                print(f"{name:24} {1e9 * seconds:.0f} ns")
        run_c_reader(Path(folder), made[0][1], arguments)
    return 0


def run_c_reader(folder: Path, file: Path, arguments: argparse.Namespace) -> None:
    """Builds c_reader.c and lets it open `file`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("no C compiler: the reader in C is left out")
        return
    program = folder / "c_reader"
    source = Path(__file__).with_name("c_reader.c")
    command = [compiler, "-O2", f"-I{cf.get_include()}", str(source), "-o", str(program), "-lm"]
    subprocess.run(command, check=True)
    sizes = [str(arguments.layers), str(arguments.experts)]
    subprocess.run([str(program), str(file), *sizes], check=True)


if __name__ == "__main__":
    sys.exit(main())
