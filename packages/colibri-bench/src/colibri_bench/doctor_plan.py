"""What a machine's figures mean for a model: findings in words, and the speed to expect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

from colibri_format import format_size

TYPICAL_HITS: Final = ((0.0, 0.0), (0.05, 0.42), (0.1, 0.6), (0.2, 0.78), (0.3, 0.88), (0.5, 0.92))
"""Share of the experts that fits, and hit rate: the default policy on a trace of Qwen3-30B-A3B
(128 experts, 128 tokens from a cold start; `colibri bench cache`). That is a model with a strong
skew; others lie between it and none at all (`SKEW`)."""

SKEW: Final = 0.5
"""Where between no skew and that trace a model is expected, for want of its own trace. A model of
OLMoE's shape, a quarter of the experts taking 57 % of the picks, had 35, 65 and 86 % hits with room
for 13, 40 and 69 % of them (`colibri bench decode`, 25, 50 and 75 %); this gives 39, 65, 82."""

HIDDEN: Final = 0.5
"""Share of the shorter of computing and reading that is hidden behind the longer: a layer's reads
only behind its own hits, unless they were foreseen (docs/store.md)."""

_MOST_OF_A_ROTATING_DISK: Final = 0.35e9
_BUDGETS: Final = (0.25, 0.5, 0.75, 1.0)


class Grade(StrEnum):
    """How a finding is to be taken."""

    GOOD = "ok"
    FAIR = "note"
    BAD = "slow"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was found, and what to change where that is not good."""

    subject: str
    found: str
    grade: Grade
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was measured and looked up; None where the system does not tell."""

    kernel: str
    engines: dict[str, str]
    """Engine by name: empty if it reads directly, else why not."""
    file_system: str | None
    is_rotational: bool | None
    disk_bytes_per_s: float | None
    memory_bytes_per_s: float
    """Of all processors together, which is what computes."""
    available_bytes: int | None
    huge_pages: str | None
    memlock_bytes: int | None
    n_cpus: int
    cpu: str
    native: str
    """Empty where the C kernels are loaded, else why not."""
    isa: str
    leftovers: tuple[str, ...] = ()
    """Groups and files of commands that are no more."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token of a model costs: bytes computed with, bytes of them in experts."""

    file_bytes: int
    n_blocks: int
    block_bytes: int
    dense_bytes: int
    expert_bytes: int
    smallest_budget: int
    largest_budget: int


@dataclass(frozen=True, slots=True)
class Expectation:
    """Tokens a second with a budget: expected, with hits as in `TYPICAL_HITS`, without any skew."""

    budget_bytes: int
    share: float
    expected: float
    typical: float
    uniform: float
    bound: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def judge(probe: Probe) -> list[Finding]:
    """Everything looked at, with what to change."""
    return [
        *_judge_engines(probe),
        _judge_disk(probe),
        _judge_memory(probe),
        _judge_huge_pages(probe),
        _judge_memlock(probe),
        _judge_compute(probe),
        *_judge_leftovers(probe),
    ]


def expect(cost: ModelCost, probe: Probe) -> list[Expectation]:
    """The speed at several budgets: computing, reading what is missed, and what hides of both."""
    rate = probe.disk_bytes_per_s
    compute_s = (cost.dense_bytes + cost.expert_bytes) / probe.memory_bytes_per_s
    found = []
    budgets = {max(cost.smallest_budget, int(s * cost.largest_budget)) for s in _BUDGETS}
    for budget in sorted(budgets):
        pool = max(0, budget - cost.smallest_budget) + cost.block_bytes
        share = min(1.0, pool / (cost.n_blocks * cost.block_bytes)) if cost.n_blocks else 1.0
        likely = share + SKEW * (typical_hits(share) - share)
        readings = []
        for hits in (likely, typical_hits(share), share):
            missed = (1 - hits) * cost.expert_bytes
            readings.append(0.0 if not missed else missed / rate if rate else float("inf"))
        speeds = [1 / _token_s(compute_s, reading_s) for reading_s in readings]
        bound = "the disk" if readings[0] > compute_s else "memory and processor"
        found.append(Expectation(budget, share, speeds[0], speeds[1], speeds[2], bound))
    return found


def _token_s(compute_s: float, reading_s: float) -> float:
    longer, shorter = max(compute_s, reading_s), min(compute_s, reading_s)
    return longer + (1 - HIDDEN) * shorter


