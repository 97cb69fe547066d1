"""What is wrong with runs of a decode benchmark: claims that what was observed denies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from colibri_format import format_size

from .decode_run import Outcome

_SLACK: Final = 16 * 2**20
"""The kernel rounds limits to pages and charges in batches; this is far more."""


def check_outcomes(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each kind of mistake that was found; none where all is as claimed."""
    limited = [o for o in outcomes if o.limit_bytes is not None]
    found = (
        (
            "NOT COLD",
            [o for o in limited if not o.is_cold],
            "the page cache may have held part of the model beforehand, outside the limit",
        ),
        (
            "LIMIT NOT APPLIED",
            [o for o in limited if _is_unlimited(o)],
            "these runs may have held more memory than they were given",
        ),
        (
            "NOT DIRECT",
            [o for o in outcomes if o.answer.get("io_mode") not in (None, "direct")],
            "our engine read through the page cache" + _reason(outcomes),
        ),
        (
            "OTHER FILE",
            [o for o in outcomes if _is_other_file(o)],
            "the other engine had mapped another file than the one named",
        ),
    )
    return [f"{name}: {_name(runs)}: {what}" for name, runs, what in found if runs]


def check_swap(n_swap_bytes: int, is_swap_limited: bool) -> list[str]:
    """Whether memory beyond a limit could have gone to swap unseen."""
    if not n_swap_bytes or is_swap_limited:
        return []
    return [
        f"SWAP: {format_size(n_swap_bytes)} of swap are on and the limit does not count them: "
        "swapoff -a, or count swap (swapaccount=1)"
    ]


def _is_unlimited(outcome: Outcome) -> bool:
    """Whether what the kernel says of a run's limit, group or peak is not what was asked for."""
    limit = outcome.limit_bytes or 0
    applied, peak = outcome.applied_bytes, outcome.peak_bytes
    if applied is None or applied > limit or (peak is not None and peak > limit + _SLACK):
        return True
    if not outcome.answer:
        return False
    group = outcome.answer.get("memory_group")
    if group is None or outcome.group is None:
        return outcome.group is not None
    if str(group).rpartition("/")[2] != outcome.group:
        return True
    held = outcome.answer.get("peak_rss_bytes")
    # Mapped pages of the model count for both; the group's peak is never far below.
    return peak is not None and held is not None and peak < held // 2


def _is_other_file(outcome: Outcome) -> bool:
    mapped = outcome.answer.get("mapped")
    if not mapped:
        return False
    # By name too: what /proc says of inodes differs from stat on overlay file systems.
    return outcome.inode not in mapped.values() and outcome.model not in mapped


def _reason(outcomes: Iterable[Outcome]) -> str:
    reasons = {o.answer["io_reason"] for o in outcomes if o.answer.get("io_reason")}
    return f" ({'; '.join(sorted(reasons))})" if reasons else ""


def _name(outcomes: Iterable[Outcome]) -> str:
    named = list(dict.fromkeys(f"{o.arm} at {o.limit}" for o in outcomes))
    return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
