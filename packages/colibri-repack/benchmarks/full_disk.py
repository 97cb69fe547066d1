"""Fills the disk that a repack writes to, in the middle of it, and goes on when there is room.

python full_disk.py [--kind ext4|tmpfs] [--layers 2] [--folder DIR]      (as root: it mounts)

The output goes to a file system of its own, with room for it when the run begins. Once the journal
has its first entries a file takes all that is left. The run must end with `disk-full` and leave
nothing under the final name; a rerun that still has no room must say so before it writes; when the
file is gone, a rerun must go on with what was entered and give the bytes of an undisturbed run.
Exit status 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kill_loop import COMMAND, digest, digest_of_folder, n_entered
from synthetic_checkpoint import write_folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=["ext4", "tmpfs"], default="ext4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if os.geteuid():
        parser.error("only root may mount")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        return fill(Path(name), arguments)


def fill(folder: Path, arguments: argparse.Namespace) -> int:
    source, whole = folder / "source", folder / "whole.colibri"
    write_folder(source, arguments.layers)
    status, _, _ = finish(begin(source, whole))
    expected, before, size = digest(whole), digest_of_folder(source), whole.stat().st_size
    whole.unlink()
    print(f"an undisturbed run: status {status}, {size} bytes")
    claims = {"the undisturbed run ends well": status == 0}
    with mounted(folder / "disk", arguments.kind, size + size // 4) as disk:
        output, ballast = disk / "m.colibri", disk / "ballast"
        run = begin(source, output)
        while run.poll() is None and not n_entered(output):
            time.sleep(0.01)
        n = n_entered(output)
        print(f"{n} items entered, then filled with {fill_up(ballast)} bytes")
        status, _, error = finish(run)
        print(f"status {status}: {error}")
        claims["items were entered before"] = n > 0
        claims["ends with disk-full"] = status == 1 and error.startswith("error[disk-full]")
        claims["nothing has the final name"] = not output.exists()
        kept = n_entered(output)
        status, _, error = finish(begin(source, output))
        print(f"again without room: status {status}: {error}")
        claims["no room is told beforehand"] = status == 1 and error.startswith("error[disk-full]")
        claims["that keeps what was entered"] = n_entered(output) == kept >= n
        ballast.unlink()
        status, report, error = finish(begin(source, output))
        resumed = report.get("resumed_bytes", 0)
        print(f"with room: status {status}, went on with {resumed} bytes, {kept} items {error}")
        claims["goes on with it"] = status == 0 and resumed > 0
        claims["the bytes of an undisturbed run"] = output.exists() and digest(output) == expected
        left = {path.name for path in disk.iterdir()} - {"lost+found"}
        claims["nothing else is left"] = left == {"m.colibri"}
    claims["the source is as it was"] = digest_of_folder(source) == before
    for claim, holds in claims.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return int(not all(claims.values()))


def begin(source: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, str(source), str(output), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(run: subprocess.Popen[str]) -> tuple[int, dict[str, int], str]:
    """Its exit status, its report, and what it said on stderr."""
    out, error = run.communicate()
    return run.returncode, json.loads(out) if out else {}, error.strip()


def fill_up(path: Path) -> int:
    """Give the file `path` all space that is left; how much that is."""
    taken = 0
    with path.open("wb") as file:
        step = 2**26
        while step >= 4096:
            try:
                os.posix_fallocate(file.fileno(), taken, step)
                taken += step
            except OSError:
                step //= 2
    return taken


@contextlib.contextmanager
def mounted(where: Path, kind: str, size: int) -> Iterator[Path]:
    """A file system of about `size` bytes at the new folder `where`."""
    where.mkdir()
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    else:
        image = where.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        mount = ["mount", "-o", "loop", str(image), str(where)]
    subprocess.run(mount, check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


if __name__ == "__main__":
    sys.exit(main())
