"""What followed similar tokens: C against NumPy, and against reasoning."""

import numpy as np
import pytest

from colibri_runtime._native import native
from colibri_runtime.recall import MAX_PICKS, WINDOW, Recall

needs_library = pytest.mark.skipif(
    native().library is None, reason=f"no native library: {native().reason}"
)


def stream(n_tokens, n_layers, n_experts, top_k, seed):
    random = np.random.default_rng(seed)
    for _ in range(n_tokens):
        for layer in range(n_layers):
            experts = random.permutation(n_experts)[:top_k].tolist()
            yield layer, experts, random.random(top_k).tolist()


@needs_library
@pytest.mark.parametrize(
    ("n_tokens", "n_experts", "top_k"), [(3 * WINDOW, 12, 2), (40, 40, 8), (20, 700, 4)]
)
def test_c_and_numpy_agree(n_tokens, n_experts, top_k):
    """Both sum in another order and in float32 or 64: 1e-5 of values below 3."""
    in_c, in_numpy = Recall(3), Recall(3, is_native=False)
    assert (in_c.is_native, in_numpy.is_native) == (True, False)

    for event in stream(n_tokens, 3, n_experts, top_k, seed=n_experts):
        a, b = (dict(zip(*r.observe(*event), strict=True)) for r in (in_c, in_numpy))
        for expert in a.keys() | b.keys():
            # On the verge of what is told of, rounding may decide.
            assert a.get(expert, 0.02) == pytest.approx(b.get(expert, 0.02), abs=1e-5)


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
def test_the_successors_of_a_token_that_was_alike_are_likely(is_native):
    recall = Recall(1, is_native=is_native)
    for _ in range(3):
        for experts in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9]):
            recall.observe(0, experts, [1.0, 1.0])

    likely = dict(zip(*recall.observe(0, [0, 1], [1.0, 1.0]), strict=True))

    assert min(likely[2], likely[3]) > 0.9
    assert max(value for expert, value in likely.items() if expert not in {2, 3}) < 0.7


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
def test_what_is_not_asked_is_remembered_all_the_same(is_native):
    recall = Recall(1, is_native=is_native)
    for experts in ([0], [1], [2]):
        assert recall.observe(0, experts, [1.0], is_asked=False) == ([], [])

    likely, _ = recall.observe(0, [0], [1.0])

    assert 1 in likely


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
def test_events_of_none_and_of_a_batch_are_no_tokens(is_native):
    recall = Recall(1, is_native=is_native)
    many = list(range(MAX_PICKS + 1))

    assert recall.observe(0, many, [1.0] * len(many)) == ([], [])
    assert recall.observe(0, [], []) == ([], [])
    assert recall.observe(0, [5], [1.0])[0] in ([], [5])


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
def test_numbers_of_experts_may_grow(is_native):
    recall = Recall(1, is_native=is_native)
    for _ in range(2):
        for experts in ([0, 65535], [1, 300], [2, 3]):
            likely, _ = recall.observe(0, experts, [1.0, 1.0])

    assert 65535 in likely
