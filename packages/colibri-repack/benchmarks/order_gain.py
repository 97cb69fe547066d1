"""What `--order` gains: requests and bytes a request, by replay of a routing trace.

    python packages/colibri-repack/benchmarks/order_gain.py TRACE [--block-bytes N]

The order is trained on the first half of the tokens and tried on the second. For each token and
layer the experts that a per-layer LRU cache lacks are read together; blocks that stand side by
side are one request. The cache, warm from the first half, has the given share of each layer's
experts; 0 % is no cache. Reads no disk: the figures are exact and the same everywhere.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from colibri_repack import RoutingTrace, read_trace
from colibri_repack.expert_order import plan_order

Event = tuple[int, int, list[int]]


def events(trace: RoutingTrace) -> Iterator[Event]:
    """`(token, layer, experts)` in order of tokens, then layers."""
    order = np.lexsort((trace.layer, trace.token))
    chosen: list[int] = []
    last = None
    for at in order.tolist():
        place = int(trace.token[at]), int(trace.layer[at])
        if place != last and last is not None:
            yield *last, chosen
            chosen = []
        last = place
        chosen.append(int(trace.expert[at]))
    if last is not None:
        yield *last, chosen


def replay(trace: RoutingTrace, order: np.ndarray, first: int, slots: int) -> tuple[int, int]:
    """Blocks and requests of the tokens from `first` on, with `slots` of cache a layer."""
    place = np.argsort(order, axis=1)
    caches: dict[int, OrderedDict[int, None]] = {}
    blocks = requests = 0
    for token, layer, chosen in events(trace):
        cache = caches.setdefault(layer, OrderedDict())
        missed = [expert for expert in chosen if expert not in cache]
        if token >= first and missed:
            at = np.sort(place[layer, missed])
            blocks += len(missed)
            requests += 1 + int(np.count_nonzero(np.diff(at) > 1))
        for expert in chosen:
            cache[expert] = None
            cache.move_to_end(expert)
        while len(cache) > slots:
            cache.popitem(last=False)
    return blocks, requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--block-bytes", type=int, default=3_059_712)
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    n_layers, n_experts = int(trace.layer.max()) + 1, int(trace.expert.max()) + 1
    first = trace.n_tokens // 2
    is_early = trace.token < first
    early = RoutingTrace(trace.token[is_early], trace.layer[is_early], trace.expert[is_early])
    default = np.tile(np.arange(n_experts), (n_layers, 1))
    trained = plan_order(early, n_layers, n_experts)
    n_tokens = trace.n_tokens - first
    print(f"{arguments.trace.name}: {n_layers} layers, {n_experts} experts, trained on {first} "
          f"tokens, tried on {n_tokens}")  # fmt: skip
    print("| cache | blocks a token | requests a token: by number | trained | bytes a request: "
          "by number | trained | gain |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for share in (0, 10, 20, 40):
        slots = n_experts * share // 100
        blocks, plain = replay(trace, default, first, slots)
        _, better = replay(trace, trained, first, slots)
        if not blocks:
            print(f"| {share} % | 0 | 0 | 0 | - | - | - |")
            continue
        sizes = [arguments.block_bytes * blocks / n / 2**20 for n in (plain, better)]
        print(f"| {share} % | {blocks / n_tokens:.1f} | {plain / n_tokens:.1f} | "
              f"{better / n_tokens:.1f} | {sizes[0]:.2f} MiB | {sizes[1]:.2f} MiB | "
              f"{sizes[1] / sizes[0]:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
