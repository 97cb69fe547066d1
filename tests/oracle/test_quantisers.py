"""Live: this package's quantisers beside ggml's own, in the wheel xllamacpp.

Whole models with importances need `llama_model_quantize`, which llama-cpp-python exports.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import DTYPES
from colibri_repack import recode, repack
from colibri_repack._native import ElementError, Isa
from helpers.colibri_contents import contents
from helpers.ggml_library import Ggml, xllamacpp_library
from helpers.gguf_builder import STRING, GgufBuilder
from helpers.mix_models import mix_model
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


# enum llama_ftype in llama.h; of the K-quants the small mixes, which `pure` makes one type.
FTYPES = {
    "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q8_0": 7,
    "q2_k": 21, "q3_k": 11, "q4_k": 14, "q5_k": 16, "q6_k": 18, "q4_k_m": 15, "q5_k_m": 17,
}  # fmt: skip
KEPT = "ffn_gate_inp_shexp.weight"
CALLS = 5


def importances_of(source: Path) -> dict[str, NDArray[np.float32]]:
    """Sums of each matrix's columns, `(n_matrices, n_columns)`, as `CALLS` calls have them."""
    rng = np.random.default_rng(8)
    found = {}
    for tensor in gguf.GGUFReader(source).tensors:
        shape = [int(n) for n in tensor.shape]
        if len(shape) > 1 and "ffn_gate_inp" not in tensor.name:
            rows = (shape[2] if len(shape) == 3 else 1, shape[0])
            found[tensor.name] = rng.gamma(0.7, 3, rows).astype(np.float32) * np.float32(CALLS)
    return found


def write_legacy(path: Path, sums: dict[str, NDArray[np.float32]]) -> None:
    """As `save_imatrix_legacy` of llama.cpp's tools/imatrix/imatrix.cpp writes it."""
    data = struct.pack("<i", len(sums))
    for name in sorted(sums):
        raw = name.encode()
        data += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", CALLS, sums[name].size)
        data += sums[name].tobytes()
    path.write_bytes(data + struct.pack("<ii", CALLS, 8) + b"text.raw")


def write_gguf(path: Path, sums: dict[str, NDArray[np.float32]]) -> None:
    """As `save_imatrix` writes it, sums of activations and all."""
    builder = GgufBuilder().add("general.type", STRING, "imatrix")
    for name in sorted(sums):
        values, n = sums[name], len(sums[name])
        builder.tensor(f"{name}.in_sum2", values.shape if n > 1 else values.shape[1:], 0,
                       values.tobytes())  # fmt: skip
        counts = np.full(n, CALLS, np.float32)
        builder.tensor(f"{name}.counts", (n, 1) if n > 1 else (1,), 0, counts.tobytes())
        builder.tensor(f"{name}.in_sum", values.shape if n > 1 else values.shape[1:], 0,
                       bytes(values.nbytes))  # fmt: skip
    builder.write(path)


def quantised_by_llama_cpp(
    llama_cpp: Any, source: Path, output: Path, quant: str, sums: dict[str, NDArray[np.float32]]
) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor; its quantiser takes what its loader makes of a file."""
    values = {name: found / np.float32(CALLS) for name, found in sums.items()}
    entries = (llama_cpp.llama_model_imatrix_data * (len(values) + 1))()
    for entry, (name, found) in zip(entries, values.items(), strict=False):
        entry.name, entry.size = name.encode(), found.size
        entry.data = found.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FTYPES[quant], 1
    params.pure = not quant.endswith("_m")
    params.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    code = llama_cpp.llama_model_quantize(
        str(source).encode(), str(output).encode(), ctypes.byref(params)
    )
    assert code == 0
    return {
        tensor.name: (tensor.tensor_type.name.lower(), np.ascontiguousarray(tensor.data).tobytes())
        for tensor in gguf.GGUFReader(output).tensors
    }


@pytest.mark.parametrize("quant", FTYPES)
@pytest.mark.parametrize("model", ["dense", "eight experts"])
def test_models_quantised_by_an_importance_matrix_are_those_of_llama_cpp(
    tmp_path: Path, model: str, quant: str
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama_model_quantize is in its wheel")
    with mix_model(model) as builder:
        source = builder.write(tmp_path / "m.gguf")
    sums = importances_of(source)
    write_legacy(tmp_path / "i.dat", sums)
    write_gguf(tmp_path / "i.gguf", sums)
    expected = quantised_by_llama_cpp(llama_cpp, source, tmp_path / "q.gguf", quant, sums)

    for form in ("i.dat", "i.gguf"):
        output = tmp_path / f"{form}.colibri"
        repack(source, output, quant=quant, imatrix=tmp_path / form)
        got = contents(output)

        assert got.keys() == expected.keys()
        assert [
            name for name, found in expected.items() if got[name] != found and KEPT not in name
        ] == []
