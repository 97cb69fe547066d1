"""Carries out runs of a decode benchmark: one child process each, cold, under its limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from .cgroup import MemoryGroup
from .decode_plan import ALLOWANCE, Run
from .page_cache import COLD_SHARE, CacheState, drop_caches, read_all, resident_share

_STDERR_CHARACTERS: Final = 400
_TIMEOUT_S: Final = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run gave: `answer` of the child, or why there is none.

    `resident_share` is what of its model the page cache held before it began, `group` the memory
    cgroup it was to enter, `applied_bytes` the limit that the kernel says that group had, `model`
    and `inode` the file that was to be run, `command` what was executed.
    """

    round: int
    limit: str
    limit_bytes: int | None
    arm: str
    is_ours: bool
    is_cold: bool
    cache_state: str
    peak_bytes: int | None
    n_killed: int
    resident_share: float | None = None
    group: str | None = None
    applied_bytes: int | None = None
    model: str = ""
    inode: int | None = None
    command: Sequence[str] = ()
    answer: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every run does: files, tokens before and while time is taken, length of the cache."""

    file: Path
    gguf: Path | None
    n_warm: int
    n_tokens: int
    n_context: int


def run_all(runs: Sequence[Run], work: Work) -> Iterator[Outcome]:
    """The outcome of each run as it comes."""
    for run in runs:
        yield run_one(run, work)


def run_one(run: Run, work: Work) -> Outcome:
    """Empties the page cache, then lets the child generate in a group of its own.

    A child that is killed or fails is an outcome, not an error.

    Raises:
        StorageError: `no-cgroup` when the run has a limit and none can be set.
    """
    files = [path for path in (work.file, work.gguf) if path is not None]
    state = drop_caches(*files)
    model = work.file if run.arm.is_ours else work.gguf
    resident = None
    if run.limit.size_bytes is None:
        # Without a limit engines are compared in memory: their files are read beforehand.
        if model is not None:
            read_all(model)
            state = CacheState(False, "without a limit: model read into memory beforehand")
    elif model is not None:
        resident = resident_share(model)
        if resident is not None and resident > COLD_SHARE:
            state = CacheState(False, f"{state.how}, which left {resident:.0%} of {model.name}")
    argv = [sys.executable, "-m", run.arm.module, json.dumps(_request(run, work))]
    peak, applied, name, n_killed = None, None, None, 0
    if run.limit.size_bytes is None:
        answer, failure = _generate(argv)
    else:
        with MemoryGroup("decode", run.limit.size_bytes) as group:
            name, applied = group.name, group.applied_bytes
            answer, failure = _generate(group.command(argv))
            peak, n_killed = group.peak_bytes, group.n_killed
    if n_killed:
        failure = "killed: memory ran out"
    return Outcome(
        round=run.round,
        limit=run.limit.name,
        limit_bytes=run.limit.size_bytes,
        arm=run.arm.name,
        is_ours=run.arm.is_ours,
        is_cold=state.is_cold,
        cache_state=state.how,
        peak_bytes=peak,
        n_killed=n_killed,
        resident_share=resident,
        group=name,
        applied_bytes=applied,
        model="" if model is None else str(model.resolve()),
        inode=None if model is None else model.stat().st_ino,
        command=argv,
        answer=answer,
        failure=failure,
    )


def _request(run: Run, work: Work) -> dict[str, Any]:
    request: dict[str, Any] = {
        "prompt": list(run.prompt),
        "n_warm": work.n_warm,
        "n_tokens": work.n_tokens,
        "is_resident": run.limit.size_bytes is None,
        "is_timed": run.is_timed,
        "parent": os.getpid(),
    }
    if not run.arm.is_ours:
        return request | run.arm.options | {"gguf": str(work.gguf), "n_context": work.n_context}
    config = run.arm.options | {"context": work.n_context}
    if run.limit.size_bytes is not None:
        config["memory_bytes"] = run.limit.size_bytes - ALLOWANCE
    return request | {"file": str(work.file), "config": config}


def _generate(argv: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The child's answer, or what it said at last."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"not done after {_TIMEOUT_S} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {}, done.stderr.strip()[-_STDERR_CHARACTERS:] or f"exit {done.returncode}"
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except json.JSONDecodeError as error:
        return {}, f"no answer: {error}"
    return answer, ""
