"""Tensor names: templates with numbers taken out, and the sets that families are made of."""

from __future__ import annotations

from typing import Final

_MAX_DIGITS: Final = 7

# The canonical names are GGUF's (MODEL_TENSOR and TENSOR_NAMES in gguf-py's constants.py).
COMMON: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
}
ATTENTION_BIAS: Final = {
    "model.layers.{}.self_attn.q_proj.bias": "blk.{}.attn_q.bias",
    "model.layers.{}.self_attn.k_proj.bias": "blk.{}.attn_k.bias",
    "model.layers.{}.self_attn.v_proj.bias": "blk.{}.attn_v.bias",
}
OUTPUT_BIAS: Final = {"model.layers.{}.self_attn.o_proj.bias": "blk.{}.attn_output.bias"}
QK_NORM: Final = {
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
}
DENSE_FFN: Final = {
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}
SHARED_EXPERT: Final = {
    "model.layers.{}.mlp.shared_expert.gate_proj.weight": "blk.{}.ffn_gate_shexp.weight",
    "model.layers.{}.mlp.shared_expert.up_proj.weight": "blk.{}.ffn_up_shexp.weight",
    "model.layers.{}.mlp.shared_expert.down_proj.weight": "blk.{}.ffn_down_shexp.weight",
    "model.layers.{}.mlp.shared_expert_gate.weight": "blk.{}.ffn_gate_inp_shexp.weight",
}
ROPE_FREQS: Final = "rope_freqs.weight"
FUSED: Final = "blk.{}.ffn_gate_up_exps.weight"


def expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of router and experts below `module`: one tensor an expert, or transformers 5's stacks.

    transformers 5 holds `experts.gate_up_proj`, of shape `(n_experts, 2 * expert_size,
    hidden_size)` with the gate's rows first, and `experts.down_proj`; it writes them one by one
    unless told otherwise (conversion_mapping.py).
    """
    layer = f"model.layers.{{}}.{module}"
    return {
        f"{layer}.gate.weight": "blk.{}.ffn_gate_inp.weight",
        f"{layer}.experts.{{}}.{gate}.weight": "blk.{}.ffn_gate.{}.weight",
        f"{layer}.experts.{{}}.{up}.weight": "blk.{}.ffn_up.{}.weight",
        f"{layer}.experts.{{}}.{down}.weight": "blk.{}.ffn_down.{}.weight",
        f"{layer}.experts.gate_up_proj": FUSED,
        f"{layer}.experts.down_proj": "blk.{}.ffn_down_exps.weight",
    }


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """`name` with its whole numbers as `{}`, and those numbers.

    >>> split_name("blk.3.ffn_gate.12.weight")
    ('blk.{}.ffn_gate.{}.weight', (3, 12))
    """
    parts = name.split(".")
    numbers = []
    for i, part in enumerate(parts):
        # "007" is kept as text: two names must never mean one tensor.
        is_number = part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS
        if is_number and (part == "0" or part[0] != "0"):
            numbers.append(int(part))
            parts[i] = "{}"
    return ".".join(parts), tuple(numbers)
