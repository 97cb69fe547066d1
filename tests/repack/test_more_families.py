"""Families that are repacked only, and FP8 and MXFP4: every tensor against its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format
from colibri_format import DTYPES_BY_GGML_ID, Reader, Role
from colibri_repack import SourceError, quantise_q8_0, repack
from colibri_repack.families import is_matrix
from helpers import family_states as f
from helpers import gguf_builder as g
from helpers.family_gguf import gguf_of
from helpers.safetensors_builder import Entry, bf16, entry, write_folder

Array = np.ndarray[Any, np.dtype[Any]]


def raw(array: Array, quant: str, is_weight: bool) -> tuple[str, bytes]:
    """What a float32 tensor must have become: encoding and bytes."""
    if quant == "keep" or not is_weight or array.shape[-1] % 32:
        return "f32", array.tobytes()
    return "q8_0", quantise_q8_0(np.ascontiguousarray(array).reshape(-1)).tobytes()


def check_file(path: Path, family: str, quant: str) -> None:
    """Every dense tensor and every expert's part is there, byte for byte, and no other."""
    dense = f.dense_state(family)
    experts = f.expert_state(family)
    with colibri_format.open(path) as file:
        assert file.verify() == []
        assert file.tensors.keys() == dense.keys()
        for name, array in dense.items():
            dtype, data = raw(array, quant, is_matrix(name))
            tensor = file.tensor(name)
            assert (tensor.dtype.name, tensor.shape) == (dtype, array.shape), name
            assert tensor.read_plain().tobytes() == data, name
            layer = int(name.split(".")[1]) if name.startswith("blk.") else None
            assert file.tensors[name].layer == layer
        assert check_experts(file, experts, quant) == len(experts)
        assert "model.json" not in file.files
        assert file.metadata["top_k"] == (1 if family.startswith("gemma") else f.TOP_K)


def check_experts(file: Reader, experts: dict[tuple[int, int, str], Array], quant: str) -> int:
    n_parts = 0
    for layer in range(file.geometry.n_layers):
        for expert in np.flatnonzero(file.index["size"][layer]).tolist():
            block = file.expert(layer, expert)
            data = block.read()
            for segment in block.segments:
                array = experts[layer, expert, segment.role.name.lower()]
                dtype, expected = raw(array, quant, array.ndim == 2)
                assert (segment.dtype.name, segment.shape) == (dtype, array.shape)
                got = block.plain(segment, data).tobytes()
                assert got == expected, (layer, expert, segment.role)
                n_parts += 1
    return n_parts


@pytest.mark.parametrize("quant", ["keep", "q8_0"])
@pytest.mark.parametrize("family", f.FAMILIES)
def test_safetensors_of_a_family_is_repacked_whole(tmp_path: Path, family: str, quant: str) -> None:
    folder = write_folder(tmp_path / "in", dict(f.hf_state(family)), f.config(family), n_shards=2)

    report = repack(folder, tmp_path / "out.colibri", quant=quant)

    check_file(tmp_path / "out.colibri", family, quant)
    assert any("no model.json" in note for note in report.notes)


@pytest.mark.parametrize("quant", ["keep", "q8_0"])
@pytest.mark.parametrize(
    ("family", "storage"),
    [(family, "stacked") for family in f.FAMILIES]
    + [("phimoe", "single"), ("deepseek_v2", "single"), ("qwen3_next", "fused"),
       ("qwen3_5_moe", "fused")],
)  # fmt: skip
def test_gguf_of_a_family_is_repacked_whole(
    tmp_path: Path, family: str, storage: str, quant: str
) -> None:
    source = gguf_of(family, storage).write(tmp_path / "in.gguf")

    repack(source, tmp_path / "out.colibri", quant=quant)

    check_file(tmp_path / "out.colibri", family, quant)


