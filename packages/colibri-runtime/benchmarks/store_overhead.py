"""What the store costs the computing thread for one layer when every expert is resident.

Each layer is `fetch`, `take` until it gives nothing, `close`, statistics on; nothing is read and
nothing is computed. Beside it: the same as an iterator; with the routing's weights told to the
policy; and, in a pool that holds half of the experts, with an engine whose reads are there at once,
so that the rest of a miss is what is measured. One row a policy, and `in C` one over io_uring,
whose bookkeeping is in C (`Store.is_native`); there half of the experts are really read, from a
file in `--folder`. Medians of rounds, their spread, and the 10th and 90th percentile of single
layers; rounds of all arms are interleaved.

    python store_overhead.py [--layers 48] [--experts 128] [--top-k 8] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from colibri_format import DTYPES, Geometry, Layout, Role, SegmentSpec
from colibri_format.blockindex import BlockIndex
from colibri_format.layout import INDEX_DTYPE
from colibri_runtime import Pool, Store, equal_slots
from colibri_runtime.blocks import BlockTable
from colibri_runtime.disk import IoReport
from colibri_runtime.disk_choice import open_engine
from colibri_runtime.disk_files import BlockFile, IoMode
from colibri_runtime.policies import POLICY_NAMES, make_policy


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


def by_take(store, layer, experts, weights):
    fetch = store.fetch(layer, experts)
    while fetch.take():
        pass
    fetch.close()


def by_lease(store, layer, experts, weights):
    for lease in store.fetch(layer, experts):
        lease.address  # noqa: B018 - what a kernel would be given


def told_weights(store, layer, experts, weights):
    store.observe(layer, experts, weights)
    by_take(store, layer, experts[0], weights)


def measure(step, store, routes):
    """Nanoseconds of each layer."""
    times = []
    clock = time.perf_counter_ns
    for token in routes:
        for layer, (experts, weights) in enumerate(token):
            started = clock()
            step(store, layer, experts, weights)
            times.append(clock() - started)
    return times


def make_store(options, policy, share, path=None):
    source = Source(options.layers, options.experts)
    n_slots = int(options.layers * options.experts * share)
    counts = [options.experts] * options.layers
    plan = equal_slots(4096, counts, n_slots, options.top_k, 1)
    pool = Pool(n_slots, 4096)
    store = Store(
        source,
        pool,
        NoDisk() if path is None else read_by_ring(source, path, pool),
        plan,
        make_policy=lambda slots: make_policy(
            policy,
            n_layers=options.layers,
            n_slots=n_slots,
            quotas=slots.plan.quotas if policy == "lru" else None,
        ),
    )
    if store.is_native != (path is not None):
        raise SystemExit("the store does not keep its books where this measures it")
    for layer in range(options.layers):
        list(store.fetch(layer, range(options.experts)))
    return store


def read_by_ring(source, path, pool):
    probe = BlockTable([source]).plan_read(0, 0, slot=0, buffer=pool.slot(0))
    files = [BlockFile(path, probe)]
    return open_engine("uring", files, arena=pool.arena, is_verified=False)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(argv)
    with tempfile.NamedTemporaryFile(dir=options.folder) as file:
        file.truncate(4096 * (options.layers * options.experts + 1))
        return compare(options, Path(file.name))


def compare(options, path):
    rng = np.random.default_rng(0)
    shape = (options.tokens, options.layers, options.top_k)
    picks = np.argsort(rng.random((*shape[:2], options.experts)), axis=-1)[..., : options.top_k]
    as_lists = [[(layer.tolist(), None) for layer in token] for token in picks]
    weights = rng.random(shape).astype(np.float32)
    as_arrays = [
        [(e[None], w[None]) for e, w in zip(*token, strict=True)]
        for token in zip(picks.astype(np.int32), weights, strict=True)
    ]
    arms = []
    for name in POLICY_NAMES:
        full, half = make_store(options, name, 1), make_store(options, name, 0.5)
        arms += [
            (f"{name}: fetch, take, close", by_take, full, as_lists),
            (f"{name}: iterator", by_lease, full, as_lists),
            (f"{name}: weights told", told_weights, full, as_arrays),
            (f"{name}: half of them missing", told_weights, half, as_arrays),
        ]
    full, half = make_store(options, "recall", 1, path), make_store(options, "recall", 0.5, path)
    arms += [
        ("in C: fetch, take, close", by_take, full, as_lists),
        ("in C: iterator", by_lease, full, as_lists),
        ("in C: weights told", told_weights, full, as_arrays),
        ("in C: half of them really read", told_weights, half, as_arrays),
    ]
    results = {name: [] for name, *_ in arms}
    for _ in range(options.rounds):
        for name, step, store, routes in arms:
            results[name].append(measure(step, store, routes))
    print(f"{options.top_k} experts a layer, statistics on, microseconds a layer:")
    for name, rounds in results.items():
        medians = sorted(np.median(times) / 1e3 for times in rounds)
        low, high = np.percentile(np.concatenate(rounds), [10, 90]) / 1e3
        print(
            f"  {name:<32} median {np.median(medians):6.1f}  rounds {medians[0]:.1f} to "
            f"{medians[-1]:.1f}  single layers p10 {low:.1f}, p90 {high:.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
