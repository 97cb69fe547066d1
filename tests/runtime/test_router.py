"""Routing: softmax over all experts, ties, and what is worth a hint."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_runtime.router import choose, predict, route


@pytest.mark.parametrize("norm_top_k", [False, True])
def test_weights_are_shares_of_a_softmax_over_all_experts(norm_top_k: bool) -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))

    experts, weights = route(logits, 2, norm_top_k)

    np.testing.assert_array_equal(experts, [[1, 3]])
    expected = np.array([[0.4, 0.3]]) / (0.7 if norm_top_k else 1)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_of_equals_the_lowest_number_comes_first() -> None:
    experts, _ = route(np.array([[1, 2, 2, 2, 1]], np.float32), 4, True)

    np.testing.assert_array_equal(experts, [[1, 2, 3, 0]])


def test_large_logits_do_not_overflow() -> None:
    _, weights = route(np.array([[1e4, -1e4, 0]], np.float32), 2, False)

    np.testing.assert_array_equal(weights, [[1, 0]])


def test_one_token_is_predicted_by_its_top_k() -> None:
    chosen = choose(np.array([[0, 3, 1, 2]], np.float32), 2)

    assert predict(chosen, 4) == [1, 3]


def test_many_tokens_are_predicted_by_votes() -> None:
    logits = np.eye(6, dtype=np.float32)[[5, 5, 2, 0, 5, 2, 1]]

    assert predict(choose(logits, 1), 6) == [5, 2, 0]
