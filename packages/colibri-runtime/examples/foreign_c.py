"""An engine of its own on the store: a C kernel that is given pointers into leased blocks.

    python foreign_c.py model.colibri [--memory 64M] [--tokens 16]

The same states and layers as in foreign_numpy.py. Here the store calls back: `on_ready` registers
a function, and `Fetch.run` calls it with each block as it arrives, in this very thread; the lease
ends when it returns. What the kernel needs to know of a block is looked up once and kept in
`lease.cache`, where it is found again as long as the block stays in memory.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from foreign_numpy import TOP_K, load_routers, route

import colibri_format
from colibri_format import Role, parse_size
from colibri_runtime import BlockTable, RunConfig, plan_pool
from colibri_runtime.opening import open_pool

SOURCE = Path(__file__).with_suffix(".c")


def compile_kernel(folder):
    """The function `expert_q8_0` of foreign_c.c."""
    library = Path(folder) / "foreign_c.so"
    command = ["cc", "-O2", "-std=c11", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    kernel = ctypes.CDLL(str(library)).expert_q8_0
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = [pointer, *[integer] * 5, ctypes.c_float, pointer, pointer, pointer]
    kernel.restype = None
    return kernel


class Layer:
    """What the callback needs of the layer that is computed."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.state = self.shares = self.outputs = None

    def ready(self, lease):
        """Computes one expert; its output waits until all have come."""
        if lease.cache is None:
            gate, up, down = (lease.layout.segment(r) for r in (Role.GATE, Role.UP, Role.DOWN))
            width, hidden = gate.shape
            lease.cache = (gate.offset, up.offset, down.offset, hidden, width)
        hidden, width = lease.cache[3:]
        out, scratch = np.zeros(hidden, np.float32), np.empty(width, np.float32)
        self.kernel(
            lease.address,
            *lease.cache,
            self.shares[lease.expert],
            self.state.ctypes.data,
            scratch.ctypes.data,
            out.ctypes.data,
        )
        self.outputs[lease.expert] = out


def run(path, memory, n_tokens, out=lambda line: None):
    """The state of the last token after its last layer."""
    with colibri_format.open(path) as reader, tempfile.TemporaryDirectory() as folder:
        routers = load_routers(reader)
        plan = plan_pool(memory, BlockTable([reader]).census(), top_k=TOP_K)
        rng = np.random.default_rng(0)
        with open_pool([reader], plan, RunConfig(prefetch_depth=1)) as store:
            work = Layer(compile_kernel(folder))
            store.on_ready(work.ready)
            for _ in range(n_tokens):
                state = rng.standard_normal(next(iter(routers.values())).shape[1], np.float32)
                for layer, router in routers.items():
                    chosen, shares = route(router, state)
                    work.state = state
                    work.shares = dict(zip(chosen.tolist(), shares.tolist(), strict=True))
                    work.outputs = {}
                    store.observe(layer, chosen[None], shares[None])
                    fetch = store.fetch(layer, sorted(work.shares))
                    if layer + 1 in routers:
                        store.prefetch(layer + 1, route(routers[layer + 1], state)[0])
                    fetch.run()
                    state = state + sum(work.outputs[e] for e in sorted(work.outputs))
                    state /= np.sqrt(np.mean(state * state))
            total = store.stats.total()
            out(f"{n_tokens} tokens, {total.hit_rate:.0%} hits, {total.read_bytes} bytes read")
    return state


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--memory", type=parse_size, default=64 * 2**20)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args(argv)
    run(options.file, options.memory, options.tokens, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
