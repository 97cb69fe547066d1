"""Streams large synthetic models to disk: real bytes, seeded, never a whole tensor in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from helpers import gguf_builder as g

TILE = 8 * 2**20
_F16, _F32 = 1, 0


def _tiles(size: int, seed: int, kind: str) -> Iterator[memoryview]:
    """`size` bytes of finite numbers; each tile is the same noise with a stamp of its own."""
    if not size:
        return
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(TILE // 2, np.float32) * np.float32(0.02)
    if kind == "f16":
        tile = noise.astype("<f2").view(np.uint8)
    elif kind in ("u8", "f8_e4m3"):
        # No code of these is NaN in FP8, nor far from 1 as a scale of MXFP4.
        tile = rng.integers(96, 120, TILE, np.uint8)
    elif kind == "f32":
        tile = noise[: TILE // 4].view(np.uint8)
    else:
        tile = (noise.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    stamp = tile[:128].view("<u2")
    for number in range(-(-size // TILE)):
        # Positive numbers of moderate size in either encoding, different in every tile.
        stamp[:] = 0x3C00 + (number * 7919 + np.arange(64)) % 0x0200
        if kind == "f8_e4m3":
            stamp &= 0x3D3D  # 0x7F is NaN
        yield tile[: min(TILE, size - number * TILE)].data


def write_gguf(path: Path, *, n_layers: int, n_experts: int, hidden: int, width: int) -> None:
    """A Qwen3-MoE GGUF in F16 whose experts stand in three stacks a layer."""
    heads, head_dim, vocab = 8, 64, 1000
    builder = g.GgufBuilder()
    builder.add("general.architecture", g.STRING, "qwen3moe")
    for key, number in {
        "block_count": n_layers,
        "context_length": 4096,
        "embedding_length": hidden,
        "feed_forward_length": 4 * hidden,
        "expert_feed_forward_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": heads // 4,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "expert_count": n_experts,
        "expert_used_count": 8,
    }.items():
        builder.add(f"qwen3moe.{key}", g.U32, number)
    builder.add("qwen3moe.attention.layer_norm_rms_epsilon", g.F32, 1e-6)
    builder.add("tokenizer.ggml.tokens", g.ARRAY, (g.STRING, [f"token{n}" for n in range(vocab)]))
    rows: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (vocab, hidden), _F16),
        ("output_norm.weight", (hidden,), _F32),
    ]
    for layer in range(n_layers):
        for name, shape, kind in (
            ("attn_norm", (hidden,), _F32),
            ("attn_q", (heads * head_dim, hidden), _F16),
            ("attn_k", (heads // 4 * head_dim, hidden), _F16),
            ("attn_v", (heads // 4 * head_dim, hidden), _F16),
            ("attn_q_norm", (head_dim,), _F32),
            ("attn_k_norm", (head_dim,), _F32),
            ("attn_output", (hidden, heads * head_dim), _F16),
            ("ffn_norm", (hidden,), _F32),
            ("ffn_gate_inp", (n_experts, hidden), _F32),
            ("ffn_gate_exps", (n_experts, width, hidden), _F16),
            ("ffn_up_exps", (n_experts, width, hidden), _F16),
            ("ffn_down_exps", (n_experts, hidden, width), _F16),
        ):
            rows.append((f"blk.{layer}.{name}.weight", shape, kind))
    position = 0
    sizes = []
    for name, shape, kind in rows:
        size = int(np.prod(shape)) * (2 if kind == _F16 else 4)
        builder.tensor(name, shape, kind, b"", offset=position)
        sizes.append(size)
        position += -(-size // 32) * 32
    with path.open("wb") as file:
        head = builder.head()
        file.write(head.ljust(-(-len(head) // 32) * 32, b"\0"))
        for number, size in enumerate(sizes):
            for tile in _tiles(size, number, "f16"):
                file.write(tile)
            file.write(bytes(-size % 32))


def write_bf16_folder(folder: Path, *, n_layers: int, n_experts: int, hidden: int, width: int,
                      vocab: int) -> None:  # fmt: skip
    """A Qwen3-MoE folder in BF16 whose experts are stacks as transformers 5 holds them."""
    config, entries = _qwen3moe(n_layers, n_experts, hidden, width, vocab)
    _write_folder(folder, config, entries)


def write_fp8_folder(folder: Path, *, n_layers: int, n_experts: int, hidden: int, width: int,
                     vocab: int) -> None:  # fmt: skip
    """The same with experts in FP8, one float32 scale a block of 128 x 128."""
    config, entries = _qwen3moe(n_layers, n_experts, hidden, width, vocab)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for name, (_, shape) in list(entries.items()):
        if ".experts." in name:
            entries[name] = ("F8_E4M3", shape)
            grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
            entries[f"{name}_scale_inv"] = ("F32", grid)
    _write_folder(folder, config, entries)


def write_gpt_oss_folder(folder: Path, *, n_layers: int, n_experts: int, hidden: int, width: int,
                         vocab: int, is_mxfp4: bool) -> None:  # fmt: skip
    """A gpt-oss folder: experts in MXFP4, or in BF16 as transposed stacks."""
    heads, head_dim = 8, 64
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": vocab,
        "hidden_size": hidden, "num_hidden_layers": n_layers, "tie_word_embeddings": False,
        "num_local_experts": n_experts, "num_experts_per_tok": 4,
    }  # fmt: skip
    entries: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (vocab, hidden)),
        "lm_head.weight": ("BF16", (vocab, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
    }
    if is_mxfp4:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    for layer in range(n_layers):
        stem = f"model.layers.{layer}"
        sizes = {"q": heads * head_dim, "k": 2 * head_dim, "v": 2 * head_dim}
        for name, rows in sizes.items():
            entries[f"{stem}.self_attn.{name}_proj.weight"] = ("BF16", (rows, hidden))
            entries[f"{stem}.self_attn.{name}_proj.bias"] = ("BF16", (rows,))
        entries |= {
            f"{stem}.input_layernorm.weight": ("BF16", (hidden,)),
            f"{stem}.post_attention_layernorm.weight": ("BF16", (hidden,)),
            f"{stem}.self_attn.o_proj.weight": ("BF16", (hidden, heads * head_dim)),
            f"{stem}.self_attn.o_proj.bias": ("BF16", (hidden,)),
            f"{stem}.self_attn.sinks": ("BF16", (heads,)),
            f"{stem}.mlp.router.weight": ("BF16", (n_experts, hidden)),
            f"{stem}.mlp.router.bias": ("BF16", (n_experts,)),
        }
        for name, rows, columns in (
            ("gate_up_proj", 2 * width, hidden),
            ("down_proj", hidden, width),
        ):
            place = f"{stem}.mlp.experts.{name}"
            entries[f"{place}_bias"] = ("BF16", (n_experts, rows))
            if is_mxfp4:
                entries[f"{place}_blocks"] = ("U8", (n_experts, rows, columns // 32, 16))
                entries[f"{place}_scales"] = ("U8", (n_experts, rows, columns // 32))
            else:
                entries[place] = ("BF16", (n_experts, columns, rows))
    _write_folder(folder, config, entries)


def _qwen3moe(
    n_layers: int, n_experts: int, hidden: int, width: int, vocab: int
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    heads, head_dim = 8, 64
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": n_layers, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "moe_intermediate_size": width, "num_experts": n_experts, "num_experts_per_tok": 8,
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": head_dim,
        "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(n_layers):
        stem = f"model.layers.{layer}"
        shapes |= {
            f"{stem}.input_layernorm.weight": (hidden,),
            f"{stem}.post_attention_layernorm.weight": (hidden,),
            f"{stem}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{stem}.self_attn.k_proj.weight": (2 * head_dim, hidden),
            f"{stem}.self_attn.v_proj.weight": (2 * head_dim, hidden),
            f"{stem}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{stem}.self_attn.q_norm.weight": (head_dim,),
            f"{stem}.self_attn.k_norm.weight": (head_dim,),
            f"{stem}.mlp.gate.weight": (n_experts, hidden),
            f"{stem}.mlp.experts.gate_up_proj": (n_experts, 2 * width, hidden),
            f"{stem}.mlp.experts.down_proj": (n_experts, hidden, width),
        }
    return config, {name: ("BF16", shape) for name, shape in shapes.items()}


_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}


def _write_folder(
    folder: Path, config: dict[str, Any], entries: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, (kind, shape) in entries.items():
        end = position + _ITEM_BYTES[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, entry in enumerate(header.values()):
            start, end = entry["data_offsets"]
            for tile in _tiles(end - start, number, entry["dtype"].lower()):
                file.write(tile)
