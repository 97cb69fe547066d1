"""Kills repacks at random moments, and compares what comes of it with one that nobody killed.

python kill_loop.py [--kills 60] [--layers 10] [--quant keep] [--seed 1] [--folder DIR]

Each process gets SIGKILL between its start and the time that the fastest run so far took; the
next one goes on. A run that finishes before it is killed is compared and removed, and another
begins. After the last kill one more run finishes. Exit status 1 if any byte is not as it should be,
or if anything but a complete file ever has the final name.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import xxhash
from synthetic_checkpoint import write_folder

from colibri_format.journal import journal_path, read_journal

COMMAND = "import sys; from colibri_repack.cmd_repack import main; sys.exit(main(sys.argv[1:]))"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--quant", default="keep")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        return kill_loop(Path(name), arguments)


def kill_loop(folder: Path, arguments: argparse.Namespace) -> int:
    chance = random.Random(arguments.seed)
    source, output = folder / "source", folder / "m.colibri"
    write_folder(source, arguments.layers)
    start = time.monotonic()
    run(source, output, arguments.quant).wait()
    seconds = time.monotonic() - start
    expected = digest(output)
    print(f"a whole run: {output.stat().st_size / 1e9:.2f} GB in {seconds:.1f} s")
    output.unlink()
    before = digest_of_folder(source)
    n_killed = n_finished = n_resumed = n_bad = 0
    while n_killed < arguments.kills:
        n_resumed += n_entered(output) > 0
        start = time.monotonic()
        process = run(source, output, arguments.quant)
        try:
            status = process.wait(chance.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            n_killed += 1
        else:
            n_finished += 1
            # The machine may have been busy before: kills are to hit runs, not what follows them.
            seconds = min(seconds, time.monotonic() - start)
            if status:
                n_bad += 1
                print(f"status {status}: {process.stderr.read() if process.stderr else ''}")
        if output.exists():
            n_bad += digest(output) != expected
            output.unlink()
            for left in (journal_path(output), folder / "m.colibri.part"):
                left.unlink(missing_ok=True)
        print(f"\r{n_killed} killed, {n_entered(output)} items kept ", end="", flush=True)
    status = run(source, output, arguments.quant).wait()
    left = sorted(path.name for path in folder.iterdir())
    is_same = status == 0 and digest(output) == expected and left == ["m.colibri", "source"]
    is_same = is_same and digest_of_folder(source) == before
    print(
        f"\n{n_killed} killed, {n_resumed} went on with earlier work, {n_finished} finished in "
        f"between, {n_bad} of them wrong; the last one is {'the same' if is_same else 'OTHER'}"
    )
    return int(not is_same or n_bad > 0)


def run(source: Path, output: Path, quant: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, str(source), str(output), "--quant", quant, "--json"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def n_entered(output: Path) -> int:
    found = read_journal(journal_path(output))
    return len(found.records) if found is not None else 0


def digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(2**22):
            state.update(data)
    return state.hexdigest()


def digest_of_folder(folder: Path) -> list[str]:
    return [digest(path) for path in sorted(folder.iterdir())]


if __name__ == "__main__":
    sys.exit(main())
