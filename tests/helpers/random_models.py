"""Tiny checkpoints of every family, as Hugging Face saves them: config and float32 weights.

Weights come from NumPy's PCG64 alone, so that a fixture needs no more than the name of a model.
Shapes are uneven on purpose: several key/value groups, head_dim unlike hidden / heads where the
family has such a setting, expert counts no powers of two, hidden sizes no multiples of 256.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .safetensors_builder import encode

State = dict[str, NDArray[np.float32]]

_COMMON: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_QWEN3_MOE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 24,
    "intermediate_size": 144,
    "moe_intermediate_size": 40,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
}
_OLMOE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "intermediate_size": 56,
    "num_experts": 13,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "attention_bias": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
_MIXTRAL: dict[str, Any] = {
    **_COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "head_dim": 20,
    "intermediate_size": 72,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "rope_theta": 1000000.0,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 20,
    "intermediate_size": 160,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}
_QWEN3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 28,
    "intermediate_size": 136,
    "attention_bias": False,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3moe": _QWEN3_MOE,
    "qwen3moe-tied-dense-layer": {
        **_QWEN3_MOE,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2moe": {
        **_COMMON,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "intermediate_size": 152,
        "moe_intermediate_size": 44,
        "shared_expert_intermediate_size": 76,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "use_sliding_window": False,
    },
    "olmoe": _OLMOE,
    "olmoe-clip": {**_OLMOE, "clip_qkv": 0.8},
    "mixtral": _MIXTRAL,
    "mixtral-window": {**_MIXTRAL, "sliding_window": 9},
    "llama": _LLAMA,
    "llama-scaled": {
        **_LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "tie_word_embeddings": True,
    },
    "llama-linear": {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "qwen3": _QWEN3,
    "qwen2": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": 136,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "mistral": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
    "mistral-window": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 9,
    },
}


def prompt_tokens(name: str, n_tokens: int = 40) -> list[int]:
    """Tokens to feed the model: random, the same for every run."""
    rng = np.random.default_rng(zlib.crc32(f"prompt {name}".encode()))
    return [int(token) for token in rng.integers(3, CONFIGS[name]["vocab_size"], n_tokens)]


def random_state(name: str) -> State:
    """Weights by the names that checkpoints of the family have on the Hub, float32."""
    config = CONFIGS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    n_query = head_dim * config["num_attention_heads"]
    n_key = head_dim * config["num_key_value_heads"]
    state: State = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)
        state[name] = values.astype(np.float32)

    def vector(name: str, size: int, mean: float = 1.0) -> None:
        state[name] = (mean + 0.25 * rng.standard_normal(size)).astype(np.float32)

    def network(prefix: str, width: int, names: tuple[str, str, str]) -> None:
        gate, up, down = names
        matrix(f"{prefix}.{gate}.weight", width, hidden, 1.5)
        matrix(f"{prefix}.{up}.weight", width, hidden, 1.5)
        matrix(f"{prefix}.{down}.weight", hidden, width)

    plain = ("gate_proj", "up_proj", "down_proj")
    kind = config["model_type"]
    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, np.sqrt(hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        vector(f"{prefix}.input_layernorm.weight", hidden)
        for part, rows in (("q", n_query), ("k", n_key), ("v", n_key)):
            matrix(f"{prefix}.self_attn.{part}_proj.weight", rows, hidden, 1.5)
            if kind in ("qwen2", "qwen2_moe"):
                vector(f"{prefix}.self_attn.{part}_proj.bias", rows, 0.0)
        matrix(f"{prefix}.self_attn.o_proj.weight", hidden, n_query)
        if kind in ("qwen3", "qwen3_moe", "olmoe"):
            is_full = kind == "olmoe"
            vector(f"{prefix}.self_attn.q_norm.weight", n_query if is_full else head_dim)
            vector(f"{prefix}.self_attn.k_norm.weight", n_key if is_full else head_dim)
        vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        is_dense = "num_experts_per_tok" not in config or layer in config.get("mlp_only_layers", ())
        if is_dense:
            network(f"{prefix}.mlp", config["intermediate_size"], plain)
            continue
        n_experts = config.get("num_local_experts") or config["num_experts"]
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        block = "block_sparse_moe" if kind == "mixtral" else "mlp"
        matrix(f"{prefix}.{block}.gate.weight", n_experts, hidden, 2.0)
        for expert in range(n_experts):
            names = ("w1", "w3", "w2") if kind == "mixtral" else plain
            network(f"{prefix}.{block}.experts.{expert}", width, names)
        if kind == "qwen2_moe":
            shared = config["shared_expert_intermediate_size"]
            network(f"{prefix}.mlp.shared_expert", shared, plain)
            matrix(f"{prefix}.mlp.shared_expert_gate.weight", 1, hidden)
    vector("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden)
    return state


def write_checkpoint(folder: Path, name: str) -> None:
    """Saves the model as a folder that transformers and the repacker read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=1))
    (folder / "model.safetensors").write_bytes(encode(random_state(name), {"format": "pt"}))
