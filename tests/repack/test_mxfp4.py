"""MXFP4 of gpt-oss against gguf-py's decoder, and strided slices against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import colibri_format
from colibri_format import DTYPES, Role
from colibri_repack import RepackError, SourceError, open_source, repack
from colibri_repack.decoding import Mxfp4Decoder, Slice, StridedDecoder
from helpers import family_states as f
from helpers import gguf_builder as g
from helpers.safetensors_builder import Entry, write_folder

Array = np.ndarray[Any, np.dtype[Any]]
# E2M1 by code (OCP Microscaling Formats 1.0, table 5).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def packed(rng: np.random.Generator, *shape: int) -> tuple[Array, Array, Array]:
    """Blocks and scales as gpt-oss stores them, and the numbers that they mean."""
    *rows, columns = shape
    blocks = rng.integers(0, 256, (*rows, columns // 32, 16), np.uint8)
    scales = rng.integers(100, 140, (*rows, columns // 32), np.uint8)
    numbers = np.empty((*rows, columns // 32, 32), np.float32)
    numbers[..., 0::2] = E2M1[blocks & 15]
    numbers[..., 1::2] = E2M1[blocks >> 4]
    numbers *= np.exp2(scales.astype(np.float32) - 127)[..., None]
    return blocks, scales, numbers.reshape(shape)


def gpt_oss(tmp_path: Path) -> tuple[Path, list[Array], list[Array]]:
    """A checkpoint with experts in MXFP4; the numbers of `gate_up` and `down` by layer."""
    rng = np.random.default_rng(4)
    state: dict[str, Entry] = dict(f.hf_state("gpt_oss"))
    gate_up, down = [], []
    for layer in range(f.N_LAYERS):
        stem = f"model.layers.{layer}.mlp.experts"
        for name, numbers, shape in (
            ("gate_up_proj", gate_up, (f.N_EXPERTS, 2 * f.WIDTH, f.HIDDEN)),
            ("down_proj", down, (f.N_EXPERTS, f.HIDDEN, f.WIDTH)),
        ):
            del state[f"{stem}.{name}"]
            blocks, scales, values = packed(rng, *shape)
            state[f"{stem}.{name}_blocks"] = blocks
            state[f"{stem}.{name}_scales"] = scales
            numbers.append(values)
    folder = write_folder(
        tmp_path / "in", state, f.config("gpt_oss") | {"quantization_config": MXFP4}
    )
    return folder, gate_up, down


def test_mxfp4_becomes_ggml_quant_blocks_of_the_same_numbers(tmp_path: Path) -> None:
    folder, gate_up, down = gpt_oss(tmp_path)
    biases = f.expert_state("gpt_oss")

    report = repack(folder, tmp_path / "out.colibri")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        for layer in range(f.N_LAYERS):
            for expert in range(f.N_EXPERTS):
                expected = {
                    Role.GATE: gate_up[layer][expert, 0::2],
                    Role.UP: gate_up[layer][expert, 1::2],
                    Role.DOWN: down[layer][expert],
                }
                block = file.expert(layer, expert)
                data = block.read()
                for s in block.segments:
                    payload = block.plain(s, data)
                    if s.role not in expected:
                        bias = biases[layer, expert, s.role.name.lower()]
                        np.testing.assert_array_equal(payload.view("<f4"), bias)
                        continue
                    assert s.dtype.name == "mxfp4"
                    got = gguf.quants.dequantize(
                        payload.reshape(s.shape[0], -1), gguf.GGMLQuantizationType.MXFP4
                    )
                    np.testing.assert_array_equal(got, expected[s.role])
    assert report.facts.types["mxfp4"].segments == 3 * f.N_LAYERS * f.N_EXPERTS


def test_mxfp4_is_not_quantised_again(tmp_path: Path) -> None:
    folder, _, _ = gpt_oss(tmp_path)

    with pytest.raises(RepackError) as caught:
        repack(folder, tmp_path / "out.colibri", quant="q8_0")

    assert caught.value.code == "requantize"


def test_mxfp4_of_a_gguf_keeps_its_bytes(tmp_path: Path) -> None:
    builder = g.GgufBuilder().add("general.architecture", g.STRING, "gpt-oss")
    for key, count in {"block_count": f.N_LAYERS, "embedding_length": f.HIDDEN,
                       "expert_count": f.N_EXPERTS, "expert_used_count": 2}.items():  # fmt: skip
        builder.add(f"gpt-oss.{key}", g.U32, count)
    for name, array in f.dense_state("gpt_oss").items():
        builder.tensor(name, array.shape, 0, array.tobytes())
    rng = np.random.default_rng(8)
    stacks = {}
    for layer in range(f.N_LAYERS):
        for matrix, rows, columns in (("gate", f.WIDTH, f.HIDDEN), ("up", f.WIDTH, f.HIDDEN),
                                      ("down", f.HIDDEN, f.WIDTH)):  # fmt: skip
            stack = rng.integers(0, 256, (f.N_EXPERTS, rows, columns // 32 * 17), np.uint8)
            bias = rng.standard_normal((f.N_EXPERTS, rows)).astype(np.float32)
            stem = f"blk.{layer}.ffn_{matrix}_exps"
            shape = (f.N_EXPERTS, rows, columns)
            builder.tensor(f"{stem}.weight", shape, 39, stack.tobytes())
            builder.tensor(f"{stem}.bias", bias.shape, 0, bias.tobytes())
            stacks[layer, matrix], stacks[layer, f"{matrix}_bias"] = stack, bias
    path = builder.write(tmp_path / "in.gguf")

    repack(path, tmp_path / "out.colibri")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert file.tensors.keys() == f.dense_state("gpt_oss").keys()
        for layer in range(f.N_LAYERS):
            for expert in range(f.N_EXPERTS):
                block = file.expert(layer, expert)
                data = block.read()
                assert len(block.segments) == 6
                for s in block.segments:
                    part = stacks[layer, s.role.name.lower()][expert]
                    assert block.plain(s, data).tobytes() == part.tobytes()
    with pytest.raises(RepackError) as caught:
        repack(path, tmp_path / "b.colibri", quant="q8_0")
    assert caught.value.code == "requantize"


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("down_proj_scales", None),
        ("down_proj_blocks", None),
        ("down_proj_scales", np.zeros((5, 96, 3), np.uint8)),
        ("down_proj_blocks", np.zeros((5, 96, 4, 8), np.uint8)),
        ("down_proj_blocks", np.zeros((5, 96, 2, 16), "<i4")),
    ],
)
def test_mxfp4_that_does_not_fit_together_is_refused(
    tmp_path: Path, name: str, item: Array | None
) -> None:
    gpt_oss(tmp_path)
    source = open_source(tmp_path / "in")
    state: dict[str, Entry] = {}
    kinds = {"f32": "F32", "u8": "U8"}
    for key, tensor in source.tensors.items():
        buffer = bytearray(tensor.size)
        source.read_into(key, 0, memoryview(buffer))
        state[key] = (kinds[tensor.dtype.name], tensor.shape, bytes(buffer))
    key = f"model.layers.1.mlp.experts.{name}"
    if item is None:
        del state[key]
    else:
        state[key] = item
    folder = write_folder(
        tmp_path / "b", state, f.config("gpt_oss") | {"quantization_config": MXFP4}
    )

    with pytest.raises(SourceError) as caught:
        repack(folder, tmp_path / "out.colibri")

    assert caught.value.code in ("missing-tensor", "tensor-shape")


def test_any_range_of_bytes_of_interleaved_rows_can_be_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    blocks, scales, numbers = packed(rng, 2 * 300, 416)
    source = open_source(write_folder(tmp_path, {"b": blocks, "s": scales}, {}))
    per_row = 416 // 32
    decoder = Mxfp4Decoder(source.tensors["s"], 2)
    part = Slice(source.tensors["b"], per_row * 16, (300, 416), decoder)
    whole = bytearray(part.size)

    part.read_into(source, 0, memoryview(whole))

    rows = np.frombuffer(whole, np.uint8).reshape(300, -1)
    got = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(got, numbers[1::2])
    for start, size in ((0, 1), (5, 17), (16, 500), (220, 223), (part.size - 3, 3)):
        piece = bytearray(size)
        part.read_into(source, start, memoryview(piece))
        assert piece == whole[start : start + size]


@pytest.mark.parametrize("step", [1, 2])
def test_transposed_matrices_are_read_in_any_range(tmp_path: Path, step: int) -> None:
    rng = np.random.default_rng(6)
    stack = rng.integers(0, 2**16, (3, 150, 80 * step)).astype("<u2")
    state: dict[str, Entry] = {"w": ("F16", stack.shape, stack.tobytes())}
    source = open_source(write_folder(tmp_path, state, {}))
    start = step - 1
    decoder = StridedDecoder(DTYPES["f16"], step, 80 * step)
    part = Slice(source.tensors["w"], (2 * 150 * 80 * step + start) * 2, (80, 150), decoder)
    expected = np.ascontiguousarray(stack[2, :, start::step].T)

    for first, size in ((0, part.size), (1, 1), (301, 777), (part.size - 7, 7)):
        buffer = bytearray(size)
        part.read_into(source, first, memoryview(buffer))
        assert bytes(buffer) == expected.tobytes()[first : first + size]
    assert part.place(301) == (2, 1, 2 * step + start)
