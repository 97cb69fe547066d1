"""The C library on aarch64, under qemu-user: what is chosen there, and what else it computes.

Products and rounding are tested there by the tests of this machine's, test_kernels.py,
test_kernels_blocks256.py and test_kernels_rounding.py, with the same bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import DTYPES
from colibri_runtime._native import Isa
from helpers.arm_emulator import ArmLibrary
from helpers.arm_kernels import ArmKernels
from helpers.kernel_calls import matmul, stored
from helpers.ops_calls import ATTENTION, HEADS, ArmOps, Avx2Ops, Ops, Struct
from helpers.quant_bytes import random_rows

pytestmark = pytest.mark.arm

VECTOR_ISAS = (Isa.NEON, Isa.DOTPROD)
QUANTISED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4",
             "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")  # fmt: skip
# exp to 2 units in the last place, and sums of some dozens of terms.
PRECISION = 4e-6

Arrays = dict[str, NDArray[Any]]


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("cortex-a53", Isa.BASE | Isa.NEON),
        ("cortex-a76", Isa.BASE | Isa.NEON | Isa.DOTPROD),
        ("max", Isa.BASE | Isa.NEON | Isa.DOTPROD),
    ],
)
def test_sdot_is_used_where_the_processor_has_it(
    arm_server: Path, processor: str, expected: Isa
) -> None:
    with ArmLibrary(arm_server, processor) as library:
        assert library.isas == expected


@pytest.mark.parametrize("name", QUANTISED)
def test_layouts_and_ways_to_multiply_give_the_same_bits(
    arm_library: ArmLibrary, name: str
) -> None:
    dtype = DTYPES[name]
    rows = random_rows(dtype, 32, 1024, seed=3)
    x = np.random.default_rng(4).standard_normal((5, 1024)).astype(np.float32)
    found = []
    for isa in VECTOR_ISAS:
        for form in (0, 16):
            kernels = ArmKernels(arm_library, isas=isa)
            found.append(matmul(kernels, x, stored(rows, dtype, 1024, form), dtype, 32, form))

    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("name", QUANTISED)
def test_every_type_has_a_kernel_in_both_layouts(arm_library: ArmLibrary, name: str) -> None:
    for isa in VECTOR_ISAS:
        assert ArmKernels(arm_library, isas=isa).has_kernel(DTYPES[name], 0)
        assert ArmKernels(arm_library, isas=isa).has_kernel(DTYPES[name], 16)


def test_a_team_of_threads_gives_the_bits_of_one(arm_library: ArmLibrary) -> None:
    dtype = DTYPES["q8_0"]
    rows = random_rows(dtype, 2048, 256, seed=1)
    data = stored(rows, dtype, 256, 16)
    x = np.random.default_rng(4).standard_normal((3, 256)).astype(np.float32)
    one = matmul(ArmKernels(arm_library, isas=Isa.NEON), x, data, dtype, 2048, 16)

    with ArmKernels(arm_library, isas=Isa.NEON, n_threads=3) as team:
        for _ in range(3):
            assert (matmul(team, x, data, dtype, 2048, 16) == one).all()


def test_the_activation_is_that_of_float64_and_the_same_bits_in_every_set(
    arm_library: ArmLibrary,
) -> None:
    gate, up = 20 * floats(1, 100), floats(2, 100)
    found = []
    for isa in (Isa.BASE, *VECTOR_ISAS):
        table = int(arm_library.call("colibri_vector_code", isa, returns="<i8"))
        swiglu = int(arm_library.read(table, np.zeros(2, "<u8"))[1])
        out = np.zeros_like(gate)
        there = [arm_library.place(array) for array in (gate, up, out)]
        arm_library.call(swiglu, *there, gate.size)
        found.append(arm_library.read(there[2], out))
        arm_library.clear()

    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    assert (np.abs(found[0] - expected) <= PRECISION * np.abs(expected) + 1e-30).all()
    assert all((one == found[0]).all() for one in found)


# ---- operations: what each writes, by name, and float64 that it must be near ----


def floats(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run_sums(ops: Ops) -> tuple[Arrays, Arrays]:
    got, expected = {}, {}
    for n in (1, 15, 16, 33, 100):
        x, y = floats(n, n), floats(n + 1, n)
        sizes = np.abs(x) + 1
        got[f"dot {n}"] = np.float32([ops("dot", sizes, sizes, n, returns="<f4")])
        expected[f"dot {n}"] = np.array([sizes.astype(np.float64) @ sizes])
        out = np.zeros_like(x)
        ops("rms_norm", x, y, n, 1e-5, out)
        got[f"norm {n}"] = out
        expected[f"norm {n}"] = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5) * y
        added = x.copy()
        ops("add", added, y, n)
        got[f"add {n}"], expected[f"add {n}"] = added, x.astype(np.float64) + y
    return got, expected


def run_softmax(ops: Ops) -> tuple[Arrays, Arrays]:
    got, expected = {}, {}
    for n in (1, 16, 17, 130):
        x = 5 * floats(n, n)
        powers = np.exp(x.astype(np.float64) - x.max())
        ops("softmax", x, n)
        got[f"{n}"], expected[f"{n}"] = x, powers / powers.sum()
    return got, expected


def run_to_half(ops: Ops) -> tuple[Arrays, Arrays]:
    x, out = 1000 * floats(1, 50), np.zeros(50, np.uint16)
    ops("to_half", x, out, 50)
    return {"half": out.view(np.float16)}, {"half": x.astype(np.float16)}


def run_combine(ops: Ops) -> tuple[Arrays, Arrays]:
    got, expected = {}, {}
    outputs, shared, weights = floats(1, 3, 50), floats(2, 50), floats(3, 3)
    for name, of, beside in (("all", weights, shared), ("none", None, None)):
        x = floats(4, 50)
        mixed = x + (weights if of is not None else np.ones(3)).astype(np.float64) @ outputs
        if beside is not None:
            mixed = mixed + 0.3 * shared.astype(np.float64)
        ops("combine", x, outputs, of, 3, beside, 0.3, 50)
        got[name], expected[name] = x, mixed
    return got, expected


def run_prepare(ops: Ops) -> tuple[Arrays, Arrays]:
    got, expected = {}, {}
    weight, angles = floats(2, 20), floats(3, 6)
    cosines, sines = np.cos(angles), np.sin(angles)
    for is_interleaved in (0, 1):
        heads = floats(1, 3, 20)
        wide = heads.astype(np.float64)
        wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight
        wide = wide.clip(-1.5, 1.5)
        pairs = [(2 * i, 2 * i + 1) if is_interleaved else (i, i + 6) for i in range(6)]
        for i, (a, b) in enumerate(pairs):
            first, second = wide[:, a].copy(), wide[:, b].copy()
            wide[:, a] = first * cosines[i] - second * sines[i]
            wide[:, b] = second * cosines[i] + first * sines[i]
        how = {"head_dim": 20, "n_dims": 12, "is_interleaved": is_interleaved, "norm_size": 20,
               "eps": 1e-6, "clip": 1.5}  # fmt: skip
        ops("prepare", Struct(HEADS, how), heads, 3, weight, cosines, sines)
        got[f"{is_interleaved}"], expected[f"{is_interleaved}"] = heads, wide
    return got, expected


def run_attend(ops: Ops) -> tuple[Arrays, Arrays]:
    got, expected = {}, {}
    n_tokens, n_heads, n_kv_heads, capacity, first = 5, 6, 2, 160, 140
    for head_dim, is_f16, window in ((40, 0, 0), (64, 1, 0), (128, 1, 70), (20, 1, 3)):
        kind = np.float16 if is_f16 else np.float32
        keys = floats(1, n_kv_heads, capacity, head_dim).astype(kind)
        values = floats(2, n_kv_heads, capacity, head_dim).astype(kind)
        queries = 3 * floats(3, n_tokens, n_heads, head_dim)
        out = np.zeros_like(queries)
        what = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim,
                "is_f16": is_f16, "capacity": capacity, "window": window, "first": first,
                "keys": keys, "values": values, "queries": queries, "out": out}  # fmt: skip
        for kv_head in range(n_kv_heads):
            ops("attend", Struct(ATTENTION, what), kv_head, 0, n_tokens * n_heads // n_kv_heads)
        mixed = np.zeros(out.shape)
        for token in range(n_tokens):
            end = first + token + 1
            seen = slice(max(0, end - window) if window else 0, end)
            for head in range(n_heads):
                of = head // (n_heads // n_kv_heads)
                scores = keys[of, seen].astype(np.float64) @ queries[token, head]
                powers = np.exp((scores - scores.max()) / np.sqrt(head_dim))
                mixed[token, head] = powers / powers.sum() @ values[of, seen].astype(np.float64)
        name = f"{head_dim} {kind.__name__} {window}"
        got[name], expected[name] = out, mixed
    return got, expected


OPERATIONS = [run_sums, run_softmax, run_to_half, run_combine, run_prepare, run_attend]


@pytest.mark.parametrize("run", OPERATIONS)
@pytest.mark.parametrize("isa", [Isa.BASE, *VECTOR_ISAS])
def test_operations_are_those_of_float64(
    arm_library: ArmLibrary, isa: Isa, run: Callable[[Ops], tuple[Arrays, Arrays]]
) -> None:
    got, expected = run(ArmOps(arm_library, isa))

    for name, values in expected.items():
        assert np.abs(got[name] - values).max() <= PRECISION * np.abs(values).max(), name


@pytest.fixture(scope="module")
def avx2_ops(tmp_path_factory: pytest.TempPathFactory) -> Avx2Ops:
    return Avx2Ops(tmp_path_factory.mktemp("avx2"))


@pytest.mark.parametrize("run", OPERATIONS)
def test_operations_give_the_bits_of_avx2(
    arm_library: ArmLibrary, avx2_ops: Avx2Ops, run: Callable[[Ops], tuple[Arrays, Arrays]]
) -> None:
    theirs, _ = run(avx2_ops)
    for isa in VECTOR_ISAS:
        ours, _ = run(ArmOps(arm_library, isa))

        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values, name)
