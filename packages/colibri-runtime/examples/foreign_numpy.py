"""An engine of its own on the store: NumPy kernels, no model code of colibri_runtime.

    python foreign_numpy.py model.colibri [--memory 64M] [--tokens 16]

Random states pass the expert layers of a file whose experts are Q8_0; attention is left out. The
store is all that is used: it reads, caches and reads ahead within the budget. A layer's blocks are
computed one by one as they arrive, whatever the order, and the next layer's router foresees what to
read meanwhile.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import colibri_format
from colibri_format import Role, parse_size
from colibri_runtime import BlockTable, RunConfig, plan_pool
from colibri_runtime.opening import open_pool

TOP_K = 2


def load_routers(reader):
    """The router of each layer that has experts, `(n_experts, hidden)` float32."""
    routers = {}
    for layer in range(reader.geometry.n_layers):
        name = f"blk.{layer}.ffn_gate_inp.weight"
        if name in reader.tensors:
            tensor = reader.tensor(name)
            routers[layer] = tensor.read().view(np.float32).reshape(reader.tensors[name].shape)
    return routers


def route(router, state, top_k=TOP_K):
    """The experts that a state goes to, the likeliest first, and their shares."""
    scores = router @ state
    chosen = np.argsort(-scores, kind="stable")[:top_k]
    shares = np.exp(scores[chosen] - scores.max())
    return chosen, shares / shares.sum()


def decode_q8_0(data, shape):
    """A matrix of ggml's Q8_0: 32 signed bytes for each half-precision scale that stands before."""
    blocks = data.reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (blocks[:, 2:].view(np.int8) * scales).reshape(shape)


def expert(lease, state):
    """`down(silu(gate(x)) * up(x))` from the bytes of a leased block."""
    matrices = {
        segment.role: decode_q8_0(lease.segments[segment.role], segment.shape)
        for segment in lease.layout.segments
    }
    gate = matrices[Role.GATE] @ state
    return matrices[Role.DOWN] @ (gate / (1 + np.exp(-gate)) * (matrices[Role.UP] @ state))


def run(path, memory, n_tokens, out=lambda line: None):
    """The state of the last token after its last layer."""
    with colibri_format.open(path) as reader:
        routers = load_routers(reader)
        config = RunConfig(prefetch_depth=1)
        plan = plan_pool(memory, BlockTable([reader]).census(), top_k=TOP_K)
        rng = np.random.default_rng(0)
        with open_pool([reader], plan, config) as store:
            for _ in range(n_tokens):
                state = rng.standard_normal(next(iter(routers.values())).shape[1], np.float32)
                for layer, router in routers.items():
                    chosen, shares = route(router, state)
                    share_of = dict(zip(chosen.tolist(), shares, strict=True))
                    store.observe(layer, chosen[None], shares[None])
                    with store.fetch(layer, sorted(share_of)) as leases:
                        if layer + 1 in routers:
                            store.prefetch(layer + 1, route(routers[layer + 1], state)[0])
                        outputs = {
                            lease.expert: share_of[lease.expert] * expert(lease, state)
                            for lease in leases
                        }
                    # Summed in one order, so that the order of arrival changes no bit.
                    state = state + sum(outputs[e] for e in sorted(outputs))
                    state /= np.sqrt(np.mean(state * state))
            total = store.stats.total()
            out(f"{n_tokens} tokens, {total.hit_rate:.0%} hits, {total.read_bytes} bytes read")
            out(f"{store.io_report.engine}, {store.io_report.mode}")
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
