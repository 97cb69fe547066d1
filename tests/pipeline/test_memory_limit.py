"""The budget holds where it counts: under a cgroup limit that kills who exceeds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.memory_group import Group, memory_group
from helpers.random_colibri import make_model, write_random_colibri

pytestmark = pytest.mark.memory

MIB = 2**20
BUDGET = 96 * MIB
ALLOWANCE = 64 * MIB
"""For interpreter, libraries and tokenizer, which the budget leaves out: measured 35 to 45 MiB."""
LIMIT = BUDGET + ALLOWANCE
RUN = "import sys; from colibri_runtime.cmd_run import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def group() -> Iterator[Group]:
    with memory_group(LIMIT) as group:
        yield group


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
