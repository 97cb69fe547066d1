"""Whole repacks beside `cp`, and beside llama.cpp's quantiser: same files, same disk, interleaved.

python repack_speed.py [copy] [quantise] [--layers 4] [--rounds 5] [--quant q4_k] [--folder DIR]

`copy`: `colibri repack --quant keep` of a GGUF against `cp` of it. `quantise`: a BF16 GGUF to
`--quant`, against `llama_model_quantize` of llama-cpp-python (pure, same number of threads). Every
arm starts a process of its own and ends with its file on the disk (`sync -f` after those that do
not see to it themselves); startup counts. Before each arm the page cache is dropped (as root;
otherwise the source's pages alone), and outputs of former arms are gone. The order of the arms
changes with each round. What a virtual disk's host keeps in memory stays warm: compare arms, not
machines. Everything is made below DIR, in a folder that is removed at the end.
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

from synthetic_checkpoint import write_gguf

REPACK = "import sys; from colibri_repack.cmd_repack import main; sys.exit(main(sys.argv[1:]))"
LLAMA = """
import ctypes, sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread, params.pure = int(sys.argv[3]), int(sys.argv[4]), True
code = llama_cpp.llama_model_quantize(
    sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params))
sys.exit(code != 0)
"""
# enum llama_ftype in llama.h; of the K-quants the small mixes, which `pure` makes one type.
FTYPES = {"q4_0": 2, "q8_0": 7, "q4_k": 14, "q5_k": 16, "q6_k": 18}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["copy", "quantise"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quant", choices=FTYPES, default="q4_k")
    parser.add_argument("--memory", default="512M")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = folder / "source.gguf"
        write_gguf(source, arguments.layers)
        os.sync()
        size = source.stat().st_size
        print(
            f"source {size / 1e9:.2f} GB, {len(os.sched_getaffinity(0))} cores, page cache "
            f"{'dropped' if os.geteuid() == 0 else 'of the source dropped'} before each arm, "
            f"host cache unknown; {arguments.rounds} rounds, arms in changing order"
        )
        for what in arguments.what:
            measure(what, source, folder, arguments)
    return 0


def measure(what: str, source: Path, folder: Path, arguments: argparse.Namespace) -> None:
    output = folder / "out"
    memory = ["--memory", arguments.memory, "--json"]
    command = [sys.executable, "-c", REPACK, str(source), str(output), *memory]
    if what == "copy":
        arms = {"cp": ["cp", str(source), str(output)], "repack": command}
    else:
        n_threads = str(len(os.sched_getaffinity(0)))
        llama = [sys.executable, "-c", LLAMA, str(source), str(output)]
        arms = {
            "llama.cpp": [*llama, str(FTYPES[arguments.quant]), n_threads],
            "repack": [*command, "--quant", arguments.quant],
        }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(arguments.rounds):
        names = list(arms)
        for name in names if number % 2 else reversed(names):
            drop_caches(source)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            start = time.perf_counter()
            subprocess.run(arms[name], check=True, capture_output=True)
            subprocess.run(["sync", "-f", str(output)], check=True)
            seconds[name].append(time.perf_counter() - start)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            output.unlink()
            os.sync()
    size = source.stat().st_size
    print(f"\n{what}{'' if what == 'copy' else ' to ' + arguments.quant}, MB/s of source:")
    for name, took in seconds.items():
        rates = sorted(size / 1e6 / s for s in took)
        print(
            f"  {name:10} {statistics.median(rates):6.0f} ({rates[0]:.0f} to {rates[-1]:.0f}), "
            f"{statistics.median(took):.2f} s, CPU {statistics.median(cpu[name]):.2f} s"
        )
    other = next(name for name in arms if name != "repack")
    ratios = sorted(a / b for a, b in zip(seconds[other], seconds["repack"], strict=True))
    print(
        f"  repack is {statistics.median(ratios):.2f} times as fast as {other} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f} by round)"
    )


def drop_caches(source: Path) -> None:
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return
    fd = os.open(source, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
