"""Activations rounded in C: ggml's formulas, the same bits from every instruction set."""

import numpy as np
import pytest

from colibri_runtime._native import Isa
from helpers.arm_emulator import ArmLibrary
from helpers.kernel_calls import isas, rounded_groups, runtime_library
from helpers.quantiser_rows import rows

NONE, F16, BF16, Q8_0, Q8_1, Q8_K = range(6)
COLUMNS = 1024


@pytest.fixture(scope="module")
def library():
    return runtime_library()


def round_row(library, isa, rounding, x):
    """Values (bytes), scales, sums, sums16 and sums32 of one row."""
    width = {NONE: 4, F16: 2, BF16: 2}.get(rounding, 1)
    group = 256 if rounding == Q8_K else 32
    arrays = (
        np.zeros(x.size * width, np.uint8),
        np.zeros(x.size // group, np.float32),
        np.zeros(x.size // group, np.float32),
        np.zeros(x.size // 16, np.int16),
        np.zeros(x.size // group, np.int32),
    )
    if isinstance(library, ArmLibrary):
        library.clear()
        x_there, *there = [library.place(array) for array in (x, *arrays)]
        assert library.call("colibri_round_row", isa, rounding, x_there, x.size, *there) == 0
        return tuple(map(library.read, there, arrays))
    call = library.function(
        "colibri_round_row", "i32", "u32", "i32", "ptr", "i32", *["ptr"] * 5
    )  # fmt: skip
    addresses = [array.ctypes.data for array in arrays]
    assert call(int(isa), rounding, x.ctypes.data, x.size, *addresses) == 0
    return arrays


def hard_rows():
    """Every row that quantisers find hard, and one that holds ties between integers.

    Groups whose largest value is below 127 / the largest float have an infinite inverse and the
    scale 0: what their integers are does not matter, and is left out.
    """
    ties = np.arange(COLUMNS, dtype=np.float32) % 64 - 31.5
    ties[::32] = 127
    found = [row for case in rows(4, COLUMNS).values() for row in case]
    return [row for row in [*found, ties] if not 0 < np.abs(row).max() < 1e-30]


@pytest.mark.parametrize("rounding", [NONE, F16, BF16, Q8_0, Q8_1, Q8_K])
def test_every_instruction_set_gives_the_same_bits(library, rounding):
    awkward = np.full(COLUMNS, np.float32(1))
    awkward[3], awkward[300], awkward[700] = np.nan, np.inf, -np.inf
    for x in [*hard_rows(), awkward]:
        base = round_row(library, Isa.BASE, rounding, x)
        for isa in isas(library):
            got = round_row(library, isa, rounding, x)

            assert all(
                (a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(base, got, strict=True)
            )


@pytest.mark.arm
@pytest.mark.parametrize("rounding", [NONE, F16, BF16, Q8_0, Q8_1, Q8_K])
def test_arm_gives_the_bits_of_this_machine(library, arm_library, rounding):
    # But those of a NaN that arises: its sign and payload are the processor's choice.
    for x in hard_rows():
        base = round_row(library, Isa.BASE, rounding, x)
        for isa in isas(arm_library):
            got = round_row(arm_library, isa, rounding, x)

            assert all(
                (a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(base, got, strict=True)
            )


@pytest.mark.arm
@pytest.mark.parametrize("rounding", [Q8_0, Q8_1, Q8_K])
def test_on_arm_a_group_that_holds_no_number_has_such_a_scale(arm_library, rounding):
    x = np.ones(COLUMNS, np.float32)
    x[0], x[512] = np.nan, np.inf
    for isa in isas(arm_library):
        scales = round_row(arm_library, isa, rounding, x)[1].reshape(4, -1)[:, 0]

        assert np.isnan(scales[0])
        assert (np.isfinite(scales) == [False, True, False, True]).all()


@pytest.mark.arm
def test_arm_rounds_every_half_float_and_what_lies_between_to_nearest_even(arm_library):
    every_half = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = every_half[np.isfinite(every_half)]
    between = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        for isa in isas(arm_library):
            for x in (finite, between, np.nextafter(finite, np.float32(np.inf))):
                values = round_row(arm_library, isa, F16, x)[0].view(np.uint16)

                assert (values == x.astype(np.float16).view(np.uint16)).all()


@pytest.mark.parametrize("isa", [Isa.BASE, Isa.AVX2, Isa.AVX512])
def test_floats_are_rounded_to_nearest_even(library, isa):
    every_half = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = every_half[np.isfinite(every_half)]
    between = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    with np.errstate(over="ignore"):
        for x in (finite, between.astype(np.float32), np.nextafter(finite, np.float32(np.inf))):
            values = round_row(library, isa & library.isas, F16, x)[0].view(np.float16)
            assert (values.view(np.uint16) == x.astype(np.float16).view(np.uint16)).all()


@pytest.mark.parametrize("rounding", [Q8_0, Q8_1])
def test_groups_of_32_follow_ggmls_formulas(library, rounding):
    with np.errstate(over="ignore", invalid="ignore"):
        for x in hard_rows():
            values, exact, scales = rounded_groups(x[np.newaxis])
            got = round_row(library, library.isas, rounding, x)

            assert (got[0].view(np.int8) == values.reshape(-1)).all()
            assert (got[1] == scales[0]).all()
            sums = values[0].sum(axis=1, dtype=np.int32)
            assert (got[4] == sums).all()
            if rounding == Q8_1:
                scaled = (exact[0] * sums).astype(np.float16).astype(np.float32)
                assert (got[2] == scaled).all()


def test_groups_of_256_follow_ggmls_formulas(library):
    # quantize_row_q8_K_ref of ggml-quants.c: the value of largest size, the first of equals, goes
    # to -127.
    for x in hard_rows():
        got = round_row(library, library.isas, Q8_K, x)
        for number, group in enumerate(x.reshape(-1, 256)):
            largest = group[np.argmax(np.abs(group))]
            if largest == 0:
                values, scale = np.zeros(256, np.int8), np.float32(0)
            else:
                inverse = np.float32(-127) / largest
                values = np.minimum(np.rint(inverse * group), 127).astype(np.int8)
                scale = np.float32(1) / inverse
            assert (got[0].view(np.int8)[number * 256 : (number + 1) * 256] == values).all()
            assert got[1][number] == scale
            sums = values.reshape(16, 16).sum(axis=1, dtype=np.int16)
            assert (got[3][number * 16 : (number + 1) * 16] == sums).all()


@pytest.mark.parametrize("rounding", [Q8_0, Q8_1, Q8_K])
def test_a_group_that_holds_no_number_has_such_a_scale(library, rounding):
    x = np.ones(COLUMNS, np.float32)
    x[0], x[256], x[512] = np.nan, np.inf, -np.inf
    for isa in isas(library):
        scales = round_row(library, isa, rounding, x)[1]
        step = scales.size // 4

        assert np.isnan(scales[0])
        assert not np.isfinite(scales[step])
        assert not np.isfinite(scales[2 * step])
        assert np.isfinite(scales[3 * step :]).all()


def test_impossible_roundings_are_refused(library):
    call = library.function(
        "colibri_round_row", "i32", "u32", "i32", "ptr", "i32", *["ptr"] * 5
    )  # fmt: skip

    assert call(1, 6, 0, 32, 0, 0, 0, 0, 0) < 0
    assert call(1, Q8_0, 0, 31, 0, 0, 0, 0, 0) < 0
    assert call(1, Q8_K, 0, 128, 0, 0, 0, 0, 0) < 0
