"""The random models of `random_models` as GGUF files, experts stacked, F32."""

from __future__ import annotations

import re

import numpy as np

from helpers.gguf_builder import F32, STRING, U32, GgufBuilder
from helpers.random_models import CONFIGS, State, random_state

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "olmoe": "olmoe",
                 "mixtral": "llama", "llama": "llama", "qwen3": "qwen3", "qwen2": "qwen2",
                 "mistral": "llama"}  # fmt: skip
_PARTS = (
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.q_proj.", ".attn_q."),
    (".self_attn.k_proj.", ".attn_k."),
    (".self_attn.v_proj.", ".attn_v."),
    (".self_attn.o_proj.", ".attn_output."),
    (".self_attn.q_norm.", ".attn_q_norm."),
    (".self_attn.k_norm.", ".attn_k_norm."),
    (".mlp.shared_expert_gate.", ".ffn_gate_inp_shexp."),
    (".mlp.shared_expert.gate_proj.", ".ffn_gate_shexp."),
    (".mlp.shared_expert.up_proj.", ".ffn_up_shexp."),
    (".mlp.shared_expert.down_proj.", ".ffn_down_shexp."),
    (".mlp.gate.", ".ffn_gate_inp."),
    (".block_sparse_moe.gate.", ".ffn_gate_inp."),
    (".mlp.gate_proj.", ".ffn_gate."),
    (".mlp.up_proj.", ".ffn_up."),
    (".mlp.down_proj.", ".ffn_down."),
)
_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down",
             "w1": "gate", "w3": "up", "w2": "down"}  # fmt: skip
_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight"
)


def canonical_state(name: str) -> State:
    """The model's tensors by GGUF names, experts as `blk.N.ffn_{gate,up,down}.E.weight`."""
    state: State = {}
    for old, tensor in random_state(name).items():
        if match := _EXPERT.fullmatch(old):
            state[f"blk.{match[1]}.ffn_{_MATRICES[match[3]]}.{match[2]}.weight"] = tensor
            continue
        new = old
        for a, b in _PARTS:
            new = new.replace(a, b)
        state[new] = tensor
    return state


def stacked_state(name: str) -> State:
    """As `canonical_state`, experts as stacks `blk.N.ffn_{gate,up,down}_exps.weight`."""
    state: State = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for key, tensor in canonical_state(name).items():
        if match := re.fullmatch(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight", key):
            stacks.setdefault(f"{match[1]}_exps.weight", []).append(tensor)
        else:
            state[key] = tensor
    return state | {key: np.stack(tensors) for key, tensors in stacks.items()}


def describe(builder: GgufBuilder, name: str) -> GgufBuilder:
    """Adds the model's key-values."""
    config = CONFIGS[name]
    arch = ARCHITECTURES[config["model_type"]]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    builder.add("general.architecture", STRING, arch)
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    for key, number in numbers.items():
        if number is not None:
            builder.add(f"{arch}.{key}", U32, number)
    builder.add(f"{arch}.attention.layer_norm_rms_epsilon", F32, config["rms_norm_eps"])
    builder.add(f"{arch}.rope.freq_base", F32, config["rope_theta"])
    builder.add("tokenizer.ggml.bos_token_id", U32, 1)
    builder.add("tokenizer.ggml.eos_token_id", U32, 2)
    builder.add("tokenizer.ggml.eot_token_id", U32, 5)
    return builder


def gguf_model(name: str, state: State | None = None) -> GgufBuilder:
    """The whole model as a GGUF builder; `state` replaces its tensors."""
    builder = describe(GgufBuilder(), name)
    for key, tensor in (stacked_state(name) if state is None else state).items():
        builder.tensor(key, tensor.shape, 0, tensor.tobytes())
    return builder
