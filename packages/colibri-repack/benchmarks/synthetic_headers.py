"""Headers of the largest public checkpoints, with holes where their data would be.

Names, shapes, types and numbers of files are those of the published models; the files have their
true sizes and take no space but for the headers. Enough to plan a repack, not to carry one out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path

from synthetic_checkpoint import _array, _pair, _string

Shapes = Iterator[tuple[str, tuple[int, ...]]]

# config.json of deepseek-ai/DeepSeek-V3 and of Qwen/Qwen3-235B-A22B.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B = {
    "block_count": 94, "context_length": 40960, "embedding_length": 4096,
    "feed_forward_length": 12288, "expert_feed_forward_length": 1536, "expert_count": 128,
    "expert_used_count": 8, "attention.head_count": 64, "attention.head_count_kv": 4,
    "attention.key_length": 128, "attention.value_length": 128,
}  # fmt: skip
QWEN3_VOCAB = 151_936
_U32, _F32, _STRING, _ARRAY, _U16, _I32 = 4, 6, 8, 9, 2, 5
# ggml's numbers of types, and elements and bytes of a quant block.
_TYPES = {"f32": (0, 1, 4), "q4_k": (12, 256, 144), "q6_k": (14, 256, 210)}


def write_deepseek_v3(folder: Path, n_shards: int = 163, *, is_fp8: bool = True) -> None:
    """The folder of DeepSeek-V3: 90,000 tensors with `is_fp8` (as published), else half of it."""
    config = dict(DEEPSEEK_V3)
    if is_fp8:
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries = list(_with_scales(_deepseek_shapes(), is_fp8))
    of_shard = -(-sum(size for *_, size in entries) // n_shards)
    headers: list[dict[str, dict[str, object]]] = [{}]
    position = 0
    for name, dtype, shape, size in entries:
        if position > of_shard and len(headers) < n_shards:
            headers.append({})
            position = 0
        offsets = [position, position + size]
        headers[-1][name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        position += size
    weight_map = {}
    for number, header in enumerate(headers, 1):
        path = folder / f"model-{number:05}-of-{len(headers):06}.safetensors"
        weight_map |= dict.fromkeys(header, path.name)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        end = max(entry["data_offsets"][1] for entry in header.values())  # type: ignore[index]
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    index = {"metadata": {"total_size": sum(size for *_, size in entries)}}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({**index, "weight_map": weight_map}, indent=2)
    )


def write_qwen3_235b(folder: Path, n_parts: int = 3) -> Path:
    """The GGUF of Qwen3-235B-A22B in Q4_K and Q6_K, split; its first part."""
    tokens = [f"tok{n}" for n in range(QWEN3_VOCAB)]
    merges = [f"to k{n}" for n in range(QWEN3_VOCAB - 500)]
    head = [_pair("general.architecture", _STRING, _string("qwen3moe"))]
    for key, number in QWEN3_235B.items():
        head.append(_pair(f"qwen3moe.{key}", _U32, struct.pack("<I", number)))
    epsilon = struct.pack("<f", 1e-6)
    kinds = [struct.pack("<i", 1)] * len(tokens)
    head += [
        _pair("qwen3moe.attention.layer_norm_rms_epsilon", _F32, epsilon),
        _pair("tokenizer.ggml.model", _STRING, _string("gpt2")),
        _pair("tokenizer.ggml.pre", _STRING, _string("qwen2")),
        _pair("tokenizer.ggml.tokens", _ARRAY, _array(_STRING, [_string(t) for t in tokens])),
        _pair("tokenizer.ggml.token_type", _ARRAY, _array(_I32, kinds)),
        _pair("tokenizer.ggml.merges", _ARRAY, _array(_STRING, [_string(m) for m in merges])),
    ]
    shapes = list(_qwen3_shapes())
    of_part = -(-len(shapes) // n_parts)
    folder.mkdir(parents=True)
    paths = [folder / f"m-{n:05}-of-{n_parts:05}.gguf" for n in range(1, n_parts + 1)]
    for number, path in enumerate(paths):
        split = [
            _pair("split.no", _U16, struct.pack("<H", number)),
            _pair("split.count", _U16, struct.pack("<H", n_parts)),
            _pair("split.tensors.count", _I32, struct.pack("<i", len(shapes))),
        ]
        own = [*(head if number == 0 else ()), *split]
        _write_part(path, own, shapes[number * of_part : (number + 1) * of_part])
    return paths[0]


def _write_part(
    path: Path, head: list[bytes], shapes: list[tuple[str, tuple[int, ...], str]]
) -> None:
    infos, position = [], 0
    for name, shape, dtype in shapes:
        kind, elements, n_bytes = _TYPES[dtype]
        lengths = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        infos.append(_string(name) + struct.pack("<I", len(shape)) + lengths)
        infos[-1] += struct.pack("<IQ", kind, position)
        position += -(-prod(shape) // elements * n_bytes // 32) * 32
    data = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(head)) + b"".join(head + infos)
    with path.open("wb") as file:
        file.write(data.ljust(-(-len(data) // 32) * 32, b"\0"))
        file.truncate(-(-len(data) // 32) * 32 + position)


def _with_scales(shapes: Shapes, is_fp8: bool) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    for name, shape in shapes:
        is_plain = "norm" in name or "embed" in name or "head" in name or "gate.weight" in name
        if name.endswith("e_score_correction_bias"):
            yield name, "F32", shape, 4 * prod(shape)
        elif is_fp8 and not is_plain and "eh_proj" not in name:
            yield name, "F8_E4M3", shape, prod(shape)
            grid = (-(-shape[0] // 128), -(-shape[1] // 128))
            yield f"{name}_scale_inv", "F32", grid, 4 * prod(grid)
        else:
            yield name, "BF16", shape, 2 * prod(shape)


def _deepseek_shapes() -> Shapes:
    hidden, width, vocab = 7168, 2048, 129_280
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(62):
        stem = f"model.layers.{layer}"
        if layer == 61:
            yield f"{stem}.embed_tokens.weight", (vocab, hidden)
            yield f"{stem}.enorm.weight", (hidden,)
            yield f"{stem}.hnorm.weight", (hidden,)
            yield f"{stem}.eh_proj.weight", (hidden, 2 * hidden)
        yield f"{stem}.self_attn.q_a_proj.weight", (1536, hidden)
        yield f"{stem}.self_attn.q_a_layernorm.weight", (1536,)
        yield f"{stem}.self_attn.q_b_proj.weight", (128 * 192, 1536)
        yield f"{stem}.self_attn.kv_a_proj_with_mqa.weight", (576, hidden)
        yield f"{stem}.self_attn.kv_a_layernorm.weight", (512,)
        yield f"{stem}.self_attn.kv_b_proj.weight", (128 * 256, 512)
        yield f"{stem}.self_attn.o_proj.weight", (hidden, 128 * 128)
        if layer < 3:
            yield from _network(f"{stem}.mlp", 18_432, hidden)
        else:
            yield f"{stem}.mlp.gate.weight", (256, hidden)
            yield f"{stem}.mlp.gate.e_score_correction_bias", (256,)
            yield from _network(f"{stem}.mlp.shared_experts", width, hidden)
            for expert in range(256):
                yield from _network(f"{stem}.mlp.experts.{expert}", width, hidden)
        yield f"{stem}.input_layernorm.weight", (hidden,)
        yield f"{stem}.post_attention_layernorm.weight", (hidden,)
        if layer == 61:
            yield f"{stem}.shared_head.norm.weight", (hidden,)
            yield f"{stem}.shared_head.head.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _network(stem: str, width: int, hidden: int) -> Shapes:
    yield f"{stem}.gate_proj.weight", (width, hidden)
    yield f"{stem}.up_proj.weight", (width, hidden)
    yield f"{stem}.down_proj.weight", (hidden, width)


def _qwen3_shapes() -> Iterator[tuple[str, tuple[int, ...], str]]:
    hidden, width, n_experts = 4096, 1536, 128
    yield "token_embd.weight", (QWEN3_VOCAB, hidden), "q4_k"
    yield "output.weight", (QWEN3_VOCAB, hidden), "q6_k"
    yield "output_norm.weight", (hidden,), "f32"
    for layer in range(94):
        better = "q6_k" if layer < 11 or layer >= 82 or layer % 3 == 0 else "q4_k"
        for name, shape, dtype in (
            ("attn_norm", (hidden,), "f32"),
            ("attn_q", (8192, hidden), "q4_k"),
            ("attn_k", (512, hidden), "q4_k"),
            ("attn_v", (512, hidden), better),
            ("attn_output", (hidden, 8192), "q4_k"),
            ("attn_q_norm", (128,), "f32"),
            ("attn_k_norm", (128,), "f32"),
            ("ffn_norm", (hidden,), "f32"),
            ("ffn_gate_inp", (n_experts, hidden), "f32"),
            ("ffn_gate_exps", (n_experts, width, hidden), "q4_k"),
            ("ffn_up_exps", (n_experts, width, hidden), "q4_k"),
            ("ffn_down_exps", (n_experts, hidden, width), better),
        ):
            yield f"blk.{layer}.{name}.weight", shape, dtype
