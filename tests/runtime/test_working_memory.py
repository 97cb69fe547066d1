"""The decoder's working memory is bounded by what is said beforehand."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from colibri_runtime.numpy_backend import NumpyBackend
from colibri_runtime.working_memory import working_bytes
from helpers.memory_model import MemoryFile, MemoryLease, memory_decoder, memory_file
from helpers.random_models import CONFIGS


class QuietStore:
    """Gives views of the file's own blocks, so that only the decoder's memory is measured."""

    def __init__(self, file: MemoryFile) -> None:
        self._held = {
            (layer, expert): MemoryLease(layer, expert, layout, block)
            for (layer, expert), block in file.blocks.items()
            if (layout := file.layouts[layer]) is not None
        }

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[MemoryLease]:
        return (self._held[layer, expert] for expert in experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing: all is resident."""


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize(("batch_size", "n_tokens", "all_logits"), [
    (1, 1, False), (32, 200, False), (64, 200, True), (200, 200, False),
])  # fmt: skip
def test_peak_stays_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kv_dtype: str,
    batch_size: int,
    n_tokens: int,
    all_logits: bool,
) -> None:
    # Small limits, so that the bound is made of what depends on the model.
    monkeypatch.setattr("colibri_runtime.attention.SCORE_BYTES", 65536)
    monkeypatch.setattr("colibri_runtime.working_memory.SLACK", 32768)
    file = memory_file(name)
    backend = NumpyBackend()
    decoder = memory_decoder(
        file, store=QuietStore(file), backend=backend, context=200, kv_dtype=kv_dtype,
        batch_size=batch_size, prefetch_depth=2,
    )  # fmt: skip
    n_logits = n_tokens if all_logits else 1
    stated = working_bytes(file.model, batch_size, 200, backend, kv_dtype, n_logits)
    tokens = [int(t) for t in np.arange(n_tokens) % 200]

    tracemalloc.start()
    decoder.forward(tokens, all_logits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak <= stated - backend.workspace_bytes
    assert stated - backend.workspace_bytes <= 12 * peak + 65536
