"""Causal attention with grouped queries, in bounded memory."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .backend import Floats
from .kv_cache import KvCache

# Scores of at most this many bytes at once, or of one query where even that is more.
SCORE_BYTES: Final = 4 * 1024 * 1024


def attention_bytes(
    n_tokens: int, n_positions: int, n_heads: int, n_kv_heads: int, head_dim: int, kv_itemsize: int
) -> int:
    """Upper bound of what `attend` allocates, its result included."""
    one_query = 4 * n_heads * n_positions
    scores = min(max(SCORE_BYTES, one_query), n_tokens * one_query)
    mask = scores // max(n_heads, 1) + 8 * n_positions
    queries = 4 * n_tokens * n_heads * head_dim
    widened = 0 if kv_itemsize == 4 else 2 * 4 * n_positions * head_dim
    return scores + mask + 3 * queries + widened


def attend(
    queries: Floats, cache: KvCache, layer: int, sliding_window: int | None = None
) -> Floats:
    """Each query's mean of values, weighted by `softmax(q . k / sqrt(head_dim))`.

    `queries` is `(n_tokens, n_heads, head_dim) float32`; the last of them stands at the last
    position that `layer` has stored, which are `cache.length + n_tokens`. Query head h reads
    key/value head `h // (n_heads / n_kv_heads)` (Ainslie et al. 2023, arXiv 2305.13245). A query
    sees itself and what is before it, of that the last `sliding_window` positions. The result is
    `(n_tokens, n_heads * head_dim) float32`.
    """
    n_tokens, n_heads, head_dim = queries.shape
    first = cache.length
    n_kv_heads = cache.view(layer, 0, 0)[0].shape[0]
    n_group = n_heads // n_kv_heads
    out = np.empty((n_tokens, n_heads, head_dim), np.float32)
    step = max(1, SCORE_BYTES // (4 * n_heads * (first + n_tokens)))
    # Half-precision keys are widened one head at a time, so that the copy stays small.
    n_together = n_kv_heads if cache.dtype == np.float32 else 1
    for begin in range(0, n_tokens, step):
        end = min(begin + step, n_tokens)
        stop = first + end
        start = 0 if sliding_window is None else max(0, first + begin + 1 - sliding_window)
        hidden = _hidden(first + begin, end - begin, start, stop, sliding_window)
        keys, values = cache.view(layer, start, stop)
        for head in range(0, n_kv_heads, n_together):
            heads = slice(head, head + n_together)
            of_group = slice(head * n_group, (head + n_together) * n_group)
            out[begin:end, of_group] = _mix(
                queries[begin:end, of_group], keys[heads], values[heads], hidden
            )
    return out.reshape(n_tokens, n_heads * head_dim)


def _mix(
    queries: Floats,
    keys: NDArray[np.floating],
    values: NDArray[np.floating],
    hidden: NDArray[np.bool_] | None,
) -> Floats:
    """`(n_queries, n_heads, head_dim)` for a few key/value heads and the queries that read them.

    A function of its own so that its scores are freed before the next ones are allocated.
    """
    n_queries, n_heads, head_dim = queries.shape
    n_kv_heads, n_positions, _ = keys.shape
    n_group = n_heads // n_kv_heads
    grouped = queries.reshape(n_queries, n_kv_heads, n_group, head_dim).transpose(1, 2, 0, 3)
    asked = np.multiply(grouped, np.float32(1 / math.sqrt(head_dim)), order="C")
    asked = asked.reshape(n_kv_heads, n_group * n_queries, head_dim)
    scores = np.matmul(asked, keys.astype(np.float32, copy=False).transpose(0, 2, 1))
    if hidden is not None:
        by_query = scores.reshape(n_kv_heads, n_group, n_queries, n_positions)
        np.copyto(by_query, -np.inf, where=hidden)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed = np.matmul(scores, values.astype(np.float32, copy=False))
    mixed /= scores.sum(axis=-1, keepdims=True)
    by_head: Floats = mixed.reshape(n_heads, n_queries, head_dim).transpose(1, 0, 2)
    return by_head


def _hidden(
    first: int, n_queries: int, start: int, stop: int, sliding_window: int | None
) -> NDArray[np.bool_] | None:
    """`(n_queries, stop - start)`: which positions a query must not see; None when it sees all."""
    if n_queries == 1:
        return None
    asking = np.arange(first, first + n_queries)[:, np.newaxis]
    seen = np.arange(start, stop)[np.newaxis]
    hidden = seen > asking
    if sliding_window is not None:
        hidden |= seen <= asking - sliding_window
    return hidden
