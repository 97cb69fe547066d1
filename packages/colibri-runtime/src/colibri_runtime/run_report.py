"""What a run says of itself at its end, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colibri_format import format_size

from .budget import MemoryPlan
from .config import RunConfig
from .disk import IoReport
from .figures import Phase, explain_stall
from .passes import PassStats
from .pool import PoolReport
from .prefetch import PrefetchGate
from .stats import LayerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything there is to say of a run.

    `prefill` is the prompt's pass, which also gives the first token; `decode` the rest. `stop`
    says why generation ended. `peak_rss_bytes` less `baseline_rss_bytes`, both None where the
    system does not tell, is what the budget is to be compared with: the baseline is the process
    before loading, with interpreter, libraries and tokenizer.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    text: str
    stop: str
    prefill: Phase
    decode: Phase
    layers: Sequence[LayerStats]
    plan: MemoryPlan
    config: RunConfig
    io: IoReport
    pool: PoolReport
    backend: str
    context: int
    baseline_rss_bytes: int | None
    peak_rss_bytes: int | None
    load_seconds: float
    backend_summary: str = ""
    backend_notes: Sequence[str] = ()
    gate: PrefetchGate | None = None
    passes: Sequence[PassStats] = ()
    warnings: Sequence[str] = ()

    @property
    def main(self) -> Phase:
        """The phase the figures are of: decoding, or the prompt where nothing was decoded."""
        return self.decode if self.decode.n_tokens else self.prefill

    @property
    def peak_above_baseline(self) -> int | None:
        """Bytes of the peak that loading and running added."""
        if self.peak_rss_bytes is None or self.baseline_rss_bytes is None:
            return None
        return max(0, self.peak_rss_bytes - self.baseline_rss_bytes)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change when compute waited long."""
        return explain_stall(self.main, self.plan, self.config, self.io)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was planned or granted less well than asked for."""
        warnings = [f"{warning}: colibri repair restores it" for warning in self.warnings]
        return (*warnings, *self.backend_notes, *self.plan.notes, *self.pool.notes)

    def record(self, *, with_layers: bool = False) -> dict[str, Any]:
        """The report as JSON takes it; shares and rates are None where there is nothing to rate."""
        main = self.main
        total = self.prefill.stats.plus(self.decode.stats)
        record: dict[str, Any] = {
            "text": self.text,
            "tokens": list(self.tokens),
            "prompt_tokens": list(self.prompt),
            "stop": self.stop,
            "tokens_per_s": self.decode.tokens_per_s,
            "prefill_tokens_per_s": self.prefill.tokens_per_s,
            "hit_rate": main.stats.hit_rate if main.stats.n_asks else None,
            "bytes_per_token": main.bytes_per_token,
            "stall_share": main.stall_share,
            "prefetch": {
                "depth": "auto" if self.gate is not None else self.config.prefetch_depth,
                "from": str(self.config.prefetch_from),
                "auto": self._auto(),
                "recall": total.recall,
                "bytes": total.prefetch_bytes,
                "wasted_bytes": total.wasted_bytes,
            },
            "budget_bytes": self.plan.budget_bytes,
            "peak_memory": {
                "rss_bytes": self.peak_rss_bytes,
                "baseline_bytes": self.baseline_rss_bytes,
                "above_baseline_bytes": self.peak_above_baseline,
                "counted_bytes": self.plan.total_bytes,
            },
            "plan": self.plan.as_dict(),
            "context": self.context,
            "backend": self.backend,
            "backend_summary": self.backend_summary or self.backend,
            "kv_dtype": self.config.kv_dtype,
            "batch_size": self.config.batch_size,
            "io_report": {**asdict(self.io), "mode": self.io.mode.value},
            "pool": asdict(self.pool),
            "load_seconds": self.load_seconds,
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
            "notes": list(self.notes),
            "advice": list(self.advice),
        }
        if with_layers:
            record["layers"] = [layer.as_dict() for layer in self.layers]
            record["passes"] = [passed.as_dict() for passed in self.passes]
        return record

    def rows(self) -> list[tuple[str, str]]:
        """The report as lines of name and value."""
        stats = self.main.stats
        rows = [
            ("prompt", _speed(self.prefill, "token")),
            ("generated", f"{_count(len(self.tokens), 'token')}, ended by {self.stop}"),
        ]
        if self.decode.n_tokens:
            rows.append(("speed", _speed(self.decode, "further token")))
        if stats.n_asks:
            rows.append(
                (
                    "hit rate",
                    f"{stats.hit_rate:.1%} of {stats.n_asks} asks; {stats.n_lates} late, "
                    f"{stats.n_misses} missed",
                )
            )
        if self.main.bytes_per_token is not None:
            mode = f"{self.io.mode.value}, {self.io.engine}"
            if self.io.reason:
                mode += f"; not direct: {self.io.reason}"
            rows.append(
                ("read", f"{format_size(int(self.main.bytes_per_token))} per token ({mode})")
            )
        if stats.recall is not None:
            waste = format_size(stats.wasted_bytes)
            rows.append(("prefetch", f"{stats.recall:.0%} foreseen, {waste} wasted"))
        if self.gate is not None and self.gate.trials:
            rows.append(("prefetch auto", self.gate.verdict()))
        if self.main.stall_share is not None:
            rows.append(("stalled", f"{self.main.stall_share:.1%} of the time"))
        kv = f", keys and values {self.config.kv_dtype}" if self.config.kv_dtype else ""
        rows.append(("backend", f"{self.backend_summary or self.backend}{kv}"))
        rows.append(("memory", self._memory()))
        return rows

    def _auto(self) -> dict[str, Any] | None:
        """What became of prefetch where that was found out by trial."""
        if self.gate is None:
            return None
        return {
            "is_on": self.gate.is_set_on,
            "depth": self.gate.set_depth,
            "verdict": self.gate.verdict(),
            "trials": [asdict(trial) for trial in self.gate.trials],
        }

    def _memory(self) -> str:
        counted = (
            f"{format_size(self.plan.total_bytes)} planned of a budget of "
            f"{format_size(self.plan.budget_bytes)}"
        )
        if self.peak_above_baseline is None or self.baseline_rss_bytes is None:
            return f"{counted}; the system tells no peak"
        return (
            f"peak {format_size(self.peak_above_baseline)}, {counted}; beside "
            f"{format_size(self.baseline_rss_bytes)} of interpreter, libraries and tokenizer"
        )


def plan_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """A memory plan as lines of name and value."""
    share = f"{plan.n_slots} of {plan.n_blocks} experts"
    hits = plan.slots.expected_hit_share
    expected = [] if hits is None else [("hits to expect", f"{hits:.0%} or more, by the history")]
    lent = []
    if plan.n_lent:
        n_more = _count(plan.n_lent, "expert")
        lent = [("lent to it", f"{n_more} more, while context and batches leave memory unused")]
    return [
        ("dense tensors", format_size(plan.dense_bytes)),
        ("KV cache", format_size(plan.kv_bytes)),
        ("working memory", format_size(plan.working_bytes)),
        ("bookkeeping", format_size(plan.overhead_bytes)),
        (
            "pool",
            f"{format_size(plan.pool_bytes)}: {_slots(plan)} for {share}; "
            f"at most {plan.slots.n_prefetch} reading ahead",
        ),
        *lent,
        *expected,
        ("total", f"{format_size(plan.total_bytes)} ({plan.total_bytes} bytes)"),
        ("budget", f"{format_size(plan.budget_bytes)} ({plan.budget_bytes} bytes)"),
        ("smallest", f"{format_size(plan.smallest_bytes)} ({plan.smallest_bytes} bytes)"),
        ("all experts", f"{format_size(plan.largest_bytes)} ({plan.largest_bytes} bytes)"),
    ]


def _slots(plan: MemoryPlan) -> str:
    """`slots of 3 MiB`, or `40 slots of 3 MiB, 40 of 2.5 MiB` where there are several sizes."""
    classes = plan.slots.classes
    if len(classes) == 1:
        return f"slots of {format_size(plan.slot_bytes)}"
    parts = [f"{c.plan.n_slots} of {format_size(c.slot_bytes)}" for c in reversed(classes)]
    return "slots, " + ", ".join(parts) + f" (equal ones would waste {plan.equal_waste:.0%}),"


def _speed(phase: Phase, what: str) -> str:
    rate = phase.tokens_per_s
    speed = f"{_count(phase.n_tokens, what)} in {phase.seconds:.2f} s"
    if rate is None:
        return speed
    return f"{speed}: {rate:.0f} tokens/s" if rate >= 100 else f"{speed}: {rate:.3g} tokens/s"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
