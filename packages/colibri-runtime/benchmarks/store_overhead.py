"""What the store costs the computing thread for one layer when every expert is resident.

Each layer is `fetch`, `take`, `close`, with the policy that a run uses and statistics on; nothing
is read and nothing is computed. Beside it: the same as an iterator, and the engine's share when
one miss in eight is read from the page cache. Medians over layers, and the 10th and 90th
percentile of single layers, of several interleaved rounds.

    python store_overhead.py [--layers 48] [--experts 128] [--top-k 8] [--policy NAME]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from colibri_format import DTYPES, Geometry, Layout, Role, SegmentSpec
from colibri_format.blockindex import BlockIndex
from colibri_format.layout import INDEX_DTYPE
from colibri_runtime import Pool, Store, equal_slots
from colibri_runtime.disk import IoMode, IoReport


class NoDisk:
    """An engine whose reads are there at once."""

    def __init__(self):
        self.done = []

    def submit(self, read):
        read.n_bytes = read.length
        self.done.append(read)

    def promote(self, read): ...

    def cancel(self, read):
        return False

    def poll(self):
        done, self.done = self.done, []
        return done

    wait = poll

    def flush(self): ...

    def report(self):
        return IoReport("none", IoMode.BUFFERED, "a stand-in", 0, False)

    def close(self): ...


class Source:
    """Blocks of 4 KiB that stand nowhere."""

    def __init__(self, n_layers, n_experts):
        shape = (n_layers, n_experts)
        kind = DTYPES["f32"]
        roles = (Role.GATE, Role.UP, Role.DOWN)
        layout = Layout.of(tuple(SegmentSpec(role, kind, (16, 16)) for role in roles))
        entries = np.zeros(shape, INDEX_DTYPE)
        entries["offset"] = 4096 * np.arange(1, n_layers * n_experts + 1).reshape(shape)
        entries["size"] = layout.block_size
        zeros = np.zeros(shape, np.uint16)
        self.path = Path("nowhere.colibri")
        self.file_size = 0
        self.geometry = Geometry(n_layers, n_experts, 4096)
        self.block_index = BlockIndex(entries, np.zeros(shape, np.uint64), zeros, zeros)
        self.layouts = (layout,)
        self.volumes = ()
        self.volume_paths = ()


def by_take(store, layer, experts):
    fetch = store.fetch(layer, experts)
    while fetch.take():
        pass
    fetch.close()


def by_lease(store, layer, experts):
    for lease in store.fetch(layer, experts):
        lease.address  # noqa: B018 - what a kernel would be given


def measure(step, store, routes):
    """Nanoseconds of each layer."""
    times = []
    clock = time.perf_counter_ns
    for token in routes:
        for layer, experts in enumerate(token):
            started = clock()
            step(store, layer, experts)
            times.append(clock() - started)
    return times


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    source = Source(options.layers, options.experts)
    n_blocks = options.layers * options.experts
    plan = equal_slots(4096, [options.experts] * options.layers, n_blocks, options.top_k, 1)
    store = Store(source, Pool(n_blocks, 4096), NoDisk(), plan)
    for layer in range(options.layers):
        list(store.fetch(layer, range(options.experts)))
    rng = np.random.default_rng(0)
    routes = [
        [
            rng.choice(options.experts, options.top_k, replace=False).tolist()
            for _ in range(options.layers)
        ]
        for _ in range(options.tokens)
    ]
    results = {"fetch, take, close": [], "iterator": []}
    steps = {"fetch, take, close": by_take, "iterator": by_lease}
    for _ in range(options.rounds):
        for name, step in steps.items():
            results[name].append(measure(step, store, routes))
    print(f"{options.top_k} resident experts a layer, policy and statistics on, us a layer:")
    for name, rounds in results.items():
        medians = sorted(np.median(times) / 1e3 for times in rounds)
        low, high = np.percentile(np.concatenate(rounds), [10, 90]) / 1e3
        print(
            f"  {name:<20} median {np.median(medians):6.1f}  rounds {medians[0]:.1f} to "
            f"{medians[-1]:.1f}  single layers p10 {low:.1f}, p90 {high:.1f}"
        )
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
