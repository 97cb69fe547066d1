"""Kills repacks at random moments, and compares what comes of it with one that nobody killed.

python kill_loop.py [--kills 60] [--layers 10] [--quant keep] [--volumes 0] [--seed 1]
                    [--folder DIR]

Each process gets SIGKILL between its start and the time that the fastest whole run so far took;
the next one goes on. A run that finishes before it is killed is compared and removed, and another
begins. After the last kill one more run finishes. With `--volumes` the blocks go to so many volumes
in folders of their own, which are compared, too. Exit status 1 if any byte is not as it should be,
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
    parser.add_argument("--volumes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        return kill_loop(Path(name), arguments)


def kill_loop(folder: Path, arguments: argparse.Namespace) -> int:
    chance = random.Random(arguments.seed)
    source, output = folder / "source", folder / "m.colibri"
    volumes = [folder / f"volume{number}" for number in range(1, arguments.volumes + 1)]
    for volume in volumes:
        volume.mkdir()
    write_folder(source, arguments.layers)
    command = [sys.executable, "-c", COMMAND, str(source), str(output), "--json"]
    command += ["--quant", arguments.quant]
    for volume in volumes:
        command += ["--volume", str(volume)]
    start = time.monotonic()
    run(command).wait()
    seconds = time.monotonic() - start
    expected = digests(output, volumes)
    size = sum(path.stat().st_size for path in finished(output, volumes))
    print(f"a whole run: {size / 1e9:.2f} GB in {seconds:.1f} s, {len(expected)} files")
    remove(output, volumes)
    before = digest_of_folder(source)
    n_killed = n_finished = n_resumed = n_bad = 0
    while n_killed < arguments.kills:
        is_resumed = n_entered(output) > 0
        n_resumed += is_resumed
        start = time.monotonic()
        process = run(command)
        try:
            status = process.wait(chance.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            n_killed += 1
        else:
            n_finished += 1
            # The machine may have been busy before: kills are to hit runs, not what follows them. A
            # run that goes on is shorter, and would leave the next ones no time to enter anything.
            if not is_resumed:
                seconds = min(seconds, time.monotonic() - start)
            if status:
                n_bad += 1
                print(f"status {status}: {process.stderr.read() if process.stderr else ''}")
        # A kill between two names leaves some of them; the one of the model comes last.
        if output.exists():
            n_bad += digests(output, volumes) != expected
            remove(output, volumes)
        print(f"\r{n_killed} killed, {n_entered(output)} items kept ", end="", flush=True)
    status = run(command).wait()
    left = sorted(path.name for path in folder.iterdir() if path.is_file())
    is_same = status == 0 and digests(output, volumes) == expected and left == ["m.colibri"]
    is_same = is_same and digest_of_folder(source) == before
    print(
        f"\n{n_killed} killed, {n_resumed} went on with earlier work, {n_finished} finished in "
        f"between, {n_bad} of them wrong; the last one is {'the same' if is_same else 'OTHER'}"
    )
    return int(not is_same or n_bad > 0)


def run(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def n_entered(output: Path) -> int:
    found = read_journal(journal_path(output))
    return len(found.records) if found is not None else 0


def finished(output: Path, volumes: list[Path]) -> list[Path]:
    """The output and all that stands in the volumes' folders, in order."""
    return [output, *(path for volume in volumes for path in sorted(volume.iterdir()))]


def digests(output: Path, volumes: list[Path]) -> list[tuple[str, str]]:
    return [(path.name, digest(path)) for path in finished(output, volumes)]


def remove(output: Path, volumes: list[Path]) -> None:
    """Removes what is finished, and what a kill just behind the last name may have left."""
    left = [journal_path(output), output.with_name(f"{output.name}.part")]
    for path in finished(output, volumes) + left:
        path.unlink(missing_ok=True)


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
