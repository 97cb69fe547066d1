"""Products of stored matrices in C: right to float32's rounding, the same bits however asked."""

import json
from pathlib import Path

import numpy as np
import pytest

from colibri_format import DTYPES
from colibri_runtime._native import Isa
from colibri_runtime.native_kernels import (
    PRODUCT,
    KernelError,
    NativeKernels,
    aligned_bytes,
)
from helpers import kernel_products
from helpers.arm_kernels import ArmKernels
from helpers.kernel_calls import (
    ROUNDINGS,
    decoded,
    expected,
    isas,
    matmul,
    matrix_record,
    runtime_library,
    stored,
)
from helpers.quant_bytes import random_rows

TYPES = tuple(ROUNDINGS)
FORMS = [(name, 0) for name in TYPES] + [(name, 16) for name in TYPES if DTYPES[name].units]
RECORDED = Path(__file__).parents[1] / "fixtures" / "kernels.json"
TOKENS = (1, 2, 3, 4, 5, 8, 9)
# Products and integer sums within a quant block are exact. The rest is a float32 sum of one term a
# block, in order, each rounded twice: at most about 2 * n_blocks * 2^-24 of the sum of sizes;
# plain floats are summed in 16 or more lanes. Rows here have 23 blocks or 736 values.
TOLERANCE = 1e-5
COLUMNS = 736


@pytest.fixture(scope="module")
def library():
    return runtime_library()


@pytest.fixture(scope="module", params=["here", pytest.param("aarch64", marks=pytest.mark.arm)])
def every_isa(request):
    if request.param == "here":
        library = request.getfixturevalue("library")
        made = [NativeKernels(library, isas=isa) for isa in isas(library)]
    else:
        library = request.getfixturevalue("arm_library")
        made = [ArmKernels(library, isas=isa) for isa in isas(library)]
    yield made
    for kernels in made:
        kernels.close()


def activations(n_tokens, n_columns=COLUMNS, seed=5):
    """Rows whose groups differ in size a thousandfold."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, n_columns))
    sizes = 10.0 ** rng.uniform(-2, 1, (n_tokens, n_columns // 32))
    return (x * np.repeat(sizes, 32, axis=1)).astype(np.float32)


def row_counts(row_interleave):
    return (16, 48) if row_interleave else (1, 2, 17, 33)


@pytest.mark.parametrize(("name", "row_interleave"), FORMS)
def test_products_are_those_of_rounded_activations(every_isa, name, row_interleave):
    dtype = DTYPES[name]
    for n_rows in row_counts(row_interleave):
        rows = random_rows(dtype, n_rows, COLUMNS, seed=n_rows)
        data = stored(rows, dtype, COLUMNS, row_interleave)
        for n_tokens in TOKENS:
            x = activations(n_tokens)
            product, size = expected(x, rows, name)
            for kernels in every_isa:
                got = matmul(kernels, x, data, dtype, n_rows, row_interleave)

                assert (np.abs(got - product) <= TOLERANCE * size).all(), (kernels.isas, n_tokens)


@pytest.mark.parametrize("name", TYPES)
def test_rounding_costs_what_the_number_of_bits_says(every_isa, name):
    # Half a step of the largest value of a group: 1/254 with int8, 2^-9 with bfloat16, 2^-12 with
    # half floats, each of at most the group's largest, here within 4.5 times the average.
    x = np.random.default_rng(3).standard_normal((2, COLUMNS)).astype(np.float32)
    rows = random_rows(DTYPES[name], 8, COLUMNS, seed=2)
    data = stored(rows, DTYPES[name], COLUMNS, 0)
    weights = decoded(rows, name, COLUMNS)
    size = np.abs(x).astype(np.float64) @ np.abs(weights).T
    for kernels in every_isa:
        got = matmul(kernels, x, data, DTYPES[name], 8)

        assert (np.abs(got - x @ weights.T) <= 0.02 * size).all()


@pytest.mark.parametrize(("name", "row_interleave"), FORMS)
def test_a_result_is_the_same_in_any_company(every_isa, name, row_interleave):
    # Seven groups of 16: kernels that read several groups at once take four, two and one.
    dtype, n_rows = DTYPES[name], 112
    rows = random_rows(dtype, n_rows, COLUMNS, seed=1)
    data = stored(rows, dtype, COLUMNS, row_interleave)
    groups = data.reshape(n_rows // 16, -1)
    shifted = np.empty(data.size + 1, np.uint8)[1:]
    shifted[:] = data
    x = activations(9)
    for kernels in every_isa:
        together = matmul(kernels, x, data, dtype, n_rows, row_interleave)
        of_tokens = [
            matmul(kernels, x[t : t + 1], data, dtype, n_rows, row_interleave) for t in range(9)
        ]
        of_groups = [matmul(kernels, x, group, dtype, 16, row_interleave) for group in groups]
        elsewhere = matmul(kernels, x, shifted, dtype, n_rows, row_interleave)

        assert (together == np.concatenate(of_tokens)).all()
        assert (together == np.concatenate(of_groups, axis=1)).all()
        assert (together == elsewhere).all()


@pytest.mark.parametrize("n_threads", [2, 3, 7])
@pytest.mark.parametrize(("name", "row_interleave"), [("q8_0", 0), ("q4_0", 16), ("f32", 0)])
def test_a_result_is_the_same_with_any_number_of_threads(library, name, row_interleave, n_threads):
    dtype = DTYPES[name]
    rows = random_rows(dtype, 2048, 256, seed=1)
    data = stored(rows, dtype, 256, row_interleave)
    x = activations(3, 256)
    with NativeKernels(library) as alone:
        one = matmul(alone, x, data, dtype, 2048, row_interleave)

    with NativeKernels(library, n_threads=n_threads) as team:
        for _ in range(20):
            assert (matmul(team, x, data, dtype, 2048, row_interleave) == one).all()


@pytest.mark.parametrize(
    ("name", "row_interleave"), [form for form in FORMS if DTYPES[form[0]].is_quantised]
)
@pytest.mark.parametrize("weight_byte", [0x00, 0x7F, 0x80, 0x88, 0x0F, 0xF0, 0xFF])
def test_extreme_weights_and_activations_do_not_saturate(
    every_isa, name, row_interleave, weight_byte
):
    dtype = DTYPES[name]
    rows = random_rows(dtype, 16, 64, seed=4).reshape(-1, dtype.block_bytes)
    head = 1 if name == "mxfp4" else 4 if name.endswith("_1") else 2
    rows[:, head:] = weight_byte
    rows = rows.reshape(16, -1)
    data = stored(rows, dtype, 64, row_interleave)
    x = np.ones((3, 64), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    product, size = expected(x, rows, name)
    for kernels in every_isa:
        got = matmul(kernels, x, data, dtype, 16, row_interleave)

        assert (np.abs(got - product) <= TOLERANCE * size).all()


@pytest.mark.parametrize(("name", "row_interleave"), FORMS)
def test_zeros_give_zeros(every_isa, name, row_interleave):
    dtype = DTYPES[name]
    rows = random_rows(dtype, 16, 64, seed=4)
    for kernels in every_isa:
        data = stored(rows, dtype, 64, row_interleave)
        got = matmul(kernels, np.zeros((2, 64), np.float32), data, dtype, 16, row_interleave)

        assert (got == 0).all()


@pytest.mark.parametrize(("name", "row_interleave"), FORMS)
def test_a_token_that_is_no_number_gives_none_and_harms_no_other(every_isa, name, row_interleave):
    dtype = DTYPES[name]
    rows = random_rows(dtype, 16, COLUMNS, seed=4)
    data = stored(rows, dtype, COLUMNS, row_interleave)
    x = activations(5)
    healthy = [0, 4]
    bad = x.copy()
    bad[1] = np.nan
    bad[2, 17] = np.nan
    bad[3, 40] = -np.inf
    for kernels in every_isa:
        got = matmul(kernels, bad, data, dtype, 16, row_interleave)

        assert not np.isfinite(got[1:4]).any()
        assert np.isnan(got[1:3]).all()
        unharmed = matmul(kernels, x, data, dtype, 16, row_interleave)[healthy]
        assert (got[healthy] == unharmed).all()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_rows_of_floats_may_have_any_length(every_isa, name):
    for n_columns in (1, 7, 8, 15, 16, 17, 31, 33, 47, 100):
        rows = random_rows(DTYPES[name], 3, n_columns, seed=n_columns)
        data = stored(rows, DTYPES[name], n_columns, 0)
        x = np.random.default_rng(1).standard_normal((2, n_columns)).astype(np.float32)
        product, size = expected(x, rows, name)
        for kernels in every_isa:
            got = matmul(kernels, x, data, DTYPES[name], 3)

            assert (np.abs(got - product) <= TOLERANCE * size).all(), n_columns


def test_subnormal_scales_and_weights_count(every_isa):
    dtype = DTYPES["q8_0"]
    rows = random_rows(dtype, 16, 32, seed=9).reshape(16, 34)
    rows[:, :2] = np.float16(3e-7).reshape(1).view(np.uint8)
    x = np.full((1, 32), np.float32(1e30))
    x[0, 0] = -1e30
    product, size = expected(x / np.float32(1e30), rows, "q8_0")
    for kernels in every_isa:
        for form in (0, 16):
            data = stored(rows, dtype, 32, form)
            got = matmul(kernels, x / np.float32(1e30), data, dtype, 16, form)

            assert (np.abs(got - product) <= TOLERANCE * size).all()
    mxfp4 = random_rows(DTYPES["mxfp4"], 16, 32, seed=9).reshape(16, 17)
    mxfp4[:, 0] = np.arange(16) % 4  # 2^-127 and the like, half of which are subnormal
    ones = np.ones((1, 32), np.float32)
    product, size = expected(ones, mxfp4, "mxfp4")
    for kernels in every_isa:
        for form in (0, 16):
            data = stored(mxfp4, DTYPES["mxfp4"], 32, form)
            got = matmul(kernels, ones, data, DTYPES["mxfp4"], 16, form)

            assert (np.abs(got - product) <= TOLERANCE * size + 2.0**-149).all()


@pytest.mark.parametrize(("name", "row_interleave"), FORMS)
def test_products_are_those_recorded_from_ggml(every_isa, name, row_interleave):
    weights, x = kernel_products.inputs(name)
    theirs = np.array(json.loads(RECORDED.read_text())["products"][name])
    _, size = expected(x, weights, name)
    data = stored(weights, DTYPES[name], kernel_products.COLUMNS, row_interleave)
    for kernels in every_isa:
        got = matmul(kernels, x, data, DTYPES[name], len(weights), row_interleave)

        # Both are float32 sums of the same products, each within TOLERANCE.
        assert (np.abs(got - theirs) <= 2 * TOLERANCE * size).all()


def test_bias_is_added_to_every_token(every_isa):
    rows = random_rows(DTYPES["q8_0"], 20, 64, seed=1)
    data = stored(rows, DTYPES["q8_0"], 64, 0)
    x = activations(9, 64)
    bias = np.linspace(-3, 3, 20, dtype=np.float32)
    for kernels in every_isa:
        got = matmul(kernels, x, data, DTYPES["q8_0"], 20, bias=bias)

        assert (got == matmul(kernels, x, data, DTYPES["q8_0"], 20) + bias).all()


def test_many_products_are_one_call(library):
    names = ("q4_0", "q8_0", "f16", "q5_1")
    x = activations(3, 64)
    wide = activations(2, 96, seed=8)
    with NativeKernels(library, n_threads=2) as kernels:
        products = np.zeros(6, PRODUCT)
        held = []
        for i, record in enumerate(products):
            name, acts = names[i % 4], wide if i == 5 else x
            dtype, n_rows = DTYPES[name], 40 + 100 * i
            rows = random_rows(dtype, n_rows, acts.shape[1], seed=i)
            data = stored(rows, dtype, acts.shape[1], 0)
            out = np.zeros((len(acts), n_rows), np.float32)
            record["matrix"] = matrix_record(data, dtype, n_rows, acts.shape[1], 0)
            record["x"], record["x_stride"] = acts.ctypes.data, acts.shape[1]
            record["out"], record["out_stride"] = out.ctypes.data, n_rows
            record["n_tokens"] = len(acts)
            held.append((acts, data, dtype, out))

        workspace = aligned_bytes(kernels.matmul_workspace(products))
        kernels.matmul(products, workspace)

        for acts, data, dtype, out in held:
            assert (out == matmul(kernels, acts, data, dtype, out.shape[1])).all()


def test_many_tokens_are_rounded_by_the_team(library):
    rows = random_rows(DTYPES["q8_0"], 32, 1024, seed=1)
    data = stored(rows, DTYPES["q8_0"], 1024, 16)
    x = activations(100, 1024)
    with NativeKernels(library, n_threads=2) as kernels:
        got = matmul(kernels, x, data, DTYPES["q8_0"], 32, 16)

        one = matmul(kernels, x[57:58], data, DTYPES["q8_0"], 32, 16)
        assert (got[57] == one[0]).all()


def test_no_products_are_no_work(library):
    with NativeKernels(library) as kernels:
        kernels.matmul(np.zeros(0, PRODUCT), aligned_bytes(0))


def broken_product(**changes):
    data, x, out = aligned_bytes(34 * 32), np.zeros((1, 32), np.float32), np.zeros((1, 32), "f4")
    data[:] = 0
    product = np.zeros(1, PRODUCT)
    product["matrix"] = matrix_record(data, DTYPES["q8_0"], 32, 32, 0)
    product["x"], product["x_stride"] = x.ctypes.data, 32
    product["out"], product["out_stride"] = out.ctypes.data, 32
    product["n_tokens"] = 1
    for field, value in changes.items():
        place = product["matrix"] if field in PRODUCT["matrix"].names else product
        place[field] = value
    return product, (data, x, out)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"type": 99}, r"ENOTSUP|EOPNOTSUPP"),
        ({"row_interleave": 8}, r"ENOTSUP|EOPNOTSUPP"),
        ({"columns": 48}, "EINVAL"),
        ({"columns": 0}, "EINVAL"),
        ({"columns": 2**31}, "EINVAL"),
        ({"rows": 0}, "EINVAL"),
        ({"rows": -1}, "EINVAL"),
        ({"rows": 20, "row_interleave": 16}, "EINVAL"),
        ({"data": 0}, "EINVAL"),
        ({"x": 0}, "EINVAL"),
        ({"out": 0}, "EINVAL"),
        ({"x_stride": 31}, "EINVAL"),
        ({"out_stride": 31}, "EINVAL"),
        ({"n_tokens": -1}, "EINVAL"),
        ({"n_tokens": 2**31}, "EINVAL"),
    ],
)
def test_impossible_products_are_refused(library, changes, answer):
    product, _held = broken_product(**changes)
    with NativeKernels(library) as kernels:
        with pytest.raises(KernelError, match=answer) as raised:
            kernels.matmul(product, aligned_bytes(4096))

        assert raised.value.code == "bad-product"


def test_small_or_misaligned_workspace_is_refused(library):
    product, _held = broken_product()
    with NativeKernels(library) as kernels:
        size = kernels.matmul_workspace(product)
        with pytest.raises(KernelError, match="ENOSPC"):
            kernels.matmul(product, aligned_bytes(size)[: size - 1])
        with pytest.raises(KernelError, match="EINVAL"):
            kernels.matmul(product, aligned_bytes(size + 64)[8 : size + 8])


def test_workspace_is_below_its_stated_bound(library):
    acts_bytes = library.function("colibri_acts_bytes", "i64", "i32", "i64", "i64")
    product, _held = broken_product()
    many = np.repeat(product, 5)
    with NativeKernels(library) as kernels:
        assert kernels.matmul_workspace(many) <= 5 * (512 + acts_bytes(3, 1, 32))
    assert acts_bytes(3, 1, 31) < 0
    assert acts_bytes(7, 1, 32) < 0
    assert acts_bytes(5, 1, 32) < 0
    assert acts_bytes(3, -1, 32) < 0


def test_types_without_a_kernel_are_named(library):
    with NativeKernels(library) as kernels:
        assert not kernels.has_kernel(DTYPES["iq2_xxs"])
        assert not kernels.has_kernel(DTYPES["u8"])
        assert not kernels.has_kernel(DTYPES["f32"], 16)
        assert all(kernels.has_kernel(DTYPES[name], form) for name, form in FORMS)


def test_base_code_is_used_where_it_is_asked_for(library):
    with NativeKernels(library, isas=Isa(0)) as kernels:
        assert kernels.isas == Isa.BASE
