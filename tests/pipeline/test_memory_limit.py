"""The budget holds where it counts: under a cgroup limit that kills who exceeds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.random_colibri import make_model, write_random_colibri

pytestmark = pytest.mark.memory

MIB = 2**20
BUDGET = 96 * MIB
ALLOWANCE = 64 * MIB
"""For interpreter, libraries and tokenizer, which the budget leaves out: measured 35 to 45 MiB."""
LIMIT = BUDGET + ALLOWANCE
RUN = "import sys; from colibri_runtime.cmd_run import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Group:
    """A memory cgroup of our own, and the names its version gives to things."""

    folder: Path
    limit_name: str
    peak_name: str
    events_name: str

    def n_killed(self) -> int:
        fields = (self.folder / self.events_name).read_text().split()
        return int(dict(zip(fields[::2], fields[1::2], strict=True)).get("oom_kill", 0))

    def peak(self) -> int:
        return int((self.folder / self.peak_name).read_text())


def own_group() -> tuple[Path, bool] | None:
    """The memory cgroup this process is in, and whether it is of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount = Path("/sys/fs/cgroup/memory")
            inside = mount / path.strip("/")
            return (inside if inside.is_dir() else mount), True
    root = Path("/sys/fs/cgroup")
    return (root, False) if (root / "cgroup.controllers").exists() else None


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        found = own_group()
    except OSError as error:
        pytest.skip(f"there are no cgroups here: {error}")
    if found is None:
        pytest.skip("neither version of memory cgroups is mounted")
    parent, is_v1 = found
    folder = parent / f"colibri-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made below {parent}: {error}")
    try:
        if is_v1:
            group = Group(
                folder, "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"
            )
        else:
            group = Group(folder, "memory.max", "memory.peak", "memory.events")
        try:
            (folder / group.limit_name).write_text(str(LIMIT))
            for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (folder / name).exists():
                    (folder / name).write_text(str(LIMIT) if is_v1 else "0")
        except OSError as error:
            pytest.skip(f"the memory limit of {folder} cannot be set: {error}")
        yield group
    finally:
        folder.rmdir()


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """416 experts of 1.6 MiB: more than four times the limit."""
    path = tmp_path_factory.mktemp("limit") / "large.colibri"
    model = make_model(n_layers=13, hidden=512, width=1024, n_experts=32, top_k=4, head_dim=64)
    write_random_colibri(path, model)
    yield path
    # pytest keeps folders of past runs: not this one.
    path.unlink()


def run_inside(
    group: Group, model_file: Path, memory: int, n_tokens: int
) -> subprocess.CompletedProcess[str]:
    """`colibri run` in a process that enters the group before it becomes Python."""
    script = f'echo $$ > "{group.folder}/cgroup.procs" && exec "$@"'
    options = ["--prompt", "Once upon a time", "--max-tokens", str(n_tokens), "--json"]
    command = [sys.executable, "-c", RUN, str(model_file), "--memory", str(memory), *options]
    return subprocess.run(
        ["sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
        check=False,
    )


def test_a_model_four_times_the_limit_runs_and_is_not_killed(
    group: Group, model_file: Path
) -> None:
    assert model_file.stat().st_size >= 4 * LIMIT

    done = run_inside(group, model_file, BUDGET, 24)

    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    memory = record["peak_memory"]
    print(
        f"\nlimit {LIMIT / MIB:.0f} MiB, peak of the cgroup {group.peak() / MIB:.1f} MiB; "
        f"baseline {memory['baseline_bytes'] / MIB:.1f} MiB, above it "
        f"{memory['above_baseline_bytes'] / MIB:.1f} MiB of a budget of {BUDGET / MIB:.0f} MiB, "
        f"{memory['counted_bytes'] / MIB:.1f} MiB counted; {record['io_report']['mode']}, "
        f"{record['tokens_per_s']:.2f} tokens/s"
    )
    assert len(record["tokens"]) == 24
    assert memory["counted_bytes"] <= BUDGET
    assert memory["above_baseline_bytes"] <= BUDGET
    assert memory["baseline_bytes"] <= ALLOWANCE
    assert group.n_killed() == 0
    assert group.peak() <= LIMIT


def test_the_limit_does_kill_a_run_with_a_larger_budget(group: Group, model_file: Path) -> None:
    """Otherwise the test above would prove nothing."""
    done = run_inside(group, model_file, 3 * LIMIT, 2)

    assert done.returncode != 0
    assert group.n_killed() >= 1
