from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from colibri_format import DTYPES
from colibri_repack import Quant, RepackError, quantise_q8_0, recode
from colibri_repack._native import ElementError, Isa, NativeLibrary
from colibri_repack.quantise import fitting
from colibri_repack.recode import RECODABLE, decode, element, engine_name, recode_in_numpy
from helpers.native_library import native_library
from helpers.quantiser_rows import OVERFLOWS, TYPES, UNDEFINED, WEIGHTED, importances, rows

FIXTURE = Path(__file__).parent.parent / "fixtures" / "quantised.npz"
F32 = DTYPES["f32"]
ROWS = rows(4, 512)
WEIGHTS = importances(512)


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, NDArray[np.uint8]]]:
    with np.load(FIXTURE) as file:
        yield {key: file[key] for key in file.files}


@pytest.fixture(scope="module", params=["numpy", *Isa])
def engine(request: pytest.FixtureRequest) -> Isa | None:
    """None for NumPy, else one of the C kernels."""
    if request.param == "numpy":
        return None
    isa = Isa(request.param)
    if isa not in native_library().isas:
        pytest.skip(f"this processor has no {isa.name}")
    return isa


def quantise(
    values: NDArray[np.float32],
    name: str,
    engine: Isa | None,
    weights: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    return convert(values.view(np.uint8).reshape(-1), "f32", name, engine, weights)


def convert(
    data: NDArray[np.uint8],
    source: str,
    target: str,
    engine: Isa | None,
    weights: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    a, b = DTYPES[source], DTYPES[target]
    out = np.zeros(b.size_bytes((data.size // a.block_bytes * a.block_elements,)), np.uint8)
    if engine is None:
        recode_in_numpy(data, a, out, b, weights)
    else:
        columns = 0 if weights is None else len(weights)
        native_library().convert(data, a, out, b, columns=columns, weights=weights, isa=engine)
    return out


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_bit_for_bit_that_of_ggml(
    recorded: dict[str, NDArray[np.uint8]], engine: Isa | None, name: str
) -> None:
    for case, values in ROWS.items():
        if name in OVERFLOWS.get(case, ()) or name in UNDEFINED.get(case, ()):
            continue
        assert (quantise(values, name, engine) == recorded[f"{case}/{name}"]).all(), case


@pytest.mark.parametrize("name", [name for name in TYPES if DTYPES[name].is_quantised])
def test_importances_weigh_as_they_do_in_ggml(
    recorded: dict[str, NDArray[np.uint8]], engine: Isa | None, name: str
) -> None:
    for case in WEIGHTED:
        got = quantise(ROWS[case], name, engine, WEIGHTS)

        assert (got == recorded[f"{case}/{name}/weighted"]).all(), case


@pytest.mark.parametrize("name", sorted(RECODABLE - {"f32", "f16", "bf16"}))
def test_decoding_is_bit_for_bit_that_of_gguf(engine: Isa | None, name: str) -> None:
    dtype = DTYPES[name]
    blocks = np.random.default_rng(3).integers(0, 256, (64, dtype.block_bytes), np.uint8)
    for at in {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(name, (0, 2)):
        blocks[:, at + 1] &= 0xBB  # scales that are finite
    if name == "mxfp4":
        blocks[:, 0] = blocks[:, 0].clip(0, 250)
    kind = gguf.GGMLQuantizationType(dtype.ggml_id or 0)

    got = convert(blocks.reshape(-1), name, "f32", engine).view(np.float32)

    assert got.tobytes() == gguf.quants.dequantize(blocks, kind).tobytes()


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=15, deadline=None)
@given(hnp.arrays(np.uint32, (2, 256), elements=st.integers(0, 2**32 - 1)))
def test_numpy_and_c_agree_on_any_bits(name: str, bits: NDArray[np.uint32]) -> None:
    values = bits.view(np.float32)
    library = native_library()

    def outcome(engine: Isa | None) -> bytes | tuple[int, bool]:
        try:
            return quantise(values, name, engine).tobytes()
        except ElementError as error:
            return error.index, error.is_finite

    assert len({outcome(engine) for engine in (None, *library.isas)}) == 1


@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_half_precision_quantises_as_the_float32_it_stands_for(
    engine: Isa | None, source: str
) -> None:
    halves = convert(ROWS["normal"].view(np.uint8).reshape(-1), "f32", source, engine)
    values = decode(halves, DTYPES[source])

    for name in TYPES:
        assert (convert(halves, source, name, engine) == quantise(values, name, engine)).all()


def test_every_half_decodes_exactly(engine: Isa | None) -> None:
    bits = np.arange(2**16, dtype="<u2")
    finite = bits[(bits & 0x7C00) != 0x7C00]

    got = convert(finite.view(np.uint8), "f16", "f32", engine).view(np.float32)

    assert (got == finite.view(np.float16).astype(np.float32)).all()


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float32, 64, elements=st.floats(-65519, 65519, width=32)))
def test_float16_rounds_to_nearest_even(values: NDArray[np.float32]) -> None:
    for engine in (None, *native_library().isas):
        assert quantise(values, "f16", engine).tobytes() == values.astype("<f2").tobytes()


def test_bfloat16_rounds_to_nearest_even(engine: Isa | None) -> None:
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)

    got = quantise(values.view(np.float32), "bf16", engine).view("<u2")

    assert got.tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


def test_halves_round_away_from_zero_in_q8_0(engine: Isa | None) -> None:
    block = np.zeros(32, np.float32)
    block[:5] = [127, 0.5, -0.5, 2.5, 0.49999997]

    quants = quantise(block, "q8_0", engine)[2:].view(np.int8)

    assert quants[:5].tolist() == [127, 1, -1, 3, 0]


def test_subnormal_blocks_become_zero_in_mxfp4(engine: Isa | None) -> None:
    data = quantise(ROWS["subnormal"], "mxfp4", engine)

    assert not data[::17].any()
    assert np.abs(convert(data, "mxfp4", "f32", engine).view(np.float32)).max() < 2.0**-124


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_number_that_is_not_finite_is_found(engine: Isa | None, bad: float) -> None:
    values = np.full(2048, 0.25, np.float32)
    values[[700, 1900]] = bad

    with pytest.raises(ElementError) as caught:
        quantise(values, "q4_k", engine)

    assert (caught.value.index, caught.value.is_finite) == (700, False)


@pytest.mark.parametrize("name", sorted(set(TYPES) - {"bf16", "mxfp4"}))
@pytest.mark.parametrize("size", [1e12, -1e18, 3e38])
def test_scale_beyond_float16_is_found(engine: Isa | None, name: str, size: float) -> None:
    values = np.zeros(2048, np.float32)
    values[1030] = size

    with pytest.raises(ElementError) as caught:
        quantise(values, name, engine)

    first = 1030 // DTYPES[name].block_elements * DTYPES[name].block_elements
    assert (caught.value.index, caught.value.is_finite) == (first, True)


def test_values_beyond_bfloat16_are_found(engine: Isa | None) -> None:
    values = np.array([1, 3.38e38, 3.4028235e38], np.float32)

    with pytest.raises(ElementError) as caught:
        quantise(values, "bf16", engine)

    assert (caught.value.index, caught.value.is_finite) == (2, True)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_threads_change_nothing(weights: NDArray[np.float32] | None) -> None:
    values = np.random.default_rng(5).standard_normal((300, 512)).astype(np.float32)
    data = values.view(np.uint8).reshape(-1)

    results = {
        recode(data, F32, DTYPES["q4_0"], columns=512, weights=weights, n_threads=n).tobytes()
        for n in (1, 2, 3)
    }

    assert len(results) == 1


def test_the_first_bad_element_is_named_whatever_thread_finds_one() -> None:
    values = np.zeros(300 * 512, np.float32)
    values[[90_000, 150_000]] = np.nan

    with pytest.raises(ElementError) as caught:
        recode(values.view(np.uint8), F32, DTYPES["q6_k"], n_threads=3)

    assert caught.value.index == 90_000


@pytest.mark.parametrize("size", [4, 256 * 4 - 4, 257 * 4, 255])
def test_partial_blocks_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="no whole units"):
        recode(np.zeros(size, np.uint8), F32, DTYPES["q4_k"])


def test_partial_rows_are_refused_where_columns_matter() -> None:
    with pytest.raises(ValueError, match="no whole units"):
        recode(np.zeros(768 * 4, np.uint8), F32, DTYPES["q4_k"], columns=512, weights=WEIGHTS)


@pytest.mark.parametrize(("source", "target"), [("iq2_xs", "q4_k"), ("f32", "iq4_nl")])
def test_types_without_a_codec_are_refused(source: str, target: str) -> None:
    with pytest.raises(RepackError) as caught:
        recode(np.zeros(74 * 256, np.uint8), DTYPES[source], DTYPES[target])

    assert caught.value.code == "requantize"


@pytest.mark.parametrize("name", sorted(RECODABLE))
def test_numpy_takes_over_without_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(6).standard_normal(131_072 + 512).astype(np.float32)
    data = values.view(np.uint8)
    expected = recode(data, F32, DTYPES[name])
    from colibri_repack import _native

    monkeypatch.setenv("COLIBRI_NO_NATIVE", "1")
    _native.native.cache_clear()
    try:
        assert recode(data, F32, DTYPES[name]).tobytes() == expected.tobytes()
        assert engine_name() == "NumPy, up to 25 times slower than C (COLIBRI_NO_NATIVE=1)"
    finally:
        monkeypatch.undo()
        _native.native.cache_clear()


def test_one_element_can_be_read() -> None:
    data = quantise(ROWS["normal"], "q4_k", None)

    assert element(data, DTYPES["q4_k"], 700) == decode(data, DTYPES["q4_k"])[700]


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("q4_k", 512, "q4_k"), ("q4_k", 96, "q5_0"), ("q5_k", 96, "q5_1"), ("q6_k", 96, "q8_0"),
        ("q2_k", 96, "q4_0"), ("q3_k", 96, "q4_0"), ("q4_k", 44, "f16"), ("q8_0", 44, "f16"),
        ("mxfp4", 44, "f16"), ("bf16", 44, "bf16"), ("f32", 1, "f32"),
    ],
)  # fmt: skip
def test_rows_that_a_type_cannot_hold_get_another(name: str, columns: int, expected: str) -> None:
    assert fitting(DTYPES[name], columns).name == expected


