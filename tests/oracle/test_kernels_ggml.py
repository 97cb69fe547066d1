"""Live: products and rounded activations beside ggml's own, in the wheel xllamacpp."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_format import DTYPES
from colibri_runtime.native_kernels import NativeKernels
from helpers.ggml_library import GgmlProducts, xllamacpp_library
from helpers.kernel_calls import expected, isas, matmul, runtime_library, stored
from helpers.kernel_products import COLUMNS, TYPES, inputs
from helpers.quantiser_rows import rows

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def ggml():
    return GgmlProducts(xllamacpp_library())


@pytest.mark.parametrize("name", TYPES)
def test_products_are_ggmls_to_the_order_of_its_sums(ggml, name):
    dtype = DTYPES[name]
    weights, x = inputs(name)
    theirs = np.array([[ggml.dot(name, row, token) for row in weights] for token in x])
    _, size = expected(x, weights, name)
    for isa in isas(runtime_library()):
        with NativeKernels(runtime_library(), isas=isa) as kernels:
            for form in (0, 16) if dtype.units else (0,):
                data = stored(weights, dtype, COLUMNS, form)
                ours = matmul(kernels, x, data, dtype, 16, form)

                # Both are float32 sums of the same products, each within 1e-5 of its size.
                assert (np.abs(ours - theirs) <= 2e-5 * size).all(), (isa, form)


@pytest.mark.parametrize(("name", "rounding"), [("q8_0", 3), ("q4_1", 4), ("f16", 1), ("bf16", 2)])
def test_rounded_activations_are_bit_for_bit_ggmls(ggml, name, rounding):
    library = runtime_library()
    call = library.function("colibri_round_row", "i32", "u32", "i32", "ptr", "i32", *["ptr"] * 5)
    with np.errstate(over="ignore"):
        for case, hard in rows(4, COLUMNS).items():
            for x in hard:
                theirs = ggml.rounded(name, x)
                for isa in isas(library):
                    values = np.zeros(2 * COLUMNS, np.uint8)
                    scales, sums = np.zeros((2, COLUMNS // 32), np.float32)
                    sums32 = np.zeros(COLUMNS // 32, np.int32)
                    call(int(isa), rounding, x.ctypes.data, COLUMNS, values.ctypes.data,
                         scales.ctypes.data, sums.ctypes.data, 0, sums32.ctypes.data)  # fmt: skip
                    if rounding in (1, 2):
                        assert (values == theirs).all(), case
                        continue
                    blocks = theirs.reshape(COLUMNS // 32, -1)
                    head = blocks.shape[1] - 32
                    halves = np.ascontiguousarray(blocks[:, :head]).view(np.float16)
                    assert (scales == halves[:, 0]).all(), case
                    # Where the scale is 0, integers are what infinity times 0 gives.
                    same = values[:COLUMNS].reshape(-1, 32) == blocks[:, head:]
                    assert same[scales != 0].all(), case
                    if rounding == 4:
                        assert (sums == halves[:, 1]).all(), case
