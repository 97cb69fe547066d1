"""A recorded routing replayed through the store, with a stand-in for computing.

    python store_replay.py TRACE [--folder /tmp] [--layers 24] [--shares 0.1,0.25,0.5]

Blocks of the trace's size (3,059,712 bytes where it states none) stand in one synthetic file; of a
trace with more layers only the first are taken, so that the file stays small. Each leased expert
keeps the core busy for `--compute-us` (default 500: 3 MB at 6 GB/s), and each layer for as long
again as one expert, for attention; with `--idle` it sleeps, as if another device computed. The
decode part is replayed from cold (the page cache of this machine emptied of the file, no block
resident) in arms that differ in what is read ahead, with their order turned by one each round:

- off: nothing;
- last: what the layer asked for last;
- router: the next layer's experts, known while the present layer computes, as a router on the
  present state gives them: best first, `--recall` (default 0.95,0.75, so 85 % in all) of the first
  and of the last right, of those between in proportion, the others drawn at random. What a layer is
  surest of it seldom changes: in the demo model the last of its choices is foreseen wrongly five
  times as often as the first (guess_rank.py);
- given: all of them right, which no model can know;
- auto: as router, switched by trial.

The bound of a token is the larger of its computing, as long as it really took, and its missed bytes
at the disk's rate, which a loop in C measures before each arm: it reads blocks of the same size
from the same file, at random, into as many slots. Bounds are taken token by token: the first ones
miss nearly everything, and what the disk lacks then no later token makes up for. Run it alone on
the machine: a neighbour's load lands anywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from synthetic_blocks import Blocks, bare_read, compile_bare, disk_limit, forget

from colibri_runtime import RunConfig
from colibri_runtime.blocks import BlockTable
from colibri_runtime.opening import open_pool
from colibri_runtime.pool_plan import plan_pool, pool_cost
from colibri_runtime.trace import TracePhase, read_trace

BLOCK_BYTES = 3_059_712


def tokens_of(trace, n_layers):
    """For each token of the decode part, `(layer, experts, weights)` of each layer; arrays
    `(1, top_k)`, best first, as a router leaves them."""
    tokens = []
    for event in trace.only(TracePhase.DECODE).events:
        if event.layer >= n_layers:
            continue
        if event.layer == 0 or not tokens:
            tokens.append([])
        experts = np.array([event.experts])
        tokens[-1].append((event.layer, experts, np.array([event.weights], np.float32)))
    return [token for token in tokens if len(token) == n_layers]


def guesses(tokens, recall, n_experts):
    """The experts of each token's layers as a router would foresee them, best first.

    `recall` is how often the first and the last of them are right.
    """
    rng = np.random.default_rng(1)

    def of_layer(experts):
        top_k = experts.shape[1]
        is_right = rng.random(top_k) < np.linspace(*recall, top_k)
        return np.where(is_right, experts[0], rng.integers(n_experts, size=top_k)).tolist()

    return [{layer: of_layer(experts) for layer, experts, _ in token} for token in tokens]


class Replay:
    def __init__(self, blocks, tokens, options, spin):
        self.blocks = blocks
        self.tokens = tokens
        self.options = options
        self.spin = spin
        self.computed = 0.0
        self.guessed = {
            "router": guesses(tokens, options.recall, blocks.geometry.n_experts),
            "given": guesses(tokens, (1.0, 1.0), blocks.geometry.n_experts),
        }
        self.guessed["auto"] = self.guessed["router"]

    def run(self, arm, share):
        """Seconds a token, and the store's statistics."""
        options = self.options
        n_layers, n_experts = self.blocks.block_index.entries.shape
        stride = -(-options.block_bytes // 4096) * 4096
        n_slots = round(share * n_layers * n_experts)
        config = RunConfig(
            io=options.io,
            policy=options.policy,
            prefetch_depth={"off": 0, "auto": None}.get(arm, options.depth),
            prefetch_from="last" if arm == "last" else "router",
        )
        top_k = self.tokens[0][0][1].shape[1]
        plan = plan_pool(
            pool_cost(n_slots, stride),
            BlockTable([self.blocks]).census(),
            top_k=top_k,
            prefetch_depth=config.look_ahead,
        )
        guessed = self.guessed.get(arm)
        forget(self.blocks.path)
        with open_pool([self.blocks], plan, config) as store:
            self.computed = 0.0
            started = time.perf_counter()
            for number, token in enumerate(self.tokens):
                for layer, experts, weights in token:
                    self.layer(store, number, layer, experts, weights, guessed)
            seconds = time.perf_counter() - started
            return seconds / len(self.tokens), store.stats.total(), store

    def layer(self, store, number, layer, experts, weights, guessed):
        self.compute(1)
        store.observe(layer, experts, weights)
        with store.fetch(layer, np.sort(experts[0]).tolist()) as fetch:
            if guessed is not None:
                for ahead in range(layer + 1, layer + 1 + store.look_ahead):
                    if ahead in guessed[number]:
                        store.prefetch(ahead, guessed[number][ahead])
            while leases := fetch.take():
                self.compute(len(leases))

    def compute(self, n_experts):
        started = time.perf_counter()
        for _ in range(n_experts):
            self.spin(1000 * self.options.compute_us)
        self.computed += time.perf_counter() - started


def _shares(text):
    first, last = map(float, text.split(","))
    return first, last


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--shares", default="0.1,0.25,0.5")
    parser.add_argument("--arms", default="off,last,router,given,auto")
    parser.add_argument("--compute-us", type=int, default=500)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--recall", type=_shares, default=(0.95, 0.75), metavar="FIRST,LAST")
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--io", default="auto")
    parser.add_argument("--policy", default=RunConfig().policy)
    parser.add_argument("--idle", action="store_true", help="sleep instead of computing")
    parser.add_argument("--limit-mb", type=int, help="slow the disk down to so many MB/s (root)")
    parser.add_argument("--keep", action="store_true", help="leave the file for the next time")
    options = parser.parse_args(argv)
    trace = read_trace(options.trace)
    tokens = tokens_of(trace, options.layers)[: options.tokens]
    path = options.folder / f"store_replay.{options.block_bytes}.blocks"
    blocks = Blocks(path, options.layers, trace.n_experts, options.block_bytes)
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(compile_bare(Path(folder), is_library=True)))
        library.spin.argtypes = [ctypes.c_int64]
        spin = (lambda ns: time.sleep(ns / 1e9)) if options.idle else library.spin
        replay = Replay(blocks, tokens, options, spin)
        program = compile_bare(Path(folder))
        limit = options.limit_mb and options.limit_mb * 10**6
        with disk_limit(options.folder, limit):
            for share in map(float, options.shares.split(",")):
                report(replay, share, program, options)
    if not options.keep:
        path.unlink()
    return 0


