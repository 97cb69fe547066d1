"""In which order the blocks of a layer stand, from the experts that fire together."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .errors import SourceError
from .routing_trace import RoutingTrace

_TOKENS: Final = 4096


def plan_order(trace: RoutingTrace, n_layers: int, n_experts: int) -> NDArray[np.int64]:
    """Each layer's experts in the order of their blocks, `(n_layers, n_experts)`; deterministic.

    Experts that the same tokens chose become neighbours, so that blocks read together are one
    request; what is asked for often stands first. Pairs are joined to chains, the pair that fired
    together most often first, as Pettis and Hansen place basic blocks (Profile guided code
    positioning, PLDI 1990, section 4); then the chains stand by how often their experts fire.
    Layers and experts that the trace lacks keep the order of their numbers.

    Raises:
        SourceError: `trace-mismatch` when the trace is of a larger model.
    """
    layer, expert = int(trace.layer.max()), int(trace.expert.max())
    if layer >= n_layers or expert >= n_experts:
        raise SourceError(
            "trace-mismatch",
            "trace",
            f"has layer {layer} and expert {expert}",
            f"{n_layers} layers of {n_experts} experts, as the model has",
            "give a trace of this model",
        )
    order = np.tile(np.arange(n_experts, dtype=np.int64), (n_layers, 1))
    for number in np.unique(trace.layer).tolist():
        here = trace.layer == number
        order[number] = _chained(_fired_together(trace.token[here], trace.expert[here], n_experts))
    return order


def _fired_together(
    token: NDArray[np.int64], expert: NDArray[np.int64], n_experts: int
) -> NDArray[np.int64]:
    """How many tokens chose both of two experts, `(n_experts, n_experts)`; the diagonal: one."""
    _, token = np.unique(token, return_inverse=True)
    order = np.argsort(token, kind="stable")
    token, expert = token[order], expert[order]
    counts = np.zeros((n_experts, n_experts), np.int64)
    n_tokens = int(token[-1]) + 1
    bounds = np.searchsorted(token, np.arange(0, n_tokens + _TOKENS, _TOKENS))
    for first, (start, end) in enumerate(pairwise(bounds.tolist())):
        chosen = np.zeros((_TOKENS, n_experts), np.float32)
        chosen[token[start:end] - first * _TOKENS, expert[start:end]] = 1
        # Sums of at most 4096 ones are exact in float32.
        counts += (chosen.T @ chosen).astype(np.int64)
    return counts


def _chained(counts: NDArray[np.int64]) -> list[int]:
    n_experts = len(counts)
    fired = np.diagonal(counts).tolist()
    first, second = np.triu_indices(n_experts, 1)
    together = counts[first, second]
    pairs = np.argsort(-together, kind="stable")[: int(np.count_nonzero(together))]
    chains = {expert: [expert] for expert in range(n_experts)}
    chain_of = list(range(n_experts))
    for a, b in zip(first[pairs].tolist(), second[pairs].tolist(), strict=True):
        left, right = chain_of[a], chain_of[b]
        if left == right:
            continue
        head, tail = chains[left], chains[right]
        if a not in (head[0], head[-1]) or b not in (tail[0], tail[-1]):
            continue
        joined = (head if head[-1] == a else head[::-1]) + (tail if tail[0] == b else tail[::-1])
        chains[left] = joined
        del chains[right]
        for expert in tail:
            chain_of[expert] = left
    ordered = sorted(
        chains.values(),
        key=lambda chain: (-sum(fired[expert] for expert in chain) / len(chain), min(chain)),
    )
    return [expert for chain in ordered for expert in chain]
