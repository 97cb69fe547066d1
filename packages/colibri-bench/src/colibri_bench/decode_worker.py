"""Our engine in a process of its own: generates tokens, and says how long they took and why.

Run as `python -m colibri_bench.decode_worker REQUEST`, REQUEST and answer being JSON objects.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import numpy as np

from colibri_runtime import RunConfig, Runtime, Timeline
from colibri_runtime.machine import peak_rss_bytes

from ._native import die_with
from .token_time import mean_sums, middle_token, token_rows, token_sums
from .work import count_work, memory_group

# What a timeline holds counts against the limit: some 100 KiB a token.
_MOST_TIMED: Final = 48


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second after `n_warm` further tokens, and what the store did for them.

    `request`: file, prompt (token numbers), n_warm, n_tokens, `config`, arguments of `RunConfig`
    by name, is_resident: whether every expert is read before the first token, and is_timed:
    whether reads and steps are written down, of which the answer then holds `timeline`.
    """
    timeline = (
        Timeline(n_kept=min(request["n_tokens"], _MOST_TIMED)) if request["is_timed"] else None
    )
    started = time.perf_counter()
    config = RunConfig(**request["config"])
    with Runtime.open(request["file"], config, timeline=timeline) as runtime:
        load_s = time.perf_counter() - started
        if request["is_resident"]:
            _fetch_all(runtime)
        logits = runtime.decoder.forward(request["prompt"])
        for _ in range(request["n_warm"]):
            logits = runtime.decoder.forward([int(np.argmax(logits))])
        stats, before = runtime.store.stats.total(), count_work()
        made: list[int] = []
        times_s: list[float] = []
        for _ in range(request["n_tokens"]):
            begun = time.perf_counter()
            made.append(int(np.argmax(logits)))
            logits = runtime.decoder.forward([made[-1]])
            times_s.append(time.perf_counter() - begun)
        after, spent = count_work(), runtime.store.stats.total().minus(stats)
        report = runtime.store.io_report
        return {
            "tokens": made,
            "n_tokens": len(made),
            "tokens_per_s": len(made) / sum(times_s),
            "times_s": times_s,
            "load_s": load_s,
            "n_major_faults": after.n_major - before.n_major,
            "read_bytes": spent.read_bytes,
            "needed_bytes": spent.needed_bytes,
            "cpu_s": after.cpu_s - before.cpu_s,
            "stall_s": spent.stall_ns / 1e9,
            "hit_rate": spent.hit_rate,
            "budget_bytes": runtime.plan.budget_bytes,
            "planned_bytes": runtime.plan.total_bytes,
            "n_slots": runtime.plan.n_slots,
            "n_blocks": runtime.plan.n_blocks,
            "slot_bytes": runtime.plan.slot_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
            "backend": runtime.backend.name,
            "io": report.engine,
            "io_mode": str(report.mode),
            "io_reason": report.reason,
            "disk_bytes": after.read_bytes - before.read_bytes,
            "memory_group": memory_group(),
        } | ({} if timeline is None else {"timeline": _timeline(timeline)})


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """The token that took the median time as rows, and the means of all tokens' sums."""
    passes = [passed for passed in timeline.passes if passed.n_tokens == 1]
    middle = middle_token(passes)
    return {
        "rows": token_rows(middle),
        "middle": token_sums(middle),
        "sums": mean_sums([token_sums(passed) for passed in passes]),
        "n_tokens": len(passes),
    }


def _fetch_all(runtime: Runtime) -> None:
    for layer, sizes in enumerate(runtime.reader.index["size"]):
        present = np.flatnonzero(sizes)
        if len(present):
            for _ in runtime.store.fetch(layer, present.tolist()):
                pass


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    die_with(wanted["parent"])
    sys.stdout.write(json.dumps(generate(wanted)) + "\n")
