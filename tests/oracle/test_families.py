"""Live: models of every repack-only family, saved by transformers, against its own parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import colibri_format
from colibri_format import Role
from colibri_repack import quantise_q8_0, repack
from helpers import family_states as f
from helpers.safetensors_builder import Entry, write_folder

pytestmark = [
    pytest.mark.oracle,
    # Warnings of torch and transformers about themselves say nothing about this project.
    pytest.mark.filterwarnings("default"),
]
_COMMON = {
    "vocab_size": 203, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_SPARSE = {
    "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_SMALL = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR = {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "head_dim": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek_v2": ("DeepseekV2", _SPARSE | _MLA | {"head_dim": 8}, "halves"),
    "deepseek_v3": ("DeepseekV3", _SPARSE | _MLA, "halves"),
    "glm4_moe": (
        "Glm4Moe",
        _SPARSE | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
        "halves",
    ),
    "gpt_oss": ("GptOss", _SMALL | {"head_dim": 16}, "turned"),
    "granitemoe": ("GraniteMoe", _SMALL, "halves"),
    "granitemoeshared": (
        "GraniteMoeShared", _SMALL | {"shared_intermediate_size": 48}, "halves"),
    "phimoe": ("Phimoe", _SMALL | {"attention_bias": True, "lm_head_bias": True}, "halves"),
    "minimax_m2": ("MiniMaxM2", _SMALL | {"head_dim": 16}, "halves"),
    "qwen3_next": ("Qwen3Next", _LINEAR | {"intermediate_size": 96}, "halves"),
    "qwen3_5_moe": ("Qwen3_5Moe", _LINEAR, "halves"),
    "gemma": ("Gemma", {"intermediate_size": 96, "head_dim": 16}, "dense"),
    "gemma2": ("Gemma2", {"intermediate_size": 96, "head_dim": 16}, "dense"),
    "gemma3_text": ("Gemma3", {"intermediate_size": 96, "head_dim": 16}, "dense"),
}  # fmt: skip


def saved(name: str, folder: Path) -> Any:
    import torch
    import transformers

    stem, values, _ = CASES[name]
    torch.manual_seed(5)
    kind = "TextConfig" if name in ("qwen3_5_moe", "gemma3_text") else "Config"
    config = getattr(transformers, f"{stem}{kind}")(**(_COMMON | values))
    model = getattr(transformers, f"{stem}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    return model


def expert_parts(model: Any, name: str, layer: int, expert: int) -> dict[Role, Any] | None:
    """The expert's matrices as the model computes with them, `(outputs, inputs)`."""
    storage = CASES[name][2]
    block = model.model.layers[layer]
    if storage == "dense":
        mlp = block.mlp
        return {Role.GATE: mlp.gate_proj.weight, Role.UP: mlp.up_proj.weight,
                Role.DOWN: mlp.down_proj.weight}  # fmt: skip
    mlp = getattr(block, "mlp", None) or block.block_sparse_moe
    if not hasattr(mlp, "experts"):
        return None
    experts = mlp.experts
    both, down = experts.gate_up_proj[expert], experts.down_proj[expert]
    if storage == "turned":
        bias = experts.gate_up_proj_bias[expert]
        return {Role.GATE: both[:, ::2].T, Role.UP: both[:, 1::2].T, Role.DOWN: down.T,
                Role.GATE_BIAS: bias[::2], Role.UP_BIAS: bias[1::2],
                Role.DOWN_BIAS: experts.down_proj_bias[expert]}  # fmt: skip
    half = both.shape[0] // 2
    return {Role.GATE: both[:half], Role.UP: both[half:], Role.DOWN: down}


def numbers(tensor: Any) -> tuple[np.ndarray[Any, Any], bytes]:
    """As float32, and as the bytes of bfloat16."""
    import torch

    whole = tensor.detach().contiguous()
    return whole.float().numpy(), whole.view(torch.uint16).numpy().tobytes()