def typical_hits(share: float) -> float:
    """The hit rate of `TYPICAL_HITS` with room for this share, by straight lines; 1 for all."""
    points = [*TYPICAL_HITS, (1.0, 1.0)]
    for (x0, y0), (x1, y1) in pairwise(points):
        if share <= x1:
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return 1.0


def advise(cost: ModelCost, expected: Sequence[Expectation], available: int | None) -> list[str]:
    """Which budget to choose, in words."""
    words = [
        f"a token computes with {format_size(cost.dense_bytes + cost.expert_bytes)}, of which "
        f"{format_size(cost.expert_bytes)} are experts; the smallest budget that works is "
        f"{format_size(cost.smallest_budget)}"
    ]
    if available is None:
        return words
    if cost.smallest_budget > available:
        words.append(
            f"only {format_size(available)} of memory are available: this model does not run here; "
            "a smaller quantisation or a shorter --context may"
        )
    elif cost.largest_budget <= 0.8 * available:
        words.append(f"all of it fits: --memory {_budget(cost.largest_budget)}")
    else:
        room = int(0.8 * available)
        best = [e for e in expected if e.budget_bytes <= room] or list(expected[:1])
        words.append(
            f"give it what you can spare: --memory {_budget(room)} leaves a fifth of what is "
            f"available to the rest; expect {best[-1].expected:.1f} tokens/s or more"
        )
    return words


def _budget(size_bytes: int) -> str:
    return f"{-(-size_bytes // 2**20)}M"


def _judge_leftovers(probe: Probe) -> list[Finding]:
    if not probe.leftovers:
        return []
    advice = "remove them: rmdir for control groups, rm for files"
    return [Finding("left over", ", ".join(probe.leftovers), Grade.FAIR, advice)]


def _judge_engines(probe: Probe) -> list[Finding]:
    findings = []
    for name, refusal in probe.engines.items():
        if not refusal:
            findings.append(Finding(name, "reads directly", Grade.GOOD))
        elif any(not other for other in probe.engines.values()):
            findings.append(Finding(name, refusal, Grade.FAIR, "another engine reads directly"))
        else:
            advice = "move the file to a disk with ext4 or xfs; in containers allow io_uring"
            findings.append(Finding(name, refusal, Grade.BAD, advice))
    return findings


def _judge_disk(probe: Probe) -> Finding:
    rate = probe.disk_bytes_per_s
    where = f" ({probe.file_system})" if probe.file_system else ""
    if rate is None:
        return Finding("disk", f"not measured{where}", Grade.FAIR, "name a file to measure with")
    found = f"{rate / 1e9:.2f} GB/s in a short probe{where}"
    if probe.is_rotational and rate < _MOST_OF_A_ROTATING_DISK:
        return Finding("disk", f"{found}, rotational", Grade.BAD, "move the file to an SSD")
    if probe.is_rotational:
        found += ", says it is rotational, as virtual disks do"
    if rate < 0.5e9:
        return Finding("disk", found, Grade.BAD, "an NVMe disk reads 5 times as fast and more")
    return Finding("disk", found, Grade.GOOD if rate >= 1.5e9 else Grade.FAIR)


def _judge_memory(probe: Probe) -> Finding:
    rate = f"read at {probe.memory_bytes_per_s / 1e9:.1f} GB/s"
    if probe.available_bytes is None:
        return Finding("memory", rate, Grade.FAIR, "give --memory: the system does not tell")
    return Finding("memory", f"{format_size(probe.available_bytes)} available, {rate}", Grade.GOOD)


def _judge_huge_pages(probe: Probe) -> Finding:
    if probe.huge_pages in ("always", "madvise"):
        return Finding("huge pages", probe.huge_pages, Grade.GOOD)
    return Finding(
        "huge pages",
        probe.huge_pages or "not known",
        Grade.FAIR,
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: direct reads into them are "
        "up to twice as fast",
    )


def _judge_memlock(probe: Probe) -> Finding:
    if probe.memlock_bytes is None:
        return Finding("memlock", "no limit", Grade.GOOD)
    return Finding(
        "memlock",
        format_size(probe.memlock_bytes),
        Grade.FAIR,
        "io_uring registers its buffers only up to this (ulimit -l); without, it costs little",
    )


def _judge_compute(probe: Probe) -> Finding:
    found = f"{probe.n_cpus} x {probe.cpu}"
    if probe.native:
        return Finding(
            "compute", f"{found}; NumPy: {probe.native}", Grade.BAD, "install a compiler"
        )
    return Finding("compute", f"{found}; C kernels, {probe.isa}", Grade.GOOD)
