"""FP8 with block scales: against a decoder written from the formats' tables, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format
from colibri_format import DTYPES, Role
from colibri_repack import (
    Fp8Form,
    RepackError,
    SourceError,
    open_source,
    plan,
    quantise_q8_0,
    repack,
)
from colibri_repack.decoding import Fp8Decoder, Slice
from helpers import family_states as f
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import Entry, bf16, entry, write_folder

Array = np.ndarray[Any, np.dtype[Any]]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}


def number(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of one FP8 code (OFP8 1.0, tables 1 to 3)."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & (2**mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent_bits == 4 and code & 0x7F == 0x7F:
        return float("nan")
    if exponent_bits == 5 and exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


E4M3 = np.array([number(code, 4, 3) for code in range(256)], np.float32)
E5M2 = np.array([number(code, 5, 2) for code in range(256)], np.float32)


def decoded(codes: Array, scales: Array, table: Array = E4M3, block: int = 128) -> Array:
    """Element by element: code's value times its block's scale, in float32."""
    rows, columns = codes.shape
    spread = scales[np.arange(rows)[:, None] // block, np.arange(columns) // block]
    return (table[codes] * spread).astype(np.float32)


def to_bf16(values: Array) -> bytes:
    """Nearest bfloat16, halves to even, by comparing both neighbours."""
    exact = values.astype(np.float64).reshape(-1)
    low = (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint32)
    below = (low << 16).view(np.float32).astype(np.float64)
    above = ((low + 1) << 16).view(np.float32).astype(np.float64)
    nearer = np.abs(above - exact) < np.abs(exact - below)
    is_half = np.abs(above - exact) == np.abs(exact - below)
    up = nearer | (is_half & (low & 1 == 1))
    return (low + up).astype("<u2").tobytes()


def fp8(rng: np.random.Generator, *shape: int) -> tuple[tuple[str, tuple[int, ...], bytes], Array]:
    """Random finite E4M3 codes as an entry, and as an array."""
    codes = rng.integers(0, 255, shape, np.uint8)
    codes[codes == 0x7F] = 1
    return ("F8_E4M3", shape, codes.tobytes()), codes


def quantised(state: dict[str, Entry], names: list[str], scale: str = "F32") -> dict[str, Array]:
    """Replace those tensors by FP8 with scales; what they decode to."""
    rng = np.random.default_rng(8)
    expected = {}
    for name in names:
        _, shape, _ = entry(state[name])
        state[name], codes = fp8(rng, *shape)
        grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        scales = rng.uniform(1e-3, 2e-2, grid).astype(np.float32)
        if scale == "BF16":
            state[name + "_scale_inv"] = bf16(scales)
            scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
        elif scale == "F8_E8M0":
            exponents = rng.integers(117, 125, grid, np.uint8)
            state[name + "_scale_inv"] = ("F8_E8M0", grid, exponents.tobytes())
            scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
        else:
            state[name + "_scale_inv"] = scales
        stacked = codes.reshape(-1, *shape[-2:]), scales.reshape(-1, *grid[-2:])
        parts = [decoded(c, s) for c, s in zip(*stacked, strict=True)]
        expected[name] = np.stack(parts).reshape(shape)
    return expected


def deepseek(tmp_path: Path, scale: str = "F32") -> tuple[Path, dict[str, Array]]:
    """DeepSeek-V3 in FP8: every projection and every expert; router, norms and head are not."""
    state: dict[str, Entry] = dict(f.hf_state("deepseek_v3"))
    names = [n for n in state if n.endswith("_proj.weight") or "kv_a_proj" in n]
    expected = quantised(state, names, scale)
    folder = write_folder(
        tmp_path / "in", state, f.config("deepseek_v3") | {"quantization_config": FP8}
    )
    return folder, expected


def segment(file: colibri_format.Reader, layer: int, expert: int, role: Role) -> tuple[str, bytes]:
    block = file.expert(layer, expert)
    found = next(s for s in block.segments if s.role is role)
    data = block.read()
    return found.dtype.name, data[found.offset : found.offset + found.size].tobytes()


@pytest.mark.parametrize("scale", ["F32", "BF16", "F8_E8M0"])
@pytest.mark.parametrize("form", ["bf16", "f32"])
def test_deepseek_in_fp8_is_decoded(tmp_path: Path, form: str, scale: str) -> None:
    folder, expected = deepseek(tmp_path, scale)

    report = repack(folder, tmp_path / "out.colibri", fp8=form)

    def encoded(values: Array) -> bytes:
        return to_bf16(values) if form == "bf16" else values.tobytes()

    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert not [name for name in file.tensors if "scale" in name]
        q_b = file.tensor("blk.2.attn_q_b.weight")
        assert q_b.dtype.name == form
        assert q_b.read().tobytes() == encoded(expected["model.layers.2.self_attn.q_b_proj.weight"])
        for expert in range(f.N_EXPERTS):
            for role, matrix in ((Role.GATE, "gate"), (Role.UP, "up"), (Role.DOWN, "down")):
                values = expected[f"model.layers.1.mlp.experts.{expert}.{matrix}_proj.weight"]
                assert segment(file, 1, expert, role) == (form, encoded(values))
        assert file.tensors["blk.1.ffn_gate_inp.weight"].dtype.name == "f32"
    assert any("decoded to " + form in note for note in report.notes)


def test_fp8_is_quantised_without_a_rounding_to_bfloat16_on_the_way(tmp_path: Path) -> None:
    folder, expected = deepseek(tmp_path)

    repack(folder, tmp_path / "out.colibri", quant="q8_0", layout="plain")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        values = expected["model.layers.1.mlp.experts.3.down_proj.weight"]
        packed = quantise_q8_0(values.reshape(-1)).tobytes()
        assert segment(file, 1, 3, Role.DOWN) == ("q8_0", packed)


def test_fp8_can_be_kept_with_its_scales_beside_it(tmp_path: Path) -> None:
    folder, _ = deepseek(tmp_path)
    source = open_source(folder)

    def raw(name: str) -> bytes:
        buffer = bytearray(source.tensors[name].size)
        source.read_into(name, 0, memoryview(buffer))
        return bytes(buffer)

    repack(folder, tmp_path / "out.colibri", fp8="keep")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        stem = "model.layers.1.mlp.experts.4.down_proj.weight"
        assert segment(file, 1, 4, Role.DOWN) == ("f8_e4m3", raw(stem))
        assert segment(file, 1, 4, Role.DOWN_SCALE) == ("f32", raw(stem + "_scale_inv"))
        name = "model.layers.0.self_attn.kv_b_proj.weight"
        assert file.tensor("blk.0.attn_kv_b.weight").read().tobytes() == raw(name)
        scale = file.tensor("blk.0.attn_kv_b.weight_scale_inv")
        assert scale.shape == (2, 1)
        assert scale.read().tobytes() == raw(name + "_scale_inv")


def qwen(tmp_path: Path, form: str = "single") -> tuple[Path, dict[str, Array], dict[str, Any]]:
    """Qwen3-MoE, which engines run, in FP8; experts one by one or fused in stacks."""
    config = CONFIGS["qwen3moe"]
    state: dict[str, Entry] = dict(random_state("qwen3moe"))
    if form == "fused":
        for layer in range(3):
            stem = f"model.layers.{layer}.mlp.experts"
            arrays = [
                [state.pop(f"{stem}.{e}.{m}_proj.weight") for m in ("gate", "up", "down")]
                for e in range(11)
            ]
            state[f"{stem}.gate_up_proj"] = np.stack([np.concatenate(a[:2]) for a in arrays])
            state[f"{stem}.down_proj"] = np.stack([a[2] for a in arrays])
    names = [n for n in state if n.endswith(("_proj.weight", "_proj"))]
    expected = quantised(state, names)
    folder = write_folder(tmp_path / "in", state, config | {"quantization_config": FP8})
    return folder, expected, config


@pytest.mark.parametrize("form", ["single", "fused"])
def test_families_that_engines_run_may_be_fp8(tmp_path: Path, form: str) -> None:
    folder, expected, config = qwen(tmp_path, form)
    width = config["moe_intermediate_size"]

    repack(folder, tmp_path / "out.colibri")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert "model.json" in file.files
        stem = "model.layers.2.mlp.experts"
        up = expected[f"{stem}.gate_up_proj"][7, width:] if form == "fused" else (
            expected[f"{stem}.7.up_proj.weight"])  # fmt: skip
        # In the fused stack row `width` starts inside a block of scales.
        assert segment(file, 2, 7, Role.UP) == ("bf16", to_bf16(np.ascontiguousarray(up)))


def test_kept_fp8_describes_no_model(tmp_path: Path) -> None:
    repack(qwen(tmp_path)[0], tmp_path / "out.colibri", fp8="keep")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert "model.json" not in file.files


def test_halves_that_share_a_scale_cannot_keep_it(tmp_path: Path) -> None:
    folder, _, _ = qwen(tmp_path, "fused")

    with pytest.raises(SourceError) as caught:
        repack(folder, tmp_path / "out.colibri", fp8="keep")

    assert caught.value.code == "unsupported-model"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": None}, "missing-tensor"),
        ({"model.layers.1.self_attn.q_b_proj.weight_scale_inv": None}, "missing-tensor"),
        (
            {"model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": np.zeros((2, 1), "f4")},
            "tensor-shape",
        ),
        (
            {"model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": np.zeros((1, 1), "<i4")},
            "unsupported-dtype",
        ),
        ({"lm_head.weight_scale_inv": np.zeros((1, 1), np.float32)}, "unknown-tensors"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Entry | None], code: str
) -> None:
    state: dict[str, Entry] = dict(f.hf_state("deepseek_v3"))
    quantised(state, [n for n in state if n.endswith("_proj.weight")])
    for name, item in change.items():
        if item is None:
            del state[name]
        else:
            state[name] = item
    folder = write_folder(
        tmp_path / "in", state, f.config("deepseek_v3") | {"quantization_config": FP8}
    )

    with pytest.raises(SourceError) as caught:
        repack(folder, tmp_path / "out.colibri")

    assert caught.value.code == code


@pytest.mark.parametrize(
    "settings",
    [{"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": None},
     {"quant_method": "gptq"}, {"quant_method": "mxfp4"}, "fp8"],
)  # fmt: skip
def test_other_quantised_checkpoints_are_refused(tmp_path: Path, settings: Any) -> None:
    config = f.config("phimoe") | {"quantization_config": settings}
    folder = write_folder(tmp_path / "in", dict(f.hf_state("phimoe")), config)

    with pytest.raises(SourceError) as caught:
        plan(folder)

    assert caught.value.code == "quantised-checkpoint"


def test_fp8_kept_and_quantised_at_once_is_refused(tmp_path: Path) -> None:
    folder, _ = deepseek(tmp_path)

    with pytest.raises(RepackError) as caught:
        repack(folder, tmp_path / "out.colibri", fp8="keep", quant="q8_0")

    assert caught.value.code == "bad-quant"


def test_unknown_fp8_form_is_refused() -> None:
    with pytest.raises(RepackError) as caught:
        Fp8Form.of("int8")

    assert caught.value.code == "bad-fp8"


def test_nan_in_fp8_is_found_and_its_place_told_when_quantising(tmp_path: Path) -> None:
    state: dict[str, Entry] = dict(f.hf_state("deepseek_v3"))
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    quantised(state, [name])
    dtype, shape, data = entry(state[name])
    codes = bytearray(data)
    codes[5 * shape[1] + 7] = 0xFF
    state[name] = (dtype, shape, bytes(codes))
    folder = write_folder(
        tmp_path / "in", state, f.config("deepseek_v3") | {"quantization_config": FP8}
    )

    with pytest.raises(SourceError, match=r"\[5, 7\]") as caught:
        repack(folder, tmp_path / "out.colibri", quant="q8_0")

    assert caught.value.code == "not-finite"


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_every_code_has_its_value(tmp_path: Path, kind: str) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    state: dict[str, Entry] = {
        "w": (kind, (2, 128), codes.tobytes()),
        "w_scale_inv": np.ones((1, 1), np.float32),
    }
    source = open_source(write_folder(tmp_path, state, {}))
    scales = {"w": source.tensors["w_scale_inv"]}
    part = Slice(source.tensors["w"], 0, (2, 128), Fp8Decoder(scales, (128, 128), DTYPES["f32"]))
    buffer = bytearray(part.size)

    part.read_into(source, 0, memoryview(buffer))

    values = np.frombuffer(buffer, np.float32)
    np.testing.assert_array_equal(values, E4M3 if kind == "F8_E4M3" else E5M2)
    is_zero = values == 0
    assert np.signbit(values)[is_zero].tolist() == [False, True]


@pytest.mark.parametrize("form", ["bf16", "f32"])
def test_any_range_of_bytes_can_be_read(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(3)
    shape = (300, 700)
    weight, codes = fp8(rng, *shape)
    scales = rng.uniform(0.1, 2, (3, 6)).astype(np.float32)
    state: dict[str, Entry] = {"w": weight, "s": scales}
    source = open_source(write_folder(tmp_path, state, {}))
    first = 37
    decoder = Fp8Decoder({"w": source.tensors["s"]}, (128, 128), DTYPES[form])
    part = Slice(source.tensors["w"], first * 700, (300 - first, 700), decoder)
    values = decoded(codes, scales)[first:]
    expected = to_bf16(values) if form == "bf16" else values.tobytes()

    for start, size in ((0, part.size), (1, 3), (1399, 2803), (part.size - 5, 5), (9999, 300_001)):
        buffer = bytearray(size)
        part.read_into(source, start, memoryview(buffer))
        assert bytes(buffer) == expected[start : start + size]
