"""Attention over the KV cache: what is seen, in how much memory, and the cache's own limits."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import ModelSpec, RopeSpec, UsageError
from colibri_runtime import attention
from colibri_runtime.attention import attend, attention_bytes
from colibri_runtime.kv_cache import KvCache, kv_cache_bytes

HEAD_DIM = 12


def model(n_heads: int = 6, n_kv_heads: int = 2) -> ModelSpec:
    return ModelSpec(
        family="llama", n_layers=2, hidden_size=32, vocab_size=8, context_length=4096,
        n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=HEAD_DIM, rms_norm_eps=1e-6,
        rope=RopeSpec(theta=1e4, n_dims=HEAD_DIM), ffn_size=8,
    )  # fmt: skip


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(n_before: int, n_new: int, dtype: str = "float32") -> tuple[KvCache, Any, Any]:
    cache = KvCache(model(), n_before + n_new, dtype)
    keys, values = (normal(n_before + n_new, 2, HEAD_DIM, seed=s) for s in (1, 2))
    if n_before:
        cache.store(1, keys[:n_before], values[:n_before])
        cache.advance(n_before)
    cache.store(1, keys[n_before:], values[n_before:])
    return cache, keys.astype(np.float64), values.astype(np.float64)


def naive(q: Any, k: Any, v: Any, n_before: int, window: int | None) -> Any:
    out = np.zeros(q.shape)
    for place in range(len(q)):
        last = n_before + place
        first = 0 if window is None else max(0, last + 1 - window)
        for head in range(q.shape[1]):
            scores = k[first : last + 1, head // 3] @ q[place, head].astype(np.float64)
            shares = np.exp(scores / math.sqrt(HEAD_DIM))
            out[place, head] = shares @ v[first : last + 1, head // 3] / shares.sum()
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("n_before", "n_new"), [(0, 1), (0, 9), (13, 1), (13, 9)])
@pytest.mark.parametrize("score_bytes", [1, 800, attention.SCORE_BYTES])
def test_attend_is_the_textbook_sum(
    monkeypatch: pytest.MonkeyPatch, window: int | None, n_before: int, n_new: int, score_bytes: int
) -> None:
    monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
    cache, keys, values = filled(n_before, n_new)
    queries = normal(n_new, 6, HEAD_DIM, seed=3)

    found = attend(queries, cache, 1, window)

    np.testing.assert_allclose(
        found, naive(queries, keys, values, n_before, window), rtol=2e-5, atol=2e-6
    )


def test_half_precision_cache_is_widened() -> None:
    cache, keys, values = filled(13, 9, "float16")
    queries = normal(9, 6, HEAD_DIM, seed=3)

    found = attend(queries, cache, 1)

    np.testing.assert_allclose(found, naive(queries, keys, values, 13, None), atol=5e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("n_new", [1, 32])
@pytest.mark.parametrize("score_bytes", [4096, 1024 * 1024])
def test_memory_stays_within_what_is_stated(
    monkeypatch: pytest.MonkeyPatch, dtype: str, n_new: int, score_bytes: int
) -> None:
    monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
    cache, _, _ = filled(3000, n_new, dtype)
    queries = normal(n_new, 6, HEAD_DIM)

    tracemalloc.start()
    attend(queries, cache, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    stated = attention_bytes(n_new, 3000 + n_new, 6, 2, HEAD_DIM, 4 if dtype == "float32" else 2)
    assert peak <= stated + 16384


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cache_size_is_known_before_it_is_allocated(dtype: str) -> None:
    cache = KvCache(model(), 10, dtype)

    size = 2 * 2 * 2 * 10 * HEAD_DIM * (4 if dtype == "float32" else 2)
    assert kv_cache_bytes(model(), 10, dtype) == cache.size_bytes == size


@pytest.mark.parametrize(
    ("arguments", "code"), [((10, "int8"), "bad-kv-dtype"), ((0, "float32"), "bad-context")]
)
def test_cache_arguments_out_of_range_are_refused(arguments: tuple[int, str], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        KvCache(model(), *arguments)

    assert caught.value.code == code


def test_a_full_cache_refuses_more() -> None:
    cache = KvCache(model(), 4)
    cache.store(0, normal(4, 2, HEAD_DIM), normal(4, 2, HEAD_DIM))
    cache.advance(4)

    for act in (
        lambda: cache.require(1),
        lambda: cache.advance(1),
        lambda: cache.store(0, normal(1, 2, HEAD_DIM), normal(1, 2, HEAD_DIM)),
    ):
        with pytest.raises(UsageError) as caught:
            act()

        assert caught.value.code == "context-full"


@pytest.mark.parametrize("length", [-1, 3])
def test_truncation_to_what_is_not_held_is_refused(length: int) -> None:
    cache = KvCache(model(), 4)
    cache.advance(2)

    with pytest.raises(UsageError) as caught:
        cache.truncate(length)

    assert caught.value.code == "bad-length"
