"""The decoder agrees with transformers, and with itself however its input is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import UsageError
from colibri_runtime.decoder import Decoder
from colibri_runtime.decoder_errors import ModelError
from helpers.memory_model import MemoryStore, memory_decoder, memory_file
from helpers.random_models import CONFIGS, prompt_tokens

FIXTURES = Path(__file__).parent.parent / "fixtures"


def relative_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def one_by_one(decoder: Decoder, tokens: list[int]) -> NDArray[np.float32]:
    return np.stack([decoder.forward([token]) for token in tokens])


@pytest.fixture(scope="module")
def recorded() -> dict[str, NDArray[np.float32]]:
    with np.load(FIXTURES / "transformers_logits.npz") as file:
        return dict(file)


def test_every_random_model_has_a_recording(recorded: dict[str, NDArray[np.float32]]) -> None:
    assert recorded.keys() == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, recorded: dict[str, NDArray[np.float32]]
) -> None:
    decoder = memory_decoder(memory_file(name), seed=1, batch_size=16)

    logits = decoder.forward(prompt_tokens(name), all_logits=True)

    assert len(logits) >= 32
    assert relative_difference(logits, recorded[name]) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_single_steps_agree_with_batches(
    name: str, recorded: dict[str, NDArray[np.float32]]
) -> None:
    decoder = memory_decoder(memory_file(name))

    logits = one_by_one(decoder, prompt_tokens(name))

    assert relative_difference(logits, recorded[name]) < 1e-4


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "olmoe", "mixtral"])
@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_order_of_arrival_changes_no_bit(name: str, batch_size: int) -> None:
    file = memory_file(name)
    tokens = prompt_tokens(name)
    expected = memory_decoder(file, batch_size=batch_size).forward(tokens, all_logits=True)

    for seed in range(3):
        decoder = memory_decoder(file, seed=seed, batch_size=batch_size, prefetch_depth=seed)
        logits = decoder.forward(tokens, all_logits=True)

        np.testing.assert_array_equal(logits, expected)


def test_half_precision_keys_and_values_stay_near() -> None:
    file, tokens = memory_file("qwen3moe"), prompt_tokens("qwen3moe")
    exact = memory_decoder(file).forward(tokens)

    half = memory_decoder(file, kv_dtype="float16").forward(tokens)

    assert 0 < relative_difference(half, exact) < 2e-2


def test_each_expert_is_fetched_once_a_layer_and_batch() -> None:
    file = memory_file("qwen3moe")
    store = MemoryStore(file, seed=0)

    memory_decoder(file, store=store, batch_size=32).forward(prompt_tokens("qwen3moe"))

    fetched = [call for call in store.calls if call[0] == "fetch"]
    assert [layer for _, layer, _ in fetched] == [0, 1, 2, 0, 1, 2]
    assert all(len(set(experts)) == len(experts) for _, _, experts in fetched)


@pytest.mark.parametrize(("depth", "hints"), [(0, []), (1, [1, 2]), (2, [1, 2, 2])])
def test_hints_follow_demand_and_reach_as_far_as_asked(depth: int, hints: list[int]) -> None:
    file = memory_file("qwen3moe")
    store = MemoryStore(file)

    memory_decoder(file, store=store, prefetch_depth=depth).forward([5])

    assert [layer for kind, layer, _ in store.calls if kind == "prefetch"] == hints
    assert [layer for kind, layer, _ in store.calls if kind == "fetch"] == [0, 1, 2]
    assert store.calls[0][0] == "fetch"
    assert all(len(experts) == 3 for kind, _, experts in store.calls if kind == "prefetch")


def test_a_dense_model_hints_its_next_layer() -> None:
    file = memory_file("qwen3")
    store = MemoryStore(file)

    memory_decoder(file, store=store).forward([5])

    assert [call for call in store.calls if call[0] == "prefetch"] == [
        ("prefetch", 1, (0,)),
        ("prefetch", 2, (0,)),
    ]


def test_layers_without_experts_are_neither_fetched_nor_hinted() -> None:
    file = memory_file("qwen2moe")
    store = MemoryStore(file)

    memory_decoder(file, store=store, prefetch_depth=2).forward([5])

    assert [(kind, layer) for kind, layer, _ in store.calls] == [
        ("fetch", 0),
        ("prefetch", 2),
        ("fetch", 2),
    ]


def test_batches_hint_at_most_half_of_the_experts() -> None:
    file = memory_file("qwen3moe")
    store = MemoryStore(file)

    memory_decoder(file, store=store).forward(prompt_tokens("qwen3moe", 32))

    hints = [experts for kind, _, experts in store.calls if kind == "prefetch"]
    assert [len(experts) for experts in hints] == [5, 5]


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, NDArray[np.intp], object, frozenset[int]]] = []

    def routed(
        self,
        layer: int,
        first_position: int,
        experts: NDArray[np.intp],
        weights: object,
        predicted: frozenset[int],
    ) -> None:
        self.seen.append((layer, first_position, experts, weights, predicted))


def test_an_observer_sees_what_was_wanted_and_what_was_predicted() -> None:
    file, recorder = memory_file("qwen3moe"), Recorder()
    decoder = memory_decoder(file, observer=recorder)

    decoder.forward([5, 6])
    decoder.forward([7])

    assert [(layer, position) for layer, position, *_ in recorder.seen] == [
        (0, 0), (1, 0), (2, 0), (0, 2), (1, 2), (2, 2)
    ]  # fmt: skip
    assert recorder.seen[0][2].shape == (2, 3)
    assert recorder.seen[3][4] == frozenset()
    assert len(recorder.seen[4][4]) == 3


def test_forward_continues_after_truncation() -> None:
    decoder = memory_decoder(memory_file("mixtral"))
    expected = decoder.forward([4, 5, 6])
    decoder.forward([7])

    decoder.kv_cache.truncate(2)

    np.testing.assert_allclose(decoder.forward([6]), expected, atol=1e-5)


def test_context_that_overflows_is_refused_and_nothing_is_kept() -> None:
    decoder = memory_decoder(memory_file("llama"), context=8)
    decoder.forward([3] * 6)

    with pytest.raises(UsageError) as caught:
        decoder.forward([3] * 3)

    assert caught.value.code == "context-full"
    assert decoder.kv_cache.length == 6


@pytest.mark.parametrize(
    ("tokens", "code"), [([], "no-tokens"), ([203], "bad-token"), ([-1], "bad-token")]
)
def test_tokens_outside_the_vocabulary_are_refused(tokens: list[int], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        memory_decoder(memory_file("llama")).forward(tokens)

    assert caught.value.code == code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"prefetch_depth": 3}, "bad-prefetch-depth"),
        ({"prefetch_depth": -1}, "bad-prefetch-depth"),
        ({"batch_size": 0}, "bad-batch-size"),
    ],
)
def test_knobs_out_of_range_are_refused(options: dict[str, int], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        memory_decoder(memory_file("llama"), **options)  # type: ignore[arg-type]

    assert caught.value.code == code


class FailingStore(MemoryStore):
    """Ends early at the second layer, and says whether its iterator was closed."""

    is_closed = False

    def _leases(self, layer, order):  # type: ignore[no-untyped-def]
        try:
            for lease in super()._leases(layer, order[:1] if layer == 1 else order):
                yield lease
                if layer == 1:
                    return
        finally:
            self.is_closed = True


def test_an_expert_that_never_comes_is_an_error_and_leaves_the_cache_as_it_was() -> None:
    file = memory_file("mixtral")
    store = FailingStore(file)
    decoder = memory_decoder(file, store=store)

    with pytest.raises(ModelError) as caught:
        decoder.forward([5, 6, 7])

    assert caught.value.code == "expert-not-delivered"
    assert decoder.kv_cache.length == 0


def test_a_failure_while_computing_gives_the_leases_back() -> None:
    file = memory_file("mixtral")
    store = FailingStore(file)
    decoder = memory_decoder(file, store=store)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    decoder._steps.experts = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        decoder.forward([5])

    assert store.is_closed
