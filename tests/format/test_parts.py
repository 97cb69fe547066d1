"""Units, dtypes, interleaving, canonical JSON, `model.json`, errors and doctests."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
import pkgutil
import runpy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import colibri_format as cf
from colibri_format.canonical import encode_canonical, parse_canonical
from colibri_format.model import parse_model
from helpers.forge import code_of

SPEC = Path(__file__).parents[2] / "packages/colibri-format/spec"


def test_dtypes_have_ggmls_sizes() -> None:
    for ggml_type, (elements, n_bytes) in gguf.GGML_QUANT_SIZES.items():
        dtype = cf.DTYPES_BY_GGML_ID.get(int(ggml_type))
        if ggml_type.name in ("Q8_1", "Q8_K"):  # activations only: never stored
            assert dtype is None
            continue
        assert dtype is not None
        assert dtype.name == ggml_type.name.lower()
        assert (dtype.block_elements, dtype.block_bytes) == (elements, n_bytes)


def test_units_fill_the_quant_block() -> None:
    for dtype in cf.DTYPES.values():
        assert not dtype.units or sum(dtype.units) == dtype.block_bytes


@pytest.mark.parametrize("name", [n for n, d in cf.DTYPES.items() if d.units])
def test_interleaving_is_the_permutation_of_the_specification(name: str) -> None:
    dtype = cf.DTYPES[name]
    rows, n_blocks = 32, 3
    shape = (rows, n_blocks * dtype.block_elements)
    plain = np.random.default_rng(3).integers(0, 256, dtype.size_bytes(shape), np.uint8)

    packed = cf.interleave(plain, dtype, shape)

    assert cf.deinterleave(packed, dtype, shape).tobytes() == plain.tobytes()
    source = plain.reshape(rows, n_blocks, dtype.block_bytes)
    for g, j, r in ((0, 0, 0), (1, 2, 15), (1, 1, 7)):
        start = 0
        for width in dtype.units:
            for b in range(width):
                place = (g * n_blocks + j) * 16 * dtype.block_bytes + 16 * start + r * width + b
                assert packed[place] == source[16 * g + r, j, start + b]
            start += width


def test_interleaving_what_cannot_be_is_refused() -> None:
    data = np.zeros(0, np.uint8)

    for name, shape in (("f32", (16, 4)), ("q8_0", (8, 32)), ("q8_0", (16, 31)), ("q8_0", (16,))):
        assert code_of(lambda n=name, s=shape: cf.interleave(data, cf.DTYPES[n], s)) == (
            "bad-interleave"
        )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4K", 4096),
        ("512MiB", 2**29),
        ("512mb", 2**29),
        ("1.5G", 3 * 2**29),
        (" 2 T ", 2**41),
        ("0", 0),
    ],
)
def test_sizes_are_binary(text: str, size: int) -> None:
    assert cf.parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1",
        "1e9",
        "5X",
        "1.2.3",
        "NaN",
        "\uff14K",
        "4\u212a",
        "9" * 400,
        "9" * 400 + ".5",
        "5000000T",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    assert code_of(lambda: cf.parse_size(text)) == "bad-size"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**20, "1 MiB"),
        (1_500_000, "1.43 MiB"),
        (3 * 2**40, "3 TiB"),
        (1010 * 2**20, "0.986 GiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert cf.format_size(size) == text


def test_canonical_json_depends_on_the_value_alone() -> None:
    assert encode_canonical({"b": 1, "a": [True, None, "é\n"]}) == (
        '{"a":[true,null,"é\\n"],"b":1}'.encode()
    )


def test_metadata_may_nest_exactly_32_deep() -> None:
    def nested(depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(depth - 1):
            value = {"a": value}
        return value

    assert parse_canonical(encode_canonical(nested(32)), "x") == nested(32)
    assert code_of(lambda: encode_canonical(nested(33))) == "bad-metadata"
    text = json.dumps(nested(33), separators=(",", ":")).encode()
    assert code_of(lambda: parse_canonical(text, "x")) == "metadata-invalid"


@pytest.mark.parametrize(
    "text", [b'{"' + b'\\"' * 200_000, b'{"' + b'\\"' * 200_000 + b"\\", b'"' * 400_001]
)
def test_strings_without_an_end_take_no_time(text: bytes) -> None:
    assert code_of(lambda: parse_canonical(text, "x")) == "metadata-invalid"


@given(st.binary(max_size=60))
def test_any_bytes_are_canonical_metadata_or_refused(data: bytes) -> None:
    try:
        value = parse_canonical(data, "x")
    except cf.FormatError as error:
        assert error.code in ("metadata-invalid", "metadata-not-canonical")
    else:
        assert encode_canonical(value) == data


MODEL = cf.ModelSpec(
    family="qwen3moe",
    n_layers=2,
    hidden_size=96,
    vocab_size=100,
    context_length=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope=cf.RopeSpec(theta=1e4, n_dims=32),
    moe=cf.MoeSpec(n_experts=5, top_k=2, expert_size=48, norm_top_k=True),
    eos_tokens=(1, 2),
)


def test_model_comes_back_from_its_bytes() -> None:
    dense = dataclasses.replace(MODEL, moe=None, clip_qkv=8.0, bos_token=0)

    assert parse_model(MODEL.to_bytes()) == MODEL
    assert parse_model(dense.to_bytes()) == dense
    assert MODEL.to_bytes() == parse_model(MODEL.to_bytes()).to_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"n_layers": 0},
        {"n_layers": 2.0},
        {"n_layers": True},
        {"n_layers": 2**31},
        {"hidden_size": "96"},
        {"surprise": 1},
        {"rope": None},
        {"rope": {"theta": 1e4}},
        {"rope": {"theta": 1e4, "n_dims": 33}},
        {"rope": {"theta": 0, "n_dims": 32}},
        {"rope": {"theta": 1e4, "n_dims": 64}},
        {"rope": {"theta": 1e4, "n_dims": 32, "style": "neox"}},
        {"n_kv_heads": 3},
        {"rope": {"theta": 1e4, "n_dims": 32, "scaling": "yarn"}},
        {"qk_norm": "some"},
        {"attention_bias": 1},
        {"tie_embeddings": None},
        {"family": ""},
        {"family": 3},
        {"rms_norm_eps": -1e-6},
        {"rms_norm_eps": "1e-6"},
        {"clip_qkv": 0},
        {"sliding_window": 0},
        {"bos_token": -1},
        {"eos_tokens": [-1]},
        {"eos_tokens": 1},
        {"rms_norm_eps": 10**400},
        {"clip_qkv": 1e308},
        {"family": "\x1b[31m"},
        {"version": True},
        {"rope": {"theta": 1e4, "n_dims": 32, "scaling": {"type": "yarn", "factor": 10**400}}},
        {"moe": {"n_experts": 5}},
        {"moe": {"n_experts": 5, "top_k": 6, "expert_size": 48, "norm_top_k": True}},
        {"moe": {"n_experts": 5, "top_k": 2, "expert_size": 48, "norm_top_k": 1}},
    ],
)
def test_model_with_a_bad_member_is_refused(change: dict[str, Any]) -> None:
    record = json.loads(MODEL.to_bytes()) | change

    assert code_of(lambda: parse_model(json.dumps(record).encode())) == "bad-model"


def test_model_without_a_member_is_refused() -> None:
    record = json.loads(MODEL.to_bytes())
    del record["n_heads"]

    for text in (json.dumps(record).encode(), b"[]", b"{", b"\xff", b"[" * 10**5):
        assert code_of(lambda text=text: parse_model(text)) == "bad-model"


def test_error_reads_where_found_required_remedy() -> None:
    error = cf.FormatError(cf.FormatCode.TRUNCATED, "a.colibri", "has 3", "5 due", "copy it")

    assert str(error) == "a.colibri: has 3; 5 due; copy it"
    assert isinstance(error, ValueError)
    assert isinstance(error, cf.ColibriError)
    assert error.code == "truncated"


def test_specification_shows_the_tables_of_the_code() -> None:
    script = runpy.run_path(str(SPEC / "render.py"))
    text = (SPEC / "colibri-1.md").read_text(encoding="utf-8")

    assert script["render"](text) == text


def test_specification_names_every_code() -> None:
    text = (SPEC / "colibri-1.md").read_text(encoding="utf-8")
    prose = text.partition("<!-- begin codes -->")[0] + text.partition("<!-- end codes -->")[2]

    for code in cf.FormatCode:
        assert f"`{code.name}`" in prose


def test_examples_in_docstrings_hold() -> None:
    for info in pkgutil.iter_modules(cf.__path__):
        module = importlib.import_module(f"colibri_format.{info.name}")
        assert doctest.testmod(module).failed == 0
