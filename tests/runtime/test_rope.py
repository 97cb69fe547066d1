"""Rotation by position: styles, scalings, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from colibri_format import RopeSpec
from colibri_runtime.decoder_errors import ModelError
from colibri_runtime.rope import Rope


def spec(style: str = "half", n_dims: int = 8, scaling: dict[str, Any] | None = None) -> RopeSpec:
    return RopeSpec(theta=10000.0, n_dims=n_dims, style=style, scaling=scaling)


def heads() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal((5, 3, 12)).astype(np.float32)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_pairs_turn_by_position_times_frequency(style: str) -> None:
    x = heads()
    rope = Rope(spec(style))

    turned = x.copy()
    rope.turn(turned, rope.tables(100, 5))

    pairs = [(i, i + 4) if style == "half" else (2 * i, 2 * i + 1) for i in range(4)]
    for number, (a, b) in enumerate(pairs):
        for place in range(5):
            angle = (100 + place) * 10000.0 ** (-2 * number / 8)
            z = (x[place, :, a] + 1j * x[place, :, b]) * np.exp(1j * angle)
            np.testing.assert_allclose(turned[place, :, a], z.real, atol=1e-5)
            np.testing.assert_allclose(turned[place, :, b], z.imag, atol=1e-5)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope(spec())
    q, k = heads()[:1], heads()[1:2]

    def score(at: int, distance: int) -> float:
        a, b = q.copy(), k.copy()
        rope.turn(a, rope.tables(at + distance, 1))
        rope.turn(b, rope.tables(at, 1))
        return float((a * b).sum())

    assert score(0, 7) == pytest.approx(score(1000, 7), abs=1e-3)


def test_divisors_divide_frequencies() -> None:
    divisors = np.array([1, 2, 4, 8], np.float32)

    np.testing.assert_allclose(
        Rope(spec(), divisors).frequencies, Rope(spec()).frequencies / divisors
    )


def test_default_scaling_changes_nothing() -> None:
    rope = Rope(spec(scaling={"type": "default", "rope_theta": 1.0}))

    np.testing.assert_array_equal(rope.frequencies, Rope(spec()).frequencies)


def test_yarn_magnitude_follows_its_factor_or_what_is_said() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

    assert Rope(spec(scaling=yarn)).magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert Rope(spec(scaling=yarn | {"attention_factor": 0.5})).magnitude == 0.5
    assert Rope(spec(scaling=yarn | {"factor": 1.0})).magnitude == 1.0


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "dynamic", "factor": 2.0},
        {"type": "longrope"},
        {},
        {"type": "linear"},
        {"type": "linear", "factor": 0},
        {"type": "linear", "factor": "2"},
        {"type": "linear", "factor": float("inf")},
        {"type": "llama3", "factor": 8.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7},
    ],
)
def test_a_scaling_that_is_not_understood_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        Rope(spec(scaling=scaling))

    assert caught.value.code == "unsupported-rope-scaling"


def test_divisors_and_a_scaling_at_once_are_refused() -> None:
    with pytest.raises(ModelError) as caught:
        Rope(spec(scaling={"type": "linear", "factor": 2.0}), np.ones(4, np.float32))

    assert caught.value.code == "unsupported-rope-scaling"


@pytest.mark.parametrize(
    ("theta", "change"),
    [
        (1.0, {}),
        (1e4, {"beta_fast": 1e308}),
        (1e4, {"beta_fast": 1e-30}),
        (1e4, {"original_max_position_embeddings": 1e-38}),
        (1e4, {"factor": 10**400}),
    ],
)
def test_yarn_of_impossible_numbers_is_refused(theta: float, change: dict[str, Any]) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | change

    try:
        Rope(RopeSpec(theta=theta, n_dims=8, scaling=scaling)).tables(0, 4)
    except ModelError as error:
        assert error.code == "unsupported-rope-scaling"
