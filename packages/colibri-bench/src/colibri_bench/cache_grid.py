"""What a replay of a routing trace says about cache sizes. Pure but for the replay itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from colibri_format import UsageError
from colibri_runtime.policies import POLICY_NAMES, make_policy
from colibri_runtime.policy import Policy
from colibri_runtime.simulate import ReplayResult, compare
from colibri_runtime.trace import Trace

BELADY: Final = "belady"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePoint:
    """One policy with room for `n_slots` experts, a `share` of all; bytes None where unknown."""

    policy: str
    share: float
    n_slots: int
    pool_bytes: int | None
    hit_rate: float
    of_belady: float
    misses_per_token: float
    bytes_per_token: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def parse_shares(text: str) -> list[float]:
    """`5%,10%,50%` as shares, ascending.

    Raises:
        UsageError: `bad-sizes`.
    """
    try:
        shares = sorted({float(part.strip().removesuffix("%")) / 100 for part in text.split(",")})
    except ValueError as error:
        raise _bad_sizes(text) from error
    if not all(0 < share <= 1 for share in shares):
        raise _bad_sizes(text)
    return shares


def count_tokens(trace: Trace) -> int:
    """Passes through the model: a generated token, or a batch of a prompt."""
    return len({(event.turn, event.phase, event.step) for event in trace.events})


def measure(
    trace: Trace,
    shares: Sequence[float],
    names: Sequence[str] = POLICY_NAMES,
    *,
    n_blocks: int | None = None,
    block_bytes: int | None = None,
) -> Iterator[list[CachePoint]]:
    """Every policy at one size after the other, Belady's optimum among them.

    `n_blocks` is how many blocks the model has, None for as many as the trace shows;
    `block_bytes` the size of one, None for what the trace states.

    Raises:
        UsageError: `unknown-policy`, `trace-empty`.
    """
    if not trace.events:
        raise UsageError("trace-empty", trace.where, "has no events", "at least one")
    total = max(n_blocks or 0, trace.n_blocks)
    size = block_bytes
    if size is None and trace.block_bytes:
        size = max(trace.block_bytes)
    # Fewer slots than one layer asks for at once are served in rounds, which no replay does.
    largest = max(len(event.experts) for event in trace.events)
    by_slots = {max(largest, int(share * total)): share for share in shares}
    makers: Mapping[str, Callable[[int], Policy]] = {
        name: _maker(name, trace, total) for name in names
    }
    n_tokens = count_tokens(trace)
    for n_slots, share in by_slots.items():
        results = compare(trace, makers, [n_slots])[n_slots]
        yield [
            CachePoint(
                policy=name,
                share=share,
                n_slots=n_slots,
                pool_bytes=None if size is None else n_slots * size,
                hit_rate=result.hit_rate,
                of_belady=_of_belady(result, results[BELADY]),
                misses_per_token=result.n_misses / n_tokens,
                bytes_per_token=None if size is None else result.n_misses * size / n_tokens,
            )
            for name, result in results.items()
        ]


def find_knee(points: Sequence[tuple[float, float]]) -> float | None:
    """The size past which more room brings clearly less: where a rising curve bends most.

    That is the point farthest above the line from the first to the last (Satopaa et al. 2011,
    "Finding a Kneedle in a Haystack", section III). None with fewer than three points or without
    a bend.
    """
    ordered = sorted(points)
    if len(ordered) < 3:
        return None
    (x0, y0), (x1, y1) = ordered[0], ordered[-1]
    if x1 == x0 or y1 <= y0:
        return None
    heights = [(y - y0) / (y1 - y0) - (x - x0) / (x1 - x0) for x, y in ordered]
    best = max(range(len(ordered)), key=heights.__getitem__)
    return ordered[best][0] if heights[best] > 0.02 else None


def size_for(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """The least size that reaches the hit rate `wanted`, between measured ones by a straight line.

    None where even the largest does not.
    """
    ordered = sorted(points)
    for place, (size, rate) in enumerate(ordered):
        if rate < wanted:
            continue
        if place == 0:
            return size
        before, lower = ordered[place - 1]
        return before + (size - before) * (wanted - lower) / (rate - lower)
    return None


def curve(points: Sequence[CachePoint], policy: str) -> list[tuple[float, float]]:
    """Share and hit rate of one policy."""
    return [(point.share, point.hit_rate) for point in points if point.policy == policy]


def _maker(name: str, trace: Trace, n_blocks: int) -> Callable[[int], Policy]:
    # Made once here, so that an unknown name is refused before any replay.
    make_policy(name, n_layers=trace.n_layers, n_slots=1)
    return lambda n_slots: make_policy(
        name, n_layers=trace.n_layers, n_slots=n_slots, n_blocks=n_blocks
    )


def _of_belady(result: ReplayResult, best: ReplayResult) -> float:
    return result.n_hits / best.n_hits if best.n_hits else 1.0


def _bad_sizes(text: str) -> UsageError:
    return UsageError(
        "bad-sizes", f"--sizes {text}", "is no list of shares", "above 0 % to 100 %, as 5%,10%,50%"
    )
