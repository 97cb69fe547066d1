"""Sampling: greedy, limits, and the same seed giving the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import UsageError
from colibri_runtime import ModelError
from colibri_runtime.sampler import Sampler, SamplingSpec

LOGITS = np.log(np.array([0.05, 0.5, 0.25, 0.2], np.float32))


def draws(n: int, logits: NDArray[np.float32] = LOGITS, **options: Any) -> NDArray[np.float64]:
    sampler = Sampler(SamplingSpec(**options))
    return np.bincount([sampler.choose(logits) for _ in range(n)], minlength=4) / n


def test_temperature_zero_takes_the_likeliest_and_the_lower_of_equals() -> None:
    sampler = Sampler(SamplingSpec(temperature=0))

    assert sampler.choose(LOGITS) == 1
    assert sampler.choose(np.array([1, 3, 3], np.float32)) == 1


def test_temperature_one_draws_by_the_softmax() -> None:
    found = draws(4000, temperature=1, seed=1)

    np.testing.assert_allclose(found, [0.05, 0.5, 0.25, 0.2], atol=0.03)


def test_low_temperature_sharpens() -> None:
    found = draws(4000, temperature=0.5, seed=1)

    squares = np.array([0.05, 0.5, 0.25, 0.2]) ** 2
    np.testing.assert_allclose(found, squares / squares.sum(), atol=0.03)


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    np.testing.assert_array_equal(draws(50, temperature=1e-300, seed=1), [0, 1, 0, 0])


def test_top_k_keeps_the_likeliest() -> None:
    found = draws(2000, temperature=1, top_k=2, seed=1)

    np.testing.assert_allclose(found, [0, 2 / 3, 1 / 3, 0], atol=0.04)


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert (draws(2000, temperature=1, top_k=99, seed=1) > 0).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [1]), (0.51, [1, 2]), (0.9, [1, 2, 3])])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: list[int]) -> None:
    found = draws(2000, temperature=1, top_p=top_p, seed=1)

    assert np.nonzero(found)[0].tolist() == kept


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 100)).astype(np.float32)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler(SamplingSpec(temperature=1, seed=seed))
        return [sampler.choose(row) for row in logits]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)


def test_logits_stay_as_they_are() -> None:
    logits = LOGITS.copy()

    Sampler(SamplingSpec(temperature=0.7, top_k=3, top_p=0.8, seed=1)).choose(logits)

    np.testing.assert_array_equal(logits, LOGITS)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingSpec(**options)

    assert caught.value.code == "bad-sampling"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits = np.array([0, bad, 1], np.float32)

    for temperature in (0.0, 1.0):
        with pytest.raises(ModelError) as caught:
            Sampler(SamplingSpec(temperature=temperature)).choose(logits)

        assert caught.value.code == "bad-logits"