def test_unknown_quant_is_refused() -> None:
    with pytest.raises(RepackError) as caught:
        Quant.of("q9_9")

    assert caught.value.code == "bad-quant"


def test_the_library_refuses_what_cannot_be() -> None:
    library: NativeLibrary = native_library()
    data, out = np.zeros(1024, np.uint8), np.zeros(144, np.uint8)
    q4_k = DTYPES["q4_k"]

    for source, target, dtype, columns, weights in (
        (data[:1020], out, q4_k, 0, None),
        (data, out[:143], q4_k, 0, None),
        (data[::2], out, q4_k, 0, None),
        (data, out, DTYPES["iq4_xs"], 0, None),
        (data, out, q4_k, 100, np.ones(100, np.float32)),
        (data, out, q4_k, 256, np.ones(100, np.float32)),
        (data, out, q4_k, 256, np.ones(256)),
    ):
        with pytest.raises(ValueError, match=r"bytes|arrays|weights|iq4_xs|q4_k"):
            library.convert(source, F32, target, dtype, columns=columns, weights=weights)
    with pytest.raises(ValueError, match="Invalid argument"):
        library.convert(data, F32, out, q4_k, columns=0, isa=Isa(8))


def test_q8_0_has_a_function_of_its_own() -> None:
    values = ROWS["normal"]

    assert (quantise_q8_0(values) == quantise(values, "q8_0", None)).all()
