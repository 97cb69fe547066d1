"""What a policy costs: microseconds an event of 8 experts, for pools of 100 to 100,000 slots.

    python packages/colibri-runtime/benchmarks/policy_cost.py

Each pool holds a quarter of the blocks. Asks are skewed (Zipf 0.8 over a layer's 256 experts) and
a third of them repeat the token before. The pool is full before the clock runs. Rounds of all
policies and sizes are interleaved; a round is 2000 events. Times are CPU time of the one thread,
so that a busy neighbour shows less. `loop` is the same replay with a policy
that does nothing, and stands in every figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import numpy as np

from colibri_runtime.policies import POLICY_NAMES, make_policy

TOP_K = 8
N_EXPERTS = 256
ROUND = 2000


class Nothing:
    """First in, first out, in as few steps as Python can do it."""

    def __init__(self):
        self._queue = deque()
        self.release = self._queue.append

    def observe(self, layer, experts, weights=None):
        pass

    def pin(self, key):
        pass

    def victim(self, *, is_prefetch):
        return self._queue.popleft()


def events(n_layers, n_events, seed):
    """`(layer, experts, weights)` as a decoder would observe them."""
    random = np.random.default_rng(seed)
    last = {}
    skew = -0.8 * np.log(np.arange(1, N_EXPERTS + 1))
    scores = [random.permutation(skew) for _ in range(n_layers)]
    result = []
    for i in range(n_events):
        layer = i % n_layers
        noisy = scores[layer] + random.gumbel(size=N_EXPERTS)
        for expert in last.get(layer, ()):
            if random.random() < 1 / 3:
                noisy[expert] += 100
        experts = np.argsort(-noisy)[:TOP_K].tolist()
        last[layer] = experts
        weights = np.sort(random.dirichlet(np.full(TOP_K, 3.0)))[::-1].tolist()
        result.append((layer, experts, weights))
    return result


class Arm:
    """A policy and its pool, which go on from round to round."""

    def __init__(self, name, n_slots):
        self.name = name
        self.n_slots = n_slots
        n_layers = max(2, 4 * n_slots // N_EXPERTS)
        self.policy = (
            Nothing() if name == "loop" else make_policy(name, n_layers=n_layers, n_slots=n_slots)
        )
        self.held = set()
        self.stream = events(n_layers, max(ROUND, min(40_000, 16 * n_layers)), seed=1)
        self.place = 0
        self.times = []
        # Every block once, so that the pool is full and every layer known.
        for layer in range(n_layers):
            for first in range(0, N_EXPERTS, TOP_K):
                experts = list(range(first, first + TOP_K))
                self.step(layer, experts, [1 / TOP_K] * TOP_K)

    def step(self, layer, experts, weights):
        policy, held = self.policy, self.held
        policy.observe(layer, experts, weights)
        keys = [(layer, expert) for expert in experts]
        missing = []
        for key in keys:
            if key in held:
                policy.pin(key)
            else:
                missing.append(key)
        for key in missing:
            if len(held) >= self.n_slots:
                held.discard(policy.victim(is_prefetch=False))
            held.add(key)
        for key in keys:
            policy.release(key)

    def round(self):
        chosen = [self.stream[(self.place + i) % len(self.stream)] for i in range(ROUND)]
        self.place += ROUND
        started = time.thread_time()
        for event in chosen:
            self.step(*event)
        self.times.append((time.thread_time() - started) / ROUND * 1e6)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    arms = [Arm(name, n) for n in arguments.slots for name in ("loop", *POLICY_NAMES)]
    for _ in range(arguments.rounds):
        for arm in arms:
            arm.round()
    print(f"{'slots':>8}  {'policy':<8} {'us/event':>9} {'us/access':>10}  spread")
    for arm in arms:
        median = statistics.median(arm.times)
        print(
            f"{arm.n_slots:>8}  {arm.name:<8} {median:>9.1f} {median / TOP_K:>10.2f}  "
            f"{min(arm.times):.1f} to {max(arm.times):.1f}"
        )


if __name__ == "__main__":
    main()
