"""What the runs of a decode benchmark come to: medians, spreads, and ratios to the peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .decode_run import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm under one limit; figures are medians over its rounds, None where none came.

    `ratio` is the median over rounds of our tokens/s to those of the best peer arm (by median)
    in the same round, `ratio_least` and `ratio_most` are of single rounds; given for our own arms.
    """

    limit: str
    arm: str
    is_ours: bool
    n_runs: int
    n_failed: int
    failure: str
    tokens_per_s: float | None
    slowest: float | None
    fastest: float | None
    ratio: float | None
    ratio_least: float | None
    ratio_most: float | None
    mib_per_token: float | None
    needed_mib_per_token: float | None
    hit_rate: float | None
    stall_share: float | None
    faults_per_token: float | None
    peak_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each limit and arm, in the order in which they first came."""
    keys = list(dict.fromkeys((o.limit, o.arm) for o in outcomes))
    rows = []
    for limit, arm in keys:
        of_arm = [o for o in outcomes if (o.limit, o.arm) == (limit, arm)]
        good = [o for o in of_arm if o.answer]
        speeds = [o.answer["tokens_per_s"] for o in good]
        failures = [o.failure for o in of_arm if o.failure]
        peaks = [o.peak_bytes for o in good if o.peak_bytes is not None]
        ratios = _ratios(outcomes, limit, good) if of_arm[0].is_ours else []
        rows.append(
            Row(
                limit=limit,
                arm=arm,
                is_ours=of_arm[0].is_ours,
                n_runs=len(of_arm),
                n_failed=len(failures),
                failure=failures[0] if failures else "",
                tokens_per_s=_median(speeds),
                slowest=min(speeds, default=None),
                fastest=max(speeds, default=None),
                ratio=_median(ratios),
                ratio_least=min(ratios, default=None),
                ratio_most=max(ratios, default=None),
                mib_per_token=_median(_each(good, "read_bytes", 2**20)),
                needed_mib_per_token=_median(_each(good, "needed_bytes", 2**20)),
                hit_rate=_median([o.answer["hit_rate"] for o in good if "hit_rate" in o.answer]),
                stall_share=_median(_stalls(good)),
                faults_per_token=_median(_each(good, "n_major_faults", 1)),
                peak_bytes=max(peaks, default=None),
            )
        )
    return rows


def same_tokens(outcomes: Iterable[Outcome]) -> bool:
    """Whether all engines made the same tokens of the same prompts.

    llama.cpp names no number for a token that ends inside a character: it is passed over.
    """
    by_round: dict[int, list[int]] = {}
    for outcome in outcomes:
        if not outcome.answer:
            continue
        tokens = outcome.answer["tokens"]
        first = by_round.setdefault(outcome.round, tokens)
        longer, shorter = (first, tokens) if len(first) >= len(tokens) else (tokens, first)
        rest = iter(longer)
        if not all(token in rest for token in shorter):
            return False
        by_round[outcome.round] = longer
    return True


def _ratios(outcomes: Sequence[Outcome], limit: str, ours: Sequence[Outcome]) -> list[float]:
    """Ours to the best peer arm, round by round; none without a peer."""
    peers: dict[str, dict[int, float]] = {}
    for outcome in outcomes:
        if outcome.limit == limit and not outcome.is_ours and outcome.answer:
            speed = outcome.answer["tokens_per_s"]
            peers.setdefault(outcome.arm, {})[outcome.round] = speed
    if not peers:
        return []
    best = max(peers.values(), key=lambda speeds: median(speeds.values()))
    return [o.answer["tokens_per_s"] / best[o.round] for o in ours if best.get(o.round)]


def _each(outcomes: Iterable[Outcome], name: str, unit: float) -> list[float]:
    """A count per token, in `unit`s; of a peer that does not tell it, none."""
    return [
        o.answer[name] / unit / max(1, o.answer["n_tokens"]) for o in outcomes if name in o.answer
    ]


def _stalls(outcomes: Iterable[Outcome]) -> list[float]:
    return [
        o.answer["stall_s"] / sum(o.answer["times_s"]) for o in outcomes if "stall_s" in o.answer
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
