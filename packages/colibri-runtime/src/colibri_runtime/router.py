"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .backend import Floats


def route(logits: Floats, top_k: int, norm_top_k: bool) -> tuple[NDArray[np.intp], Floats]:
    """Experts and weights of each token, both `(n_tokens, top_k)`, best first.

    `logits` is `(n_tokens, n_experts) float32`. The softmax runs over all experts, in float32;
    of equals the expert of lowest number comes first. With `norm_top_k` the weights are divided
    by their sum (Jiang et al. 2024, arXiv 2401.04088, section 2.1: the same as a softmax over
    the chosen ones).
    """
    shares = logits - logits.max(axis=-1, keepdims=True)
    np.exp(shares, out=shares)
    shares /= shares.sum(axis=-1, keepdims=True)
    experts = np.argsort(-shares, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(shares, experts, axis=-1)
    if norm_top_k:
        weights /= weights.sum(axis=-1, keepdims=True)
    return experts, weights


def choose(logits: Floats, top_k: int) -> NDArray[np.intp]:
    """The experts of greatest logits, `(n_tokens, top_k)`, best first."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]


def predict(chosen: NDArray[np.integer], n_experts: int) -> list[int]:
    """Experts worth prefetching for a layer whose router would choose `chosen`, the surest first.

    `chosen` is `(n_tokens, top_k)`, best first. For one token all of it. For more, those that
    most tokens choose (of equals the lowest number), at most half of all experts: a batch that
    wants more than that meets nearly every block as a demand read anyway, and hints would only
    queue before the reads in need.
    """
    n_tokens, top_k = chosen.shape
    if n_tokens == 1:
        found: list[int] = chosen[0].tolist()
        return found
    votes = np.bincount(chosen.ravel(), minlength=n_experts)
    order = np.argsort(-votes, kind="stable")[: max(top_k, n_experts // 2)]
    return [int(expert) for expert in order if votes[expert]]
