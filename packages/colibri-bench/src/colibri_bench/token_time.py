"""Where a token's time goes: a timeline's passes as rows and as sums. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from colibri_runtime.timeline import Pass, Span, SpanKind

SHARES: Final = ("attention", "router", "experts", "dense", "check", "wait", "other")
"""What the computing thread does, in the order in which it is shown; `other` is what no span
covers: the store's bookkeeping, policies and Python itself."""


def token_rows(passed: Pass) -> list[dict[str, Any]]:
    """Every span of a token, in order of its start; times in ms since the token began.

    A read that began in the token before has a negative start. `submit_ms` is None but for reads,
    `layer` None outside the layers.
    """
    return [_row(span, passed.start_ns) for span in sorted(passed.spans, key=_start)]


def token_sums(passed: Pass) -> dict[str, float]:
    """Milliseconds of a token by kind, as `SHARES` names them, and beside them `total`, `reading`
    (at least one read under way), and `n_reads`, `read_mib`."""
    total_ns = passed.end_ns - passed.start_ns
    sums = dict.fromkeys(SHARES, 0)
    for span in passed.spans:
        if span.kind is not SpanKind.READ:
            sums[str(span.kind)] += span.end_ns - span.start_ns
    sums["other"] = total_ns - sum(sums.values())
    reads = [span for span in passed.spans if span.kind is SpanKind.READ]
    return {
        "total": total_ns / 1e6,
        **{kind: ns / 1e6 for kind, ns in sums.items()},
        "reading": _covered_ns(reads, passed) / 1e6,
        "n_reads": len(reads),
        "read_mib": sum(span.n_bytes for span in reads) / 2**20,
    }


def middle_token(passes: Sequence[Pass]) -> Pass:
    """The token that took the median time; of an even number the shorter of the two."""
    ordered = sorted(passes, key=lambda p: p.end_ns - p.start_ns)
    return ordered[(len(ordered) - 1) // 2]


def mean_sums(sums: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each sum over tokens: unlike medians, they add up to the mean token."""
    return {name: fmean(one[name] for one in sums) for name in sums[0]} if sums else {}


def _row(span: Span, start_ns: int) -> dict[str, Any]:
    is_read = span.kind is SpanKind.READ
    return {
        "kind": str(span.kind),
        "layer": None if span.layer < 0 else span.layer,
        "expert": span.expert if is_read else None,
        "submit_ms": (span.submit_ns - start_ns) / 1e6 if is_read else None,
        "start_ms": (span.start_ns - start_ns) / 1e6,
        "end_ms": (span.end_ns - start_ns) / 1e6,
        "n_bytes": span.n_bytes if is_read else None,
        "is_prefetch": span.is_prefetch if is_read else None,
    }


def _covered_ns(reads: Sequence[Span], passed: Pass) -> int:
    """Time of the token in which at least one of `reads` was under way."""
    covered, reached = 0, passed.start_ns
    for span in sorted(reads, key=_start):
        end = min(span.end_ns, passed.end_ns)
        if end > reached:
            covered += end - max(span.start_ns, reached)
            reached = end
    return covered


def _start(span: Span) -> int:
    return span.start_ns