def test_what_is_no_part_of_the_text_model_is_left_out_and_told(tmp_path: Path) -> None:
    family = "qwen3_5_moe"
    folder = write_folder(tmp_path / "in", dict(f.hf_state(family)), f.config(family))

    report = repack(folder, tmp_path / "out.colibri")

    assert any("2 tensors under" in note and "mtp.*" in note for note in report.notes)


def test_layers_that_predict_further_tokens_may_be_missing(tmp_path: Path) -> None:
    state = {k: v for k, v in f.hf_state("glm4_moe").items() if ".layers.3." not in k}
    folder = write_folder(tmp_path / "in", dict(state), f.config("glm4_moe"))

    report = repack(folder, tmp_path / "out.colibri")

    assert report.facts.n_layers == f.N_LAYERS
    assert any("further tokens" in note for note in report.notes)


@pytest.mark.parametrize("ggml_id", DTYPES_BY_GGML_ID)
def test_experts_of_every_ggml_type_keep_their_bits(tmp_path: Path, ggml_id: int) -> None:
    dtype = DTYPES_BY_GGML_ID[ggml_id]
    hidden, width = 256, 512
    rng = np.random.default_rng(ggml_id)
    builder = g.GgufBuilder().add("general.architecture", g.STRING, "glm4moe")
    numbers = {"block_count": 1, "embedding_length": hidden, "expert_count": 3,
               "expert_used_count": 2}  # fmt: skip
    for key, number in numbers.items():
        builder.add(f"glm4moe.{key}", g.U32, number)
    for name, shape in (
        ("token_embd", (5, hidden)),
        ("output_norm", (hidden,)),
        ("blk.0.attn_norm", (hidden,)),
        ("blk.0.ffn_gate_inp", (3, hidden)),
    ):
        builder.tensor(f"{name}.weight", shape, 0, bytes(4 * int(np.prod(shape))))
    stacks = {}
    for matrix, shape in (("gate", (width, hidden)), ("up", (width, hidden)),
                          ("down", (hidden, width))):  # fmt: skip
        stacks[matrix] = rng.bytes(3 * dtype.size_bytes(shape))
        builder.tensor(f"blk.0.ffn_{matrix}_exps.weight", (3, *shape), ggml_id, stacks[matrix])
    dense = rng.bytes(dtype.size_bytes((7, 256)))
    builder.tensor("blk.0.attn_q.weight", (7, 256), ggml_id, dense)

    repack(builder.write(tmp_path / "in.gguf"), tmp_path / "out.colibri")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert file.tensor("blk.0.attn_q.weight").read_plain().tobytes() == dense
        for expert in range(3):
            block = file.expert(0, expert)
            data = block.read()
            for segment in block.segments:
                assert segment.dtype is dtype
                stack = stacks[segment.role.name.lower()]
                expected = stack[expert * segment.size : (expert + 1) * segment.size]
                assert block.plain(segment, data).tobytes() == expected


def test_factors_of_nvfp4_experts_are_scale_segments(tmp_path: Path) -> None:
    builder = gguf_of("minimax_m2", "stacked")
    factors = np.arange(1, f.N_EXPERTS + 1, dtype=np.float32)
    for layer in range(f.N_LAYERS):
        builder.tensor(f"blk.{layer}.ffn_up_exps.scale", (f.N_EXPERTS,), 0, factors.tobytes())

    repack(builder.write(tmp_path / "in.gguf"), tmp_path / "out.colibri")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        block = file.expert(1, 3)
        data = block.read()
        segment = next(s for s in block.segments if s.role is Role.UP_SCALE)
        assert segment.shape == (1,)
        assert data[segment.offset : segment.offset + 4].view("<f4") == 4


def write(tmp_path: Path, family: str, change: Callable[[dict[str, Entry]], None] | None = None,
          **config: Any) -> Path:  # fmt: skip
    state: dict[str, Entry] = dict(f.hf_state(family))
    if change:
        change(state)
    return write_folder(tmp_path / "in", state, f.config(family) | config)


