"""Keys and values of the positions seen so far, in memory of a size fixed beforehand."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import ModelSpec, UsageError

from .backend import Floats
from .lazy_memory import LazyMemory

KV_DTYPES: Final = ("float32", "float16")


def kv_cache_bytes(model: ModelSpec, n_positions: int, dtype: str = "float32") -> int:
    """Bytes that a `KvCache` with the same arguments allocates.

    Raises:
        UsageError: `bad-kv-dtype`, `bad-context`.
    """
    if dtype not in KV_DTYPES:
        raise UsageError(
            "bad-kv-dtype", "KV cache", f"dtype is {dtype!r}", f"one of {', '.join(KV_DTYPES)}"
        )
    if n_positions < 1:
        raise UsageError(
            "bad-context", "KV cache", f"{n_positions} positions were asked for", "at least one"
        )
    values = 2 * model.n_layers * model.n_kv_heads * n_positions * model.head_dim
    return values * np.dtype(dtype).itemsize


def kv_used_bytes(
    model: ModelSpec, capacity: int, n_positions: int, dtype: str = "float32", *, page_bytes: int
) -> int:
    """Upper bound in bytes of what a `KvCache` takes once `n_positions` were written to.

    Each head of a layer has its positions in a row, which takes memory page by page.
    """
    whole = kv_cache_bytes(model, capacity, dtype)
    position = model.head_dim * np.dtype(dtype).itemsize
    n_rows = whole // (capacity * position)
    n_pages = -(-n_positions * position // page_bytes)
    if n_positions and capacity * position % page_bytes:
        n_pages += 1  # A row may begin anywhere in a page.
    return min(whole, n_rows * n_pages * page_bytes)


class KvCache:
    """Room for `capacity` positions, each array `(n_layers, n_kv_heads, capacity, head_dim)`.

    A position is complete once `advance` was called; until then each layer stores its own.
    Positions that were never reached take no memory (`kv_used_bytes`).
    """

    def __init__(self, model: ModelSpec, capacity: int, dtype: str = "float32") -> None:
        self.size_bytes = kv_cache_bytes(model, capacity, dtype)
        self.capacity = capacity
        self.dtype = np.dtype(dtype)
        self.length = 0
        shape = (model.n_layers, model.n_kv_heads, capacity, model.head_dim)
        self._memory = [LazyMemory(self.size_bytes // 2) for _ in range(2)]
        self._keys, self._values = (
            memory.array.view(self.dtype).reshape(shape) for memory in self._memory
        )
        self._n_reached = 0

    def require(self, n_tokens: int) -> None:
        """Nothing, when `n_tokens` more positions fit.

        Raises:
            UsageError: `context-full`.
        """
        if self.length + n_tokens > self.capacity:
            raise UsageError(
                "context-full",
                "KV cache",
                f"{self.length} positions are held and {n_tokens} more were asked for",
                f"at most {self.capacity} in all",
                "shorten the prompt or allow a longer context",
            )

    def reach(self, n_tokens: int) -> int:
        """How many positions take memory when `n_tokens` more are stored, as they are about to
        be."""
        self._n_reached = max(self._n_reached, self.length + n_tokens)
        return self._n_reached

    def store(self, layer: int, keys: Floats, values: Floats) -> None:
        """Puts `(n_tokens, n_kv_heads, head_dim)` of a layer behind the complete positions."""
        self.require(len(keys))
        stop = self.length + len(keys)
        self._keys[layer, :, self.length : stop] = keys.transpose(1, 0, 2)
        self._values[layer, :, self.length : stop] = values.transpose(1, 0, 2)

    def view(
        self, layer: int, start: int, stop: int
    ) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Keys and values of positions `start` to `stop`, `(n_kv_heads, n, head_dim)` views."""
        return self._keys[layer, :, start:stop], self._values[layer, :, start:stop]

    def advance(self, n_tokens: int) -> None:
        """Completes `n_tokens` positions that every layer has stored."""
        self.require(n_tokens)
        self.length += n_tokens

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` positions; without any, gives the memory of those
        that were `reach`ed back.

        Raises:
            UsageError: `bad-length` when fewer are held, or `length` is negative.
        """
        if not 0 <= length <= self.length:
            raise UsageError(
                "bad-length",
                "KV cache",
                f"{self.length} positions are held, {length} were to be kept",
                "a number between none and all of them",
            )
        self.length = length
        if length == 0 and self._n_reached:
            given = [memory.give_back() for memory in self._memory]
            if all(given):
                self._n_reached = 0
