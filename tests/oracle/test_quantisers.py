"""Live: this package's quantisers beside ggml's own, in the wheel xllamacpp."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_format import DTYPES
from colibri_repack import recode
from colibri_repack._native import ElementError, Isa
from helpers.ggml_library import Ggml, xllamacpp_library
from helpers.native_library import native_library
from helpers.quantiser_rows import OVERFLOWS, TYPES, UNDEFINED, importances, rows

pytestmark = pytest.mark.oracle

QUANTISED = [name for name in TYPES if DTYPES[name].is_quantised]


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    return Ggml(xllamacpp_library())


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_hard_rows_are_bit_for_bit_those_of_ggml(ggml: Ggml, name: str, is_weighted: bool) -> None:
    weights = importances(1280) if is_weighted and DTYPES[name].is_quantised else None
    library = native_library()
    for case, values in rows(40, 1280).items():
        if name in OVERFLOWS.get(case, ()) or name in UNDEFINED.get(case, ()):
            continue
        expected = ggml.quantise(values, name, weights)
        for isa in (isa for isa in Isa if isa in library.isas):
            got = np.zeros_like(expected)
            library.convert(
                values.view(np.uint8).reshape(-1), DTYPES["f32"], got, DTYPES[name],
                columns=1280, weights=weights, isa=isa,
            )  # fmt: skip
            assert (got == expected).all(), (case, isa)


@pytest.mark.parametrize("name", QUANTISED)
def test_random_bits_are_bit_for_bit_those_of_ggml(ggml: Ggml, name: str) -> None:
    rng = np.random.default_rng(11)
    n_compared = 0
    for _ in range(300):
        # Exponents in a window of 30, so that blocks hold subnormals as well as large numbers.
        low = rng.integers(2, 140)
        exponents = rng.integers(low, low + 30, 512, dtype=np.uint32) << np.uint32(23)
        bits = rng.integers(0, 2**32, 512, dtype=np.uint32) & np.uint32(0x807FFFFF) | exponents
        values = bits.view(np.float32).reshape(1, 512)
        try:
            got = recode(bits.view(np.uint8), DTYPES["f32"], DTYPES[name])
        except ElementError:
            continue
        assert (got == ggml.quantise(values, name)).all()
        n_compared += 1

    assert n_compared > 100


@pytest.mark.parametrize("name", QUANTISED)
def test_decoding_is_bit_for_bit_that_of_ggml(ggml: Ggml, name: str) -> None:
    data = ggml.quantise(rows(40, 1280)["heavy tails"] / np.float32(100), name)

    got = recode(data, DTYPES[name], DTYPES["f32"])

    assert got.tobytes() == ggml.dequantise(data, name, 40 * 1280).tobytes()