def refused(path: Path, tmp_path: Path, **options: Any) -> tuple[str, str]:
    with pytest.raises(SourceError) as caught:
        repack(path, tmp_path / "out.colibri", **options)
    assert not (tmp_path / "out.colibri").exists()
    return caught.value.code, str(caught.value)


def without(name: str) -> Callable[[dict[str, Entry]], None]:
    return lambda state: state.__delitem__(name)


def with_tensor(name: str, array: Entry) -> Callable[[dict[str, Entry]], None]:
    return lambda state: state.__setitem__(name, array)


_X = "model.layers.1.mlp.experts.2"
WRONG: dict[str, tuple[str, Callable[[dict[str, Entry]], None], str]] = {
    "a missing expert part": ("glm4_moe", without(f"{_X}.up_proj.weight"), "missing-tensor"),
    "a missing last expert": (
        "glm4_moe",
        lambda s: [s.pop(f"model.layers.1.mlp.experts.4.{m}_proj.weight")
                   for m in ("gate", "up", "down")] and None,
        "missing-tensor",
    ),
    "a missing router": ("glm4_moe", without("model.layers.1.mlp.gate.weight"), "missing-tensor"),
    "a missing norm": ("gpt_oss", without("model.norm.weight"), "missing-tensor"),
    "a missing head": ("gpt_oss", without("lm_head.weight"), "missing-tensor"),
    "a missing sink": ("gpt_oss", without("model.layers.2.self_attn.sinks"), "missing-tensor"),
    "a missing projection": (
        "deepseek_v3", without("model.layers.2.self_attn.q_b_proj.weight"), "missing-tensor"),
    "a missing part of the one dense layer": (
        "deepseek_v3",
        without("model.layers.0.mlp.up_proj.weight"),
        "missing-tensor",
    ),
    "a missing projection of the one dense layer": (
        "deepseek_v3",
        without("model.layers.0.self_attn.kv_b_proj.weight"),
        "missing-tensor",
    ),
    "a layer too many": (
        "phimoe",
        with_tensor("model.layers.3.input_layernorm.weight", np.zeros(96, np.float32)),
        "unknown-tensors",
    ),
    "a tensor of another model": (
        "phimoe",
        with_tensor("model.layers.0.conv.weight", np.zeros(96, np.float32)),
        "unknown-tensors",
    ),
    "an expert too many": (
        "glm4_moe",
        with_tensor("model.layers.1.mlp.experts.5.up_proj.weight", np.zeros((64, 96), "f4")),
        "tensor-shape",
    ),
    "an expert of another width": (
        "glm4_moe",
        with_tensor(f"{_X}.up_proj.weight", np.zeros((32, 96), np.float32)),
        "tensor-shape",
    ),
    "a stack of another rank": (
        "granitemoe",
        with_tensor("model.layers.0.block_sparse_moe.input_linear.weight", np.zeros((5, 96), "f4")),
        "tensor-shape",
    ),
    "a stack of odd rows": (
        "granitemoe",
        with_tensor("model.layers.0.block_sparse_moe.input_linear.weight",
                    np.zeros((5, 127, 96), "f4")),
        "tensor-shape",
    ),
    "experts fused and alone": (
        "qwen3_next",
        with_tensor("model.layers.1.mlp.experts.gate_up_proj", np.zeros((5, 128, 96), "f4")),
        "duplicate-tensor",
    ),
    "booleans": (
        "phimoe", with_tensor("lm_head.bias", ("BOOL", (101,), bytes(101))), "unsupported-dtype"),
    "blocks without scales": (
        "gpt_oss",
        with_tensor("model.layers.0.mlp.experts.down_proj_blocks",
                    np.zeros((5, 96, 2, 16), np.uint8)),
        "missing-tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_incomplete_or_foreign_tensors_are_refused(tmp_path: Path, case: str) -> None:
    family, change, code = WRONG[case]

    assert refused(write(tmp_path, family, change), tmp_path)[0] == code


def test_family_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, "phimoe", architectures=["X"], model_type="x")

    assert refused(path, tmp_path)[0] == "unknown-family"
    assert repack(path, tmp_path / "out.colibri", family="phimoe").facts.family == "phimoe"
    assert refused(path, tmp_path / "x", family="nothing")[0] == "unknown-family"


@pytest.mark.parametrize("family", ["phimoe", "qwen3_next", "granitemoe-stacked", "gpt_oss-halves"])
def test_experts_of_an_unknown_family_are_recognised(tmp_path: Path, family: str) -> None:
    name, _, form = family.partition("-")
    state: dict[str, Entry] = dict(f.hf_state(name))
    experts = f.expert_state(name)
    if form:
        state = {k: v for k, v in state.items() if "experts" not in k and "linear.w" not in k}
        for layer in range(f.N_LAYERS):
            parts = {m: np.stack([experts[layer, e, m] for e in range(f.N_EXPERTS)])
                     for m in ("gate", "up", "down")}  # fmt: skip
            if form == "stacked":
                for matrix, array in parts.items():
                    key = f"model.layers.{layer}.mlp.switch_mlp.{matrix}_proj.weight"
                    state[key] = array
            else:
                both = np.concatenate([parts["gate"], parts["up"]], axis=1)
                stem = f"model.layers.{layer}.feed_forward.experts"
                state[f"{stem}.gate_up_proj"] = np.ascontiguousarray(both.transpose(0, 2, 1))
                state[f"{stem}.down_proj"] = np.ascontiguousarray(parts["down"].transpose(0, 2, 1))
        experts = {k: v for k, v in experts.items() if "bias" not in k[2]}
    config = f.config(name) | {"architectures": ["NewMoeForCausalLM"], "model_type": "new_moe"}
    folder = write_folder(tmp_path / "in", state, config)

    report = repack(folder, tmp_path / "out.colibri", family="auto")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert check_experts(file, experts, "keep") == len(experts)
        assert file.metadata["family"] == "new_moe"
        assert "token_embd.weight" in file.tensors
    assert any(note.startswith("mapped ") and "ffn_down" in note for note in report.notes)


def test_gguf_of_an_unknown_architecture_is_recognised(tmp_path: Path) -> None:
    builder = gguf_of("minimax_m2", "stacked")
    for number, pair in enumerate(builder.pairs):
        builder.pairs[number] = pair.replace(b"minimax-m2", b"minimax-m9")

    repack(builder.write(tmp_path / "in.gguf"), tmp_path / "out.colibri", family="auto")

    check_file(tmp_path / "out.colibri", "minimax_m2", "keep")


@pytest.mark.parametrize("family", ["minimax_m2", "gpt_oss"])
def test_fused_gguf_is_refused_where_its_order_is_not_defined(tmp_path: Path, family: str) -> None:
    path = gguf_of(family, "fused").write(tmp_path / "in.gguf")

    assert refused(path, tmp_path)[0] == "unsupported-model"


def test_auto_takes_the_table_of_a_family_that_has_one(tmp_path: Path) -> None:
    repack(write(tmp_path, "gpt_oss"), tmp_path / "out.colibri", family="auto")

    check_file(tmp_path / "out.colibri", "gpt_oss", "keep")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.0.mlp.experts.0.conv.weight", (4, 4)),
     ("model.layers.0.mlp.experts.qkv", (5, 4, 4))],
)  # fmt: skip
def test_expert_tensors_that_auto_cannot_place_are_listed(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    path = write(tmp_path, "phimoe", with_tensor(name, np.zeros(shape, np.float32)),
                 architectures=["X"], model_type="x")  # fmt: skip

    code, message = refused(path, tmp_path, family="auto")

    assert code == "unknown-tensors"
    assert name in message


def test_auto_refuses_a_model_without_experts(tmp_path: Path) -> None:
    path = write(tmp_path, "gemma", architectures=["X"], model_type="x")

    assert refused(path, tmp_path, family="auto")[0] == "unknown-tensors"


@pytest.mark.parametrize("is_turned", [False, True])
def test_auto_tells_square_stacks_by_the_others(tmp_path: Path, is_turned: bool) -> None:
    rng = np.random.default_rng(1)
    both = rng.standard_normal((4, 96, 96)).astype(np.float32)
    down = rng.standard_normal((4, 96, 48)).astype(np.float32)

    def stored(array: Array) -> Array:
        return np.ascontiguousarray(array.transpose(0, 2, 1)) if is_turned else array

    state: dict[str, Entry] = {
        "model.layers.0.mlp.experts.gate_up_proj": stored(both),
        "model.layers.0.mlp.experts.down_proj": stored(down),
    }
    config = {"num_hidden_layers": 1, "hidden_size": 96, "num_experts": 4, "model_type": "x"}
    path = write_folder(tmp_path / "in", state, config)

    repack(path, tmp_path / "out.colibri", family="auto")

    experts = {(0, e, "gate"): both[e, :48] for e in range(4)}
    experts |= {(0, e, "up"): both[e, 48:] for e in range(4)}
    experts |= {(0, e, "down"): down[e] for e in range(4)}
    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert check_experts(file, experts, "keep") == len(experts)


def test_auto_refuses_stacks_whose_axes_cannot_be_told(tmp_path: Path) -> None:
    state: dict[str, Entry] = {
        "model.layers.0.mlp.experts.up_proj": np.zeros((4, 96, 96), np.float32),
        "model.layers.0.mlp.experts.down_proj": np.zeros((4, 96, 96), np.float32),
    }
    config = {"num_hidden_layers": 1, "hidden_size": 96, "num_experts": 4, "model_type": "x"}
    path = write_folder(tmp_path / "in", state, config)

    assert refused(path, tmp_path, family="auto")[0] == "tensor-shape"


def test_head_that_is_tied_and_stored_is_dropped(tmp_path: Path) -> None:
    state = f.hf_state("gemma2")
    head = state["model.embed_tokens.weight"].copy()

    report = repack(write(tmp_path, "gemma2", with_tensor("lm_head.weight", head)),
                    tmp_path / "out.colibri")  # fmt: skip

    check_file(tmp_path / "out.colibri", "gemma2", "keep")
    assert any("lm_head.weight" in note for note in report.notes)


def test_bfloat16_checkpoint_keeps_its_bytes(tmp_path: Path) -> None:
    state = {k: bf16(v) for k, v in f.hf_state("gpt_oss").items()}
    folder = write_folder(tmp_path / "in", state, f.config("gpt_oss"))

    repack(folder, tmp_path / "out.colibri")

    experts = f.expert_state("gpt_oss")
    with colibri_format.open(tmp_path / "out.colibri") as file:
        for expert in range(f.N_EXPERTS):
            block = file.expert(2, expert)
            data = block.read()
            for s in block.segments:
                expected = entry(bf16(experts[2, expert, s.role.name.lower()]))[2]
                assert block.plain(s, data).tobytes() == expected


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("blk." + "9" * 5000 + ".attn_q.weight", "unknown-tensors"),
        ("blk.3.attn_q.weight", "unknown-tensors"),
        ("blk.01.attn_q.weight", "unknown-tensors"),
        ("blk.{}.attn_q.weight", "unknown-tensors"),
        ("blk.0.ffn_up.9999999.weight", "tensor-shape"),
        ("blk.0.ffn_up_exps.scales", "missing-tensor"),
        ("blk.0.ffn_up_exps.bias", "tensor-shape"),
    ],
)
def test_names_of_places_that_there_are_not_are_refused(
    tmp_path: Path, name: str, code: str
) -> None:
    builder = gguf_of("minimax_m2", "stacked").tensor(name, (4,), 0, bytes(16))

    assert refused(builder.write(tmp_path / "in.gguf"), tmp_path)[0] == code
