"""Live: products and rounded activations beside ggml's own, in the wheel xllamacpp."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from colibri_format import DTYPES
from colibri_runtime.native_kernels import NativeKernels
from helpers.ggml_library import xllamacpp_library
from helpers.kernel_calls import expected, isas, matmul, runtime_library, stored
from helpers.quant_bytes import random_rows
from helpers.quantiser_rows import rows

pytestmark = pytest.mark.oracle

COLUMNS = 1024
# ggml's number of the type that activations become, its quantiser, and bytes of their block.
ACTIVATIONS = {
    "f16": ("f16", 1, 2), "bf16": ("bf16", 1, 2), "q8_0": ("q8_0", 32, 34),
    "q4_0": ("q8_0", 32, 34), "q5_0": ("q8_0", 32, 34), "mxfp4": ("q8_0", 32, 34),
    "q4_1": ("q8_1", 32, 36), "q5_1": ("q8_1", 32, 36),
}  # fmt: skip


@pytest.fixture(scope="module")
def ggml():
    library = ctypes.CDLL(str(xllamacpp_library()))
    library.ggml_cpu_init()
    return library


def ggml_rounded(ggml, name, x):
    """The bytes ggml multiplies with, of one row."""
    kind, block, size = ACTIVATIONS[name]
    out = np.zeros(x.size // block * size, np.uint8)
    function = {
        "f16": "ggml_cpu_fp32_to_fp16", "bf16": "ggml_cpu_fp32_to_bf16",
        "q8_0": "quantize_row_q8_0", "q8_1": "quantize_row_q8_1",
    }[kind]  # fmt: skip
    call = getattr(ggml, function)
    call.restype, call.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    call(x.ctypes.data, out.ctypes.data, x.size)
    return out


def ggml_dot(ggml, name, weights, x):
    """ggml's product of one row of bytes with one row of activations."""
    if name == "f32":
        function, held = ggml.ggml_vec_dot_f32, x
    else:
        suffix = "" if name in ("f16", "bf16") else f"_{ACTIVATIONS[name][0]}"
        function = getattr(ggml, f"ggml_vec_dot_{name}{suffix}")
        held = ggml_rounded(ggml, name, x)
    function.restype = None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    function.argtypes = (ctypes.c_int, *[pointer, size] * 3, ctypes.c_int)
    out = np.zeros(1, np.float32)
    function(x.size, out.ctypes.data, 0, weights.ctypes.data, 0, held.ctypes.data, 0, 1)
    return out[0]


@pytest.mark.parametrize("name", ["f32", *ACTIVATIONS])
def test_products_are_ggmls_to_the_order_of_its_sums(ggml, name):
    dtype = DTYPES[name]
    weights = random_rows(dtype, 16, COLUMNS, seed=6)
    x = np.random.default_rng(8).standard_normal((2, COLUMNS)).astype(np.float32)
    theirs = np.array([[ggml_dot(ggml, name, row, token) for row in weights] for token in x])
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
                theirs = ggml_rounded(ggml, name, x)
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