@pytest.mark.parametrize("quant", ["keep", "q8_0"])
@pytest.mark.parametrize("name", CASES)
def test_experts_are_those_that_transformers_computes_with(
    tmp_path: Path, name: str, quant: str
) -> None:
    from safetensors.torch import load_file

    model = saved(name, tmp_path / "in")

    repack(tmp_path / "in", tmp_path / "out.colibri", quant=quant, layout="plain")

    n_blocks = 0
    with colibri_format.open(tmp_path / "out.colibri") as file:
        for layer in range(file.geometry.n_layers):
            for expert in range(file.geometry.n_experts):
                expected = expert_parts(model, name, layer, expert)
                assert (expected is None) == (file.layout(layer) is None)
                if expected is None:
                    continue
                block = file.expert(layer, expert)
                assert {s.role for s in block.segments} == expected.keys()
                data = block.read()
                n_blocks += 1
                for s in block.segments:
                    values, kept = numbers(expected[s.role])
                    if quant == "q8_0" and values.ndim == 1:
                        kept = values.tobytes()
                    elif quant == "q8_0":
                        flat = np.ascontiguousarray(values).reshape(-1)
                        kept = quantise_q8_0(flat).tobytes()
                    assert data[s.offset : s.offset + s.size].tobytes() == kept, (layer, s.role)
        dense = {
            f.gguf_name(
                gguf.get_tensor_name_map(gguf.MODEL_ARCH[f.FAMILIES[name][1]], 4), key
            ): tensor
            for key, tensor in load_file(tmp_path / "in" / "model.safetensors").items()
            if not any(part in key for part in (".experts.", "_linear.", "shared_mlp"))
            and not (name.startswith("gemma") and (".mlp." in key or key == "lm_head.weight"))
        }
        if name == "granitemoeshared":
            for layer in range(3):
                shared = model.model.layers[layer].shared_mlp
                half = shared.input_linear.weight.shape[0] // 2
                dense |= {
                    f"blk.{layer}.ffn_gate_shexp.weight": shared.input_linear.weight[:half],
                    f"blk.{layer}.ffn_up_shexp.weight": shared.input_linear.weight[half:],
                    f"blk.{layer}.ffn_down_shexp.weight": shared.output_linear.weight,
                }
        assert dense.keys() == file.tensors.keys()
        if quant == "keep":
            for key, tensor in dense.items():
                assert file.tensor(key).read().tobytes() == numbers(tensor)[1], key
    assert n_blocks


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_decoded_as_torch_does(tmp_path: Path, kind: str) -> None:
    import torch

    torch.manual_seed(6)
    weight = torch.randn(200, 300).mul(3).to(getattr(torch, kind))
    scales = torch.rand(2, 3) + 0.01
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    exact = weight.float() * spread
    name = "model.layers.0.self_attn.o_proj.weight"
    state: dict[str, Entry] = dict(f.hf_state("phimoe"))
    stored = "F8_E4M3" if "e4m3" in kind else "F8_E5M2"
    state[name] = (stored, (200, 300), weight.view(torch.uint8).numpy().tobytes())
    state[name + "_scale_inv"] = scales.numpy()
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    # Layers of one kind have the same tensors, but not their encodings.
    folder = write_folder(tmp_path / "in", state, f.config("phimoe") | {
        "quantization_config": settings})  # fmt: skip

    repack(folder, tmp_path / "a.colibri", layout="plain")
    repack(folder, tmp_path / "b.colibri", fp8="f32", layout="plain")

    with (
        colibri_format.open(tmp_path / "a.colibri") as a,
        colibri_format.open(tmp_path / "b.colibri") as b,
    ):
        got = a.tensor("blk.0.attn_output.weight").read().tobytes()
        assert got == exact.to(torch.bfloat16).view(torch.uint16).numpy().tobytes()
        got = b.tensor("blk.0.attn_output.weight").read().tobytes()
        assert got == exact.numpy().tobytes()


def test_mxfp4_is_decoded_as_transformers_does(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(7)
    state: dict[str, Entry] = dict(f.hf_state("gpt_oss"))
    expected = {}
    for layer in range(f.N_LAYERS):
        stem = f"model.layers.{layer}.mlp.experts"
        for name, rows, columns in (("gate_up_proj", 2 * f.WIDTH, f.HIDDEN),
                                    ("down_proj", f.HIDDEN, f.WIDTH)):  # fmt: skip
            del state[f"{stem}.{name}"]
            blocks = rng.integers(0, 256, (f.N_EXPERTS, rows, columns // 32, 16), np.uint8)
            scales = rng.integers(110, 130, blocks.shape[:3], np.uint8)
            state[f"{stem}.{name}_blocks"] = blocks
            state[f"{stem}.{name}_scales"] = scales
            expected[layer, name] = convert_moe_packed_tensors(
                torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
            ).numpy()
    folder = write_folder(tmp_path / "in", state, f.config("gpt_oss") | {
        "quantization_config": {"quant_method": "mxfp4"}})  # fmt: skip

    repack(folder, tmp_path / "out.colibri", layout="plain")

    with colibri_format.open(tmp_path / "out.colibri") as file:
        for (layer, name), values in expected.items():
            for expert in range(f.N_EXPERTS):
                block = file.expert(layer, expert)
                data = block.read()
                # transformers turns them: `(n_experts, inputs, outputs)`.
                gate, up = values[expert][:, ::2].T, values[expert][:, 1::2].T
                wanted = {Role.GATE: gate, Role.UP: up}
                if name == "down_proj":
                    wanted = {Role.DOWN: values[expert].T}
                for s in block.segments:
                    if s.role in wanted:
                        rows = data[s.offset : s.offset + s.size].reshape(s.shape[0], -1)
                        got = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4)
                        np.testing.assert_array_equal(got, wanted[s.role])
