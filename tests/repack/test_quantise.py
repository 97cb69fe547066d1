from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colibri_repack import RepackError, quantise_q8_0
from colibri_repack.quantise import decode_floats, first_not_finite

FLOATS = st.floats(-8e6, 8e6, width=32)


def reference(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0).reshape(-1)


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, (4, 32), elements=FLOATS))
def test_q8_0_is_bit_for_bit_that_of_gguf(values: np.ndarray) -> None:
    # A scale in the subnormal range has no finite reciprocal, and ggml's result is undefined.
    scales = np.abs(values).max(axis=1) / 127
    values[(scales > 0) & (scales < 1e-36)] = 0

    assert quantise_q8_0(values).tobytes() == reference(values).tobytes()


def test_q8_0_of_many_random_rows_is_that_of_gguf() -> None:
    values = np.random.default_rng(7).standard_normal((2000, 64)).astype(np.float32)

    assert quantise_q8_0(values).tobytes() == reference(values).tobytes()


def test_halves_round_away_from_zero() -> None:
    block = np.zeros(32, np.float32)
    block[:5] = [127, 0.5, -0.5, 2.5, 0.49999997]

    quants = quantise_q8_0(block)[2:].view(np.int8)

    assert quants[:5].tolist() == [127, 1, -1, 3, 0]


def test_zero_and_subnormal_blocks_become_zero() -> None:
    values = np.zeros((2, 32), np.float32)
    values[1] = 1e-44

    assert not quantise_q8_0(values).any()


def test_scale_beyond_float16_is_refused() -> None:
    with pytest.raises(RepackError) as caught:
        quantise_q8_0(np.full(32, 9e6, np.float32))

    assert caught.value.code == "scale-overflow"


def test_bfloat16_and_float16_decode_exactly() -> None:
    values = np.array([1.5, -2.0, 3.0e38, 1e-40], np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    half = np.array([1.5, 6e-8, -65504], np.float16)

    assert (
        decode_floats(upper.view(np.uint8), "bf16").view(np.uint32).tolist()
        == (values.view(np.uint32) & 0xFFFF0000).tolist()
    )
    assert decode_floats(half.view(np.uint8), "f16").tolist() == half.astype(np.float32).tolist()


def test_quantised_bytes_are_no_floats() -> None:
    with pytest.raises(RepackError) as caught:
        decode_floats(np.zeros(34, np.uint8), "q8_0")

    assert caught.value.code == "requantize"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_number_that_is_not_finite_is_found(bad: float) -> None:
    values = np.full(1000, 3e38, np.float32)

    assert first_not_finite(values) is None

    values[[700, 900]] = bad
    assert first_not_finite(values) == 700


def test_infinities_of_both_signs_do_not_hide_each_other() -> None:
    values = np.zeros(64, np.float32)
    values[[5, 6]] = [np.inf, -np.inf]

    assert first_not_finite(values) == 5
