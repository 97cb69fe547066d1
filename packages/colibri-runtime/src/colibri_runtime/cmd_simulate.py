"""`colibri simulate`: replays recorded routing, every policy at every cache size."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from colibri_format import UsageError, format_size
from colibri_format.command import EXIT_OK, run_command

from .policies import POLICY_NAMES, make_policy
from .policy import Policy
from .simulate import ReplayResult, compare
from .slots import plan_slots
from .trace import Trace, TracePhase, read_trace

DEFAULT_SIZES: Final = "5%,10%,20%,30%"
_BEST: Final = "belady"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs as `argv` asks: 0 done, 1 data or I/O failure, 2 usage."""
    return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    started = time.perf_counter()
    trace = read_trace(arguments.trace)
    if arguments.phase != "all":
        trace = trace.only(TracePhase[arguments.phase.upper()])
    n_blocks = _n_blocks(trace, arguments.experts)
    if not trace.events:
        raise UsageError(
            "trace-empty",
            arguments.trace,
            f"has no events of the phase {arguments.phase}",
            "one event",
            "--phase all",
        )
    sizes = [_slots(text, n_blocks) for text in arguments.sizes.split(",")]
    names = arguments.policies.split(",")
    makers = {name: _maker(name, trace, n_blocks, arguments) for name in names}
    results = compare(trace, makers, sizes)
    seconds = time.perf_counter() - started
    if arguments.json:
        print(json.dumps(_record(trace, n_blocks, results, seconds), indent=1))
    else:
        _show(trace, n_blocks, results, seconds)
    return EXIT_OK


def _n_blocks(trace: Trace, n_experts: int | None) -> int:
    if n_experts is None or not trace.events:
        return trace.n_blocks
    if n_experts < trace.n_experts:
        raise UsageError(
            "bad-option",
            "--experts",
            f"is {n_experts}",
            f"at least {trace.n_experts}, as the trace names expert {trace.n_experts - 1}",
        )
    return trace.n_blocks // trace.n_experts * n_experts


def _slots(text: str, n_blocks: int) -> int:
    """Slots for `20%` of all blocks, or for `1200`."""
    try:
        if text.strip().endswith("%"):
            # As shares of a whole, so that 10 % and 0.1 of 6144 blocks are the same 614.
            n_slots = int(n_blocks * float(text.strip()[:-1]) / 100)
        else:
            n_slots = int(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            "bad-option", "--sizes", f"{text!r} is no size", "10% or a number of experts"
        ) from error
    if n_slots < 1:
        raise UsageError(
            "bad-option", "--sizes", f"{text} of {n_blocks} experts is none", "at least one"
        )
    return n_slots


def _maker(
    name: str, trace: Trace, n_blocks: int, arguments: argparse.Namespace
) -> Callable[[int], Policy]:
    present = {event.layer for event in trace.events}
    per_layer = n_blocks // len(present)
    blocks = [per_layer if layer in present else 0 for layer in range(trace.n_layers)]
    top_k = max(len(event.experts) for event in trace.events)

    def make(n_slots: int) -> Policy:
        quotas = None
        if arguments.per_layer:
            plan = plan_slots(
                n_slots=n_slots, blocks_per_layer=blocks, top_k=top_k, prefetch_depth=0
            )
            quotas = plan.quotas
        return make_policy(
            name,
            n_layers=trace.n_layers,
            n_slots=n_slots,
            n_blocks=n_blocks,
            quotas=quotas,
            lfu_weight=arguments.lfu_weight if name == "hybrid" else None,
        )

    return make


def _record(
    trace: Trace, n_blocks: int, results: dict[int, dict[str, ReplayResult]], seconds: float
) -> dict[str, Any]:
    rows = [
        {
            "n_slots": n_slots,
            "policy": name,
            "hits": result.n_hits,
            "misses": result.n_misses,
            "hit_rate": result.hit_rate,
            "of_belady": _share(result, row[_BEST], 0.0, 1.0),
            "of_belady_first_half": _share(result, row[_BEST], 0.0, 0.5),
            "of_belady_second_half": _share(result, row[_BEST], 0.5, 1.0),
            "missed_bytes": result.missed_bytes,
        }
        for n_slots, row in results.items()
        for name, result in row.items()
    ]
    return {
        "trace": trace.where,
        "n_events": len(trace.events),
        "n_picks": trace.n_picks,
        "n_blocks": n_blocks,
        "seconds": seconds,
        "results": rows,
    }


def _share(result: ReplayResult, best: ReplayResult, first: float, last: float) -> float:
    """Hits as a share of the best possible; 1 where there were none to have."""
    possible = best.hits_within(first, last)
    return result.hits_within(first, last) / possible if possible else 1.0


def _show(
    trace: Trace, n_blocks: int, results: dict[int, dict[str, ReplayResult]], seconds: float
) -> None:
    console = Console(highlight=False)
    console.print(
        f"{Path(trace.where).name}: {len(trace.events)} events, {trace.n_picks} asks, "
        f"{n_blocks} experts"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("slots", "policy", "hit rate", "of Belady", "1st half", "2nd half", "missed"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for n_slots, row in results.items():
        for name, result in row.items():
            shares = [
                f"{_share(result, row[_BEST], *part):.1%}"
                for part in ((0.0, 1.0), (0.0, 0.5), (0.5, 1.0))
            ]
            missed = format_size(result.missed_bytes) if trace.block_bytes else result.n_misses
            slots = f"{n_slots} ({n_slots / n_blocks:.0%})"
            table.add_row(slots, name, f"{result.hit_rate:.1%}", *shares, str(missed))
    console.print(table)
    console.print(f"{seconds:.1f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colibri simulate",
        description="Replays a routing trace from a cold start against each policy and against "
        "Belady's optimum. A layer's experts of one token are asked for at once, as when it runs.",
    )
    parser.add_argument("trace", metavar="TRACE", help="a trace, CSV or .parquet")
    parser.add_argument(
        "--sizes",
        default=DEFAULT_SIZES,
        metavar="LIST",
        help="room for so many experts, or for a share of all; default: %(default)s",
    )
    parser.add_argument(
        "--policies",
        default=",".join(POLICY_NAMES),
        metavar="LIST",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--phase",
        choices=("decode", "prefill", "all"),
        default="decode",
        help="which events are replayed; default: decode",
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="experts of a layer; default: the highest number in the trace, plus one",
    )
    parser.add_argument(
        "--per-layer", action="store_true", help="each layer keeps its own share of the slots"
    )
    parser.add_argument(
        "--lfu-weight", type=float, metavar="W", help="of hybrid: 0 recency to 1 frequency"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser
