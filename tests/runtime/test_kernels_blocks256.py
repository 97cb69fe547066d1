"""Products with K-quants in C: right, the same in any company, and never saturated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import DTYPES, interleave
from colibri_runtime._native import Isa, NativeLibrary
from colibri_runtime.native_kernels import PRODUCT, NativeKernels, aligned_bytes
from helpers.arm_kernels import ARM_ISAS, ArmKernels
from helpers.ggml_library import Ggml, xllamacpp_library
from helpers.k_quants import LIMITS, Parts, extreme_parts, pack, products, random_parts
from helpers.kernel_calls import runtime_library

TYPES = sorted(LIMITS)
FORMS = [0, 16]
ISAS = [Isa.BASE, Isa.AVX2, Isa.AVX512, *ARM_ISAS]


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return runtime_library()


@pytest.fixture
def kernels(request, isa) -> Iterator[NativeKernels | ArmKernels]:
    """Products with `isa`, a parameter; of Arm's on other machines emulated."""
    library = runtime_library()
    if isa in library.isas:
        with NativeKernels(library, isas=isa | Isa.BASE) as made:
            yield made
    elif isa in (Isa.NEON, Isa.DOTPROD):
        yield ArmKernels(request.getfixturevalue("arm_library"), isas=isa | Isa.BASE)
    else:
        pytest.skip(f"this machine lacks {isa.name}")


def multiply(
    native_kernels: NativeKernels | ArmKernels,
    parts: Parts,
    form: int,
    x: NDArray[np.float32],
    at: int = 0,
) -> NDArray[np.float32]:
    """`(tokens, rows)`; the matrix begins `at` bytes after a multiple of 64."""
    rows = pack(parts)
    n_rows, columns = len(rows), 256 * parts.quants.shape[1]
    data = rows.reshape(-1)
    if form:
        data = interleave(data, DTYPES[parts.name], (n_rows, columns))
    held = aligned_bytes(at + data.size)
    held[at:] = data
    out = np.full((len(x), n_rows), np.nan, np.float32)
    record = np.zeros(1, PRODUCT)
    matrix = (held[at:].ctypes.data, n_rows, columns, DTYPES[parts.name].ggml_id, form)
    record[0] = (matrix, x.ctypes.data, columns, out.ctypes.data, n_rows, 0, len(x))
    native_kernels.matmul(record, aligned_bytes(native_kernels.matmul_workspace(record)))
    return out


def activations(
    values: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Floats that are rounded to `values` times a scale, or to their negatives times its own.

    Each block of `values` must hold 127 or -127; its scale is a power of two: nothing is lost.
    """
    scales = np.ldexp(1.0, rng.integers(-8, 3, values.shape[:2])).astype(np.float32)
    return (values * scales[..., None]).astype(np.float32).reshape(len(values), -1), scales


def random_values(n_tokens: int, n_blocks: int, rng: np.random.Generator) -> NDArray[np.int64]:
    values = rng.integers(-127, 128, (n_tokens, n_blocks, 256))
    values[:, :, 5] = 127
    return values


def check(
    got: NDArray[np.float32], parts: Parts, values: NDArray[np.int64], scales: NDArray[np.float32]
) -> None:
    """Sums within a block are of integers below 2^24 or rounded, at most 24 times and twice a
    block, each time by at most 2^-24 of a sum that is at most the sum of the sizes."""
    expected, sizes = products(parts, values, scales)
    n_blocks = parts.quants.shape[1]
    assert (abs(got - expected) <= (24 + 2 * n_blocks) * 2.0**-24 * sizes).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", [256, 512, 2304])
def test_products_are_those_of_float64(kernels, name, form, columns):
    rng = np.random.default_rng(columns)
    parts = random_parts(name, 32 if form else 7, columns // 256, rng)
    values = random_values(3, columns // 256, rng)
    x, scales = activations(values, rng)
    got = multiply(kernels, parts, form, x)

    check(got, parts, values, scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_largest_numbers_do_not_saturate(kernels, name, form):
    rng = np.random.default_rng(1)
    parts = extreme_parts(name, 16, 2)
    signs = np.ones((4, 2, 256), np.int64)
    signs[1] = -1
    signs[2, :, ::2] = -1
    signs[3] = np.where(rng.random((2, 256)) < 0.5, -1, 1)
    x, scales = activations(127 * signs, rng)
    got = multiply(kernels, parts, form, x)

    check(got, parts, 127 * signs, scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_product_of_a_row_and_a_token_is_the_same_in_any_company(kernels, name, form):
    rng = np.random.default_rng(2)
    # Interleaved, seven groups: kernels that read several at once take four, two and one.
    parts = random_parts(name, 112 if form else 48, 3, rng)
    x, _ = activations(random_values(9, 3, rng), rng)
    step = form or 1
    alone = np.stack([multiply(kernels, parts, form, row[None])[0] for row in x])
    for n_tokens in range(1, 10):
        together = multiply(kernels, parts, form, x[:n_tokens], at=n_tokens)
        assert (together == alone[:n_tokens]).all()
    for first, last in [(0, 1), (1, 3), (3, 7), (4, 7)] if form else [(0, 1), (5, 10), (40, 47)]:
        rows = slice(step * first, step * last)
        some = Parts(name, *(getattr(parts, part)[rows] for part in Parts.__slots__[1:]))
        assert (multiply(kernels, some, form, x[:2]) == alone[:2, rows]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_row_and_token_that_are_no_numbers_spoil_no_others(kernels, name, form):
    rng = np.random.default_rng(3)
    parts = random_parts(name, 16, 2, rng)
    x, _ = activations(random_values(2, 2, rng), rng)
    good = multiply(kernels, parts, form, x)
    parts.d[3, 1] = np.nan
    x[1, 300] = np.nan
    got = multiply(kernels, parts, form, x)

    assert np.isnan(got[0, 3])
    assert np.isnan(got[1]).all()
    assert (np.delete(got[0], 3) == np.delete(good[0], 3)).all()


@pytest.mark.oracle
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_ggml(library, name):
    rng = np.random.default_rng(4)
    parts = random_parts(name, 16, 8, rng)
    values = random_values(5, 8, rng)
    x, scales = activations(values, rng)
    expected = Ggml(xllamacpp_library()).dot_q8_k(
        pack(parts), name, -values.astype(np.int8), -scales
    )
    for isa in (isa for isa in Isa if isa in library.isas):
        for form in FORMS:
            with NativeKernels(library, isas=isa | Isa.BASE) as native_kernels:
                got = multiply(native_kernels, parts, form, x)
            # Both are sums of the same integers, rounded in different orders.
            sizes = products(parts, values, scales)[1]
            assert (abs(got - expected) <= 40 * 2.0**-24 * sizes).all()
