"""How long `colibri repack --dry-run` takes for the headers of the largest models, start to exit.

python dry_run_speed.py [--rounds 5] [--cold] [--folder DIR]

Headers with holes where their data would be (synthetic_headers.py): DeepSeek-V3 as published, FP8
in 163 shards; the same in BF16; Qwen3-235B-A22B as GGUF in three parts. Every run is a process of
its own, interpreter, imports and output included. Arms take turns. With `--cold` (as root) the page
cache is dropped before each run; else all but the first round reads from it. How fast the machine
was meanwhile is told by 5 million additions in Python, which take their turn as well.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from synthetic_headers import write_deepseek_v3, write_qwen3_235b

COMMAND = "import sys; from colibri_repack.cmd_repack import main; sys.exit(main(sys.argv[1:]))"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_deepseek_v3(folder / "fp8")
        write_deepseek_v3(folder / "bf16", is_fp8=False)
        first = write_qwen3_235b(folder / "qwen3")
        measure(
            {
                "DeepSeek-V3, FP8": [str(folder / "fp8")],
                "DeepSeek-V3, FP8 to q4_k_m": [str(folder / "fp8"), "--quant", "q4_k_m"],
                "DeepSeek-V3, BF16": [str(folder / "bf16")],
                "Qwen3-235B, GGUF": [str(first)],
                "help alone": ["--help"],
            },
            arguments,
        )
    return 0


def measure(arms: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    additions: list[float] = []
    # Installed modules are compiled already.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    help_command = [sys.executable, "-c", COMMAND, "--help"]
    subprocess.run(help_command, check=True, capture_output=True, env=environment)
    os.sync()
    for _ in range(arguments.rounds):
        for name, options in arms.items():
            if arguments.cold:
                Path("/proc/sys/vm/drop_caches").write_text("3\n")
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            start = time.perf_counter()
            command = [sys.executable, "-c", COMMAND, *options, "--dry-run"]
            subprocess.run(command, check=True, capture_output=True, env=environment)
            seconds[name].append(time.perf_counter() - start)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        start = time.perf_counter()
        total = 0
        for number in range(5_000_000):
            total += number
        additions.append(time.perf_counter() - start)
    print(f"{arguments.rounds} rounds, page cache {'dropped' if arguments.cold else 'warm'}")
    for name, took in seconds.items():
        print(
            f"{name:28} {statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f}), "
            f"processor {statistics.median(cpu[name]):.2f} s"
        )
    print(
        f"{'5 million additions':28} {statistics.median(additions):.2f} s "
        f"({min(additions):.2f} to {max(additions):.2f})"
    )


if __name__ == "__main__":
    sys.exit(main())