def disk_rate(program, blocks, options, rng, share):
    offsets = blocks.block_index.entries["offset"].ravel()
    chosen = [int(offset) for offset in rng.choice(offsets, min(300, len(offsets)), replace=False)]
    forget(blocks.path)
    stride = -(-options.block_bytes // 4096) * 4096
    n_slots = round(share * len(offsets))
    seconds, _, n_bytes = bare_read(program, blocks.path, chosen, stride, 2, n_slots=n_slots)
    return n_bytes / seconds


def report(replay, share, program, options):
    arms = options.arms.split(",")
    rng = np.random.default_rng()
    times = {arm: [] for arm in arms}
    bounds = {arm: [] for arm in arms}
    last = {}
    rates = []
    computed = []
    for number in range(options.rounds):
        for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
            rate = disk_rate(program, replay.blocks, options, rng, share)
            rates.append(rate)
            seconds, stats, store = replay.run(arm, share)
            needed = [
                counts.demand_bytes + counts.n_prefetch_used * options.block_bytes
                for counts in (one.counts for one in store.passes.recent)
            ]
            n_bytes = statistics.mean(needed)
            times[arm].append(seconds)
            computed.append(replay.computed / len(replay.tokens))
            bounds[arm].append(statistics.mean(max(computed[-1], n / rate) for n in needed))
            last[arm] = (stats, store, n_bytes)
    engine = store.io_report
    ms = [1e3 * seconds for seconds in computed]
    print(
        f"\n{share:.0%} of {replay.blocks.geometry.n_layers} x {replay.blocks.geometry.n_experts} "
        f"blocks, {len(replay.tokens)} tokens, {options.rounds} rounds; {engine.engine}, "
        f"{engine.mode}, policy {options.policy}; computing {statistics.median(ms):.1f} ms a token "
        f"({min(ms):.1f} to {max(ms):.1f}); the "
        f"disk {statistics.median(rates) / 1e9:.2f} GB/s ({min(rates) / 1e9:.2f} to "
        f"{max(rates) / 1e9:.2f})"
    )
    for arm in arms:
        stats, store, n_bytes = last[arm]
        of_bound = sorted(b / t for b, t in zip(bounds[arm], times[arm], strict=True))
        ms = sorted(1e3 * t for t in times[arm])
        recall = "-" if stats.recall is None else f"{stats.recall:.0%}"
        print(
            f"  {arm:<7} {1e3 / statistics.median(ms):6.2f} tokens/s  {statistics.median(ms):6.1f} "
            f"ms ({ms[0]:.1f} to {ms[-1]:.1f})  of bound {statistics.median(of_bound):4.0%} "
            f"({of_bound[0]:.0%} to {of_bound[-1]:.0%})  hits {stats.hit_rate:4.0%}  needed "
            f"{n_bytes / 1e6:5.0f} MB, wasted {stats.wasted_bytes / len(replay.tokens) / 1e6:4.0f} "
            f"MB a token  recall {recall}  stalled "
            f"{stats.stall_ns / 1e6 / len(replay.tokens):5.1f} ms"
        )
        if store.passes.gate is not None:
            print(f"          {store.passes.gate.verdict()}")


if __name__ == "__main__":
    sys.exit(main())
