"""Whole models quantised beside what llama.cpp's own quantiser made of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format
from colibri_format import ColibriError
from colibri_repack import Quant, RepackOptions, RepackPlan, plan, repack
from colibri_repack.quantise import MixFacts, mixed
from helpers.colibri_contents import contents
from helpers.gguf_builder import GgufBuilder
from helpers.gguf_models import gguf_model, stacked_state
from helpers.mix_models import MIX_MODELS, mix_model

RECORD = json.loads((Path(__file__).parent.parent / "fixtures/quantised_models.json").read_text())
# llama.cpp quantises this matrix of one row; a runtime wants it exact, as it wants the router.
KEPT = "ffn_gate_inp_shexp.weight"


@pytest.mark.parametrize("mix", ["q4_k_m", "q5_k_m"])
@pytest.mark.parametrize("name", MIX_MODELS)
def test_every_tensor_is_the_one_that_llama_cpp_makes(tmp_path: Path, name: str, mix: str) -> None:
    with mix_model(name) as builder:
        source = builder.write(tmp_path / "m.gguf")
        repack(source, tmp_path / "m.colibri", quant=mix)
    expected = RECORD["models"][name][mix]

    got = {
        key: [dtype, hashlib.sha256(data).hexdigest()[:16]]
        for key, (dtype, data) in contents(tmp_path / "m.colibri").items()
    }

    assert got.keys() == expected.keys()
    assert {key: (got[key], expected[key]) for key in got if got[key] != expected[key]
            and not key.endswith(KEPT)} == {}  # fmt: skip


def types(planned: RepackPlan) -> dict[str, str]:
    found = {tensor.name: tensor.dtype.name for tensor in planned.file.tensors}
    for layer, number in enumerate(planned.file.layer_layouts):
        if number is not None:
            for segment in planned.file.layouts[number].segments:
                found[f"{layer}/{segment.role.name.lower()}"] = segment.dtype.name
    return found


def planned(tmp_path: Path, name: str, **options: Any) -> RepackPlan:
    with mix_model(name) as builder:
        return plan(builder.write(tmp_path / "m.gguf"), RepackOptions(**options))


def test_one_type_is_that_type_for_every_matrix(tmp_path: Path) -> None:
    found = types(planned(tmp_path, "eight experts", quant=Quant.Q6_K))

    plain = {name for name, dtype in found.items() if dtype == "f32"}
    assert {dtype for name, dtype in found.items() if name not in plain} == {"q6_k"}
    assert all("norm" in name or "ffn_gate_inp" in name for name in plain)


def test_dense_tensors_can_be_set_apart(tmp_path: Path) -> None:
    found = types(planned(tmp_path, "eight experts", quant=Quant.MXFP4, dense_quant=Quant.Q8_0))

    assert found["0/down"] == "mxfp4"
    assert found["blk.0.attn_q.weight"] == found["token_embd.weight"] == "q8_0"
    assert found["blk.0.ffn_gate_inp.weight"] == "f32"


def test_experts_can_be_set_apart(tmp_path: Path) -> None:
    found = types(planned(tmp_path, "eight experts", quant=Quant.KEEP, dense_quant=Quant.BF16))

    assert found["0/down"] == "f32"
    assert found["blk.0.attn_q.weight"] == "bf16"


def test_fallbacks_are_reported_once_a_change(tmp_path: Path) -> None:
    notes = planned(tmp_path, "narrow", quant=Quant.Q4_K).notes

    assert [note.partition(":")[0] for note in notes] == [
        "q4_k became q5_0 where rows are no whole quant blocks",
        "q4_k became f16 where rows are no whole quant blocks",
    ]
    assert "more" in notes[0]


def test_types_are_totalled_and_the_choice_recorded(tmp_path: Path) -> None:
    with mix_model("dense") as builder:
        source = builder.write(tmp_path / "m.gguf")
    report = repack(source, tmp_path / "m.colibri", quant="q4_k_m", dense_quant="q8_0")

    with colibri_format.open(tmp_path / "m.colibri") as file:
        assert file.metadata["quantisation"] == "q4_k_m"
        assert file.metadata["dense_quantisation"] == "q8_0"
        assert set(file.metadata["types"]) == {"f32", "q4_k", "q6_k", "q8_0"}
    assert report.to_record()["quantisation"] == "q4_k_m"


def test_large_models_with_grouped_keys_get_better_values() -> None:
    facts = MixFacts(n_layers=80, n_experts=1, n_values=80, is_tied=False, is_70b=True)

    got = [
        mixed(Quant.Q4_K_M, f"blk.{n}.attn_v.weight", 8192, n, n, facts).name for n in (9, 10, 12)
    ]

    assert got == ["q6_k", "q5_k", "q6_k"]


def quantised_gguf(tmp_path: Path, kind: str) -> Path:
    """The wide dense model with one matrix of every block as `kind`."""
    from colibri_format import DTYPES
    from colibri_repack import recode

    with mix_model("dense") as _:
        builder: GgufBuilder = gguf_model("dense", {})
        for name, values in stacked_state("dense").items():
            if "ffn_up" in name:
                data = recode(values.view(np.uint8).reshape(-1), DTYPES["f32"], DTYPES[kind])
                builder.tensor(name, values.shape, DTYPES[kind].ggml_id or 0, data.tobytes())
            else:
                builder.tensor(name, values.shape, 0, values.tobytes())
        return builder.write(tmp_path / "q.gguf")


def test_what_is_quantised_already_is_refused_unless_asked(tmp_path: Path) -> None:
    source = quantised_gguf(tmp_path, "q5_k")

    with pytest.raises(ColibriError, match="--allow-requantize") as caught:
        plan(source, RepackOptions(quant=Quant.Q4_K))

    assert caught.value.code == "requantize"


def test_requantising_goes_through_float32_and_is_told(tmp_path: Path) -> None:
    from colibri_format import DTYPES
    from colibri_repack import recode

    source = quantised_gguf(tmp_path, "q5_k")

    report = repack(source, tmp_path / "m.colibri", quant="q4_k", may_requantise=True)

    up = contents(tmp_path / "m.colibri")["blk.0.ffn_up.weight"]
    with mix_model("dense"):
        values = stacked_state("dense")["blk.0.ffn_up.weight"]
    once = recode(values.view(np.uint8).reshape(-1), DTYPES["f32"], DTYPES["q5_k"])
    again = recode(once, DTYPES["q5_k"], DTYPES["q4_k"])
    assert up == ("q4_k", again.tobytes())
    assert any("11 slices were q5_k already" in note for note in report.notes)


def test_what_has_the_type_asked_for_stays_as_it_is(tmp_path: Path) -> None:
    source = quantised_gguf(tmp_path, "q4_k")

    repack(source, tmp_path / "m.colibri", quant="q4_k")

    with colibri_format.open(tmp_path / "m.colibri") as file:
        assert set(file.metadata["types"]) == {"f32", "q4_k"}


def test_a_type_that_nothing_decodes_is_refused_even_then(tmp_path: Path) -> None:
    with mix_model("dense"):
        builder = gguf_model("dense", {})
        for name, values in stacked_state("dense").items():
            if "ffn_up" in name:  # IQ4_XS
                builder.tensor(name, values.shape, 23, bytes(values.size // 256 * 136))
            else:
                builder.tensor(name, values.shape, 0, values.tobytes())
        source = builder.write(tmp_path / "q.gguf")

    with pytest.raises(ColibriError, match="nothing here decodes") as caught:
        plan(source, RepackOptions(quant=Quant.Q4_K, may_requantise=True))

    assert caught.value.code == "requantize"


@pytest.mark.parametrize(("quant", "code"), [("q4_k", "scale-overflow"), ("f16", "value-overflow")])
def test_values_that_a_type_cannot_hold_are_refused_with_their_place(
    tmp_path: Path, quant: str, code: str
) -> None:
    with mix_model("dense"):
        state = stacked_state("dense")
        state["blk.3.ffn_up.weight"][5, 200] = 3e9
        source = gguf_model("dense", state).write(tmp_path / "m.gguf")

    with pytest.raises(ColibriError, match=r"blk.3.ffn_up.weight'.*\[5, (0|200)\]") as caught:
        repack(source, tmp_path / "m.colibri", quant=quant)

    assert caught.value.code == code
    assert not list(tmp_path.glob("m.colibri*"))


def test_numpy_makes_the_same_file_and_says_that_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colibri_repack import _native

    with mix_model("narrow") as builder:
        source = builder.write(tmp_path / "m.gguf")
    repack(source, tmp_path / "a.colibri", quant="q4_k_m")
    monkeypatch.setenv("COLIBRI_NO_NATIVE", "1")
    _native.native.cache_clear()
    try:
        report = repack(source, tmp_path / "b.colibri", quant="q4_k_m")
        kept = repack(source, tmp_path / "c.colibri")
    finally:
        monkeypatch.undo()
        _native.native.cache_clear()

    assert (tmp_path / "a.colibri").read_bytes() == (tmp_path / "b.colibri").read_bytes()
    assert any("NumPy" in warning for warning in report.warnings)
    assert not any("NumPy" in warning for warning in kept.warnings)
