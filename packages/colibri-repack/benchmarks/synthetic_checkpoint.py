"""A Qwen3-MoE checkpoint of any size for benchmarks: a folder of BF16 safetensors, or a GGUF file.

Weights are noise of a plausible size; every tile differs, so that nothing can be shared or skipped.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

N_EXPERTS, HIDDEN, WIDTH, VOCAB, HEADS, HEAD_DIM = 64, 2048, 768, 8192, 8, 64
_TILE = 8 * 2**20
_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_GGML_F32, _GGML_BF16 = 0, 30


def layer_bytes() -> int:
    """BF16 bytes of one layer's experts."""
    return 3 * N_EXPERTS * HIDDEN * WIDTH * 2


def write_folder(folder: Path, n_layers: int) -> None:
    """A Hugging Face folder whose experts are two stacks a layer, as transformers 5 holds them."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": n_layers, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": WIDTH, "num_experts": N_EXPERTS, "num_experts_per_tok": 8,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(n_layers):
        stem = f"model.layers.{layer}"
        shapes |= {
            f"{stem}.input_layernorm.weight": (HIDDEN,),
            f"{stem}.post_attention_layernorm.weight": (HIDDEN,),
            f"{stem}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": (2 * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": (2 * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{stem}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{stem}.mlp.gate.weight": (N_EXPERTS, HIDDEN),
            f"{stem}.mlp.experts.gate_up_proj": (N_EXPERTS, 2 * WIDTH, HIDDEN),
            f"{stem}.mlp.experts.down_proj": (N_EXPERTS, HIDDEN, WIDTH),
        }
    header = {}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tile in _tiles(position):
            file.write(tile)


def write_gguf(path: Path, n_layers: int) -> None:
    """A GGUF file in BF16, norms and router in F32, with a vocabulary that llama.cpp takes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    tokens += [f"t{n}" for n in range(VOCAB - len(tokens))]
    types = [2, 3, 3, *[6] * 256, *[1] * (VOCAB - 259)]
    head = [_pair("general.architecture", _STRING, _string("qwen3moe"))]
    for key, number in {
        "block_count": n_layers, "context_length": 4096, "embedding_length": HIDDEN,
        "feed_forward_length": 4 * HIDDEN, "expert_feed_forward_length": WIDTH,
        "attention.head_count": HEADS, "attention.head_count_kv": 2,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM,
        "expert_count": N_EXPERTS, "expert_used_count": 8,
    }.items():  # fmt: skip
        head.append(_pair(f"qwen3moe.{key}", _U32, struct.pack("<I", number)))
    epsilon = struct.pack("<f", 1e-6)
    head += [
        _pair("qwen3moe.attention.layer_norm_rms_epsilon", _F32, epsilon),
        _pair("tokenizer.ggml.model", _STRING, _string("llama")),
        _pair("tokenizer.ggml.tokens", _ARRAY, _array(_STRING, [_string(t) for t in tokens])),
        _pair(
            "tokenizer.ggml.scores", _ARRAY, _array(_F32, [struct.pack("<f", 0.0)] * len(tokens))
        ),
        _pair(
            "tokenizer.ggml.token_type", _ARRAY, _array(5, [struct.pack("<i", t) for t in types])
        ),
    ]
    shapes: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (VOCAB, HIDDEN), _GGML_BF16),
        ("output.weight", (VOCAB, HIDDEN), _GGML_BF16),
        ("output_norm.weight", (HIDDEN,), _GGML_F32),
    ]
    for layer in range(n_layers):
        for name, shape, kind in (
            ("attn_norm", (HIDDEN,), _GGML_F32),
            ("attn_q", (HEADS * HEAD_DIM, HIDDEN), _GGML_BF16),
            ("attn_k", (2 * HEAD_DIM, HIDDEN), _GGML_BF16),
            ("attn_v", (2 * HEAD_DIM, HIDDEN), _GGML_BF16),
            ("attn_output", (HIDDEN, HEADS * HEAD_DIM), _GGML_BF16),
            ("attn_q_norm", (HEAD_DIM,), _GGML_F32),
            ("attn_k_norm", (HEAD_DIM,), _GGML_F32),
            ("ffn_norm", (HIDDEN,), _GGML_F32),
            ("ffn_gate_inp", (N_EXPERTS, HIDDEN), _GGML_F32),
            ("ffn_gate_exps", (N_EXPERTS, WIDTH, HIDDEN), _GGML_BF16),
            ("ffn_up_exps", (N_EXPERTS, WIDTH, HIDDEN), _GGML_BF16),
            ("ffn_down_exps", (N_EXPERTS, HIDDEN, WIDTH), _GGML_BF16),
        ):
            shapes.append((f"blk.{layer}.{name}.weight", shape, kind))
    infos, position = [], 0
    for name, shape, kind in shapes:
        size = int(np.prod(shape)) * (2 if kind == _GGML_BF16 else 4)
        lengths = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        infos.append(_string(name) + struct.pack("<I", len(shape)) + lengths)
        infos[-1] += struct.pack("<IQ", kind, position)
        position += -(-size // 32) * 32
    data = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(head)) + b"".join(head + infos)
    with path.open("wb") as file:
        file.write(data.ljust(-(-len(data) // 32) * 32, b"\0"))
        for tile in _tiles(position):
            file.write(tile)


def _tiles(size: int) -> Iterator[memoryview]:
    """`size` bytes that are numbers of moderate size as BF16 as well as F32."""
    noise = np.random.default_rng(1).standard_normal(_TILE // 2, np.float32) * np.float32(0.02)
    words = (noise.view(np.uint32) >> 16).astype("<u2")
    for number in range(-(-size // _TILE)):
        words[:64] = 0x3C00 + (number * 7919 + np.arange(64)) % 0x0200
        yield words.view(np.uint8)[: min(_TILE, size - number * _TILE)].data


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value
