"""Stored bytes turn to the same float32 as gguf's own decoders give, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from colibri_format import DTYPES
from colibri_runtime.decoder_errors import ModelError
from colibri_runtime.dequant import check_decodable, dequantise, has_own_decoder
from helpers.quant_bytes import random_rows

OWN = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
FOREIGN = ("q5_0", "q5_1", "q2_k", "q3_k", "q5_k", "iq4_nl", "iq4_xs", "iq3_s", "mxfp4", "tq1_0")


@pytest.mark.parametrize("name", OWN + FOREIGN)
def test_dequantise_gives_the_bits_of_gguf(name: str) -> None:
    dtype = DTYPES[name]
    rows = random_rows(dtype, n_rows=7, n_columns=1024, seed=3)
    out = np.empty((7, 1024), np.float32)

    dequantise(rows, dtype, out)

    expected = quants.dequantize(rows, GGMLQuantizationType(dtype.ggml_id))
    assert has_own_decoder(dtype) == (name in OWN)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32).reshape(7, 1024))


def test_dequantise_keeps_infinities_and_nans_of_float_types() -> None:
    values = np.array([[np.inf, -np.inf, np.nan, -0.0]], np.float16)
    out = np.empty((1, 4), np.float32)

    dequantise(values.view(np.uint8), DTYPES["f16"], out)

    np.testing.assert_array_equal(out, values.astype(np.float32))


@pytest.mark.parametrize("name", ["i32", "f64", "f8_e4m3"])
def test_a_dtype_nobody_decodes_is_refused_by_name_of_tensor(name: str) -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight") as caught:
        check_decodable(DTYPES[name], "x.colibri", "blk.0.attn_q.weight")

    assert caught.value.code == "unsupported-dtype"


def test_dequantise_refuses_a_dtype_nobody_decodes() -> None:
    with pytest.raises(ModelError) as caught:
        dequantise(np.zeros((1, 8), np.uint8), DTYPES["f64"], np.empty((1, 1), np.float32), "w")

    assert caught.value.code == "unsupported-dtype"
