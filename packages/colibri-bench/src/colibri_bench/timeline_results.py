"""Results of runs whose reads and steps were written down."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .decode_run import Outcome
from .results import Results


def timeline_results(
    timed: Sequence[Outcome],
    untimed: Sequence[Outcome],
    command: Sequence[str],
    machine: dict[str, Any],
    is_complete: bool,
) -> Results:
    """Rows: the spans of the token of median length under each limit (`token_time.token_rows`).

    `extra["tokens"]` has means over all measured tokens, a row for each limit. The notes say
    what writing it down cost, next to runs of ours that were not timed.
    """
    rows: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    notes = []
    for outcome in timed:
        found = outcome.answer.get("timeline")
        if not found:
            notes.append(f"{outcome.limit}: no timeline ({outcome.failure})")
            continue
        rows += [{"limit": outcome.limit, **row} for row in found["rows"]]
        tokens.append({"limit": outcome.limit, "n_tokens": found["n_tokens"], **found["sums"]})
        speed = outcome.answer["tokens_per_s"]
        others = [
            o.answer["tokens_per_s"]
            for o in untimed
            if o.is_ours and o.limit == outcome.limit and o.answer
        ]
        if others:
            notes.append(
                f"{outcome.limit}: {speed:.2f} tokens/s while timed, {median(others):.2f} "
                f"({min(others):.2f}-{max(others):.2f}) while not"
            )
    return Results(
        kind="timeline",
        command=command,
        machine=machine,
        rows=rows,
        notes=notes,
        is_complete=is_complete,
        extra={"tokens": tokens},
    )
