"""Tensor names: templates with numbers taken out, and the sets that families are made of."""

from __future__ import annotations

from itertools import takewhile
from typing import Final, TypeVar

_T = TypeVar("_T")
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
ATTENTION_NORMED: Final = {
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
}
SHARED_EXPERTS: Final = {
    "model.layers.{}.mlp.shared_experts.gate_proj.weight": "blk.{}.ffn_gate_shexp.weight",
    "model.layers.{}.mlp.shared_experts.up_proj.weight": "blk.{}.ffn_up_shexp.weight",
    "model.layers.{}.mlp.shared_experts.down_proj.weight": "blk.{}.ffn_down_shexp.weight",
}
ROUTER_BIAS: Final = {
    "model.layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
    "model.layers.{}.block_sparse_moe.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
}
# Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
LATENT_ATTENTION: Final = {
    "model.layers.{}.self_attn.q_a_proj.weight": "blk.{}.attn_q_a.weight",
    "model.layers.{}.self_attn.q_a_layernorm.weight": "blk.{}.attn_q_a_norm.weight",
    "model.layers.{}.self_attn.q_b_proj.weight": "blk.{}.attn_q_b.weight",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight": "blk.{}.attn_kv_a_mqa.weight",
    "model.layers.{}.self_attn.kv_a_layernorm.weight": "blk.{}.attn_kv_a_norm.weight",
    "model.layers.{}.self_attn.kv_b_proj.weight": "blk.{}.attn_kv_b.weight",
    "model.layers.{}.self_attn.q_a_proj.bias": "blk.{}.attn_q_a.bias",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa.bias": "blk.{}.attn_kv_a_mqa.bias",
}
# Layers that predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2).
NEXT_TOKENS: Final = {
    "model.layers.{}.eh_proj.weight": "blk.{}.nextn.eh_proj.weight",
    "model.layers.{}.embed_tokens.weight": "blk.{}.nextn.embed_tokens.weight",
    "model.layers.{}.enorm.weight": "blk.{}.nextn.enorm.weight",
    "model.layers.{}.hnorm.weight": "blk.{}.nextn.hnorm.weight",
    "model.layers.{}.shared_head.head.weight": "blk.{}.nextn.shared_head_head.weight",
    "model.layers.{}.shared_head.norm.weight": "blk.{}.nextn.shared_head_norm.weight",
}
# Gated DeltaNet (arXiv 2412.06464) of Qwen3-Next and Qwen3.5.
LINEAR_ATTENTION: Final = {
    "model.layers.{}.linear_attn.A_log": "blk.{}.ssm_a",
    "model.layers.{}.linear_attn.conv1d.weight": "blk.{}.ssm_conv1d.weight",
    "model.layers.{}.linear_attn.dt_bias": "blk.{}.ssm_dt.bias",
    "model.layers.{}.linear_attn.in_proj_qkvz.weight": "blk.{}.ssm_in.weight",
    "model.layers.{}.linear_attn.in_proj_ba.weight": "blk.{}.ssm_ba.weight",
    "model.layers.{}.linear_attn.in_proj_qkv.weight": "blk.{}.attn_qkv.weight",
    "model.layers.{}.linear_attn.in_proj_z.weight": "blk.{}.attn_gate.weight",
    "model.layers.{}.linear_attn.in_proj_a.weight": "blk.{}.ssm_alpha.weight",
    "model.layers.{}.linear_attn.in_proj_b.weight": "blk.{}.ssm_beta.weight",
    "model.layers.{}.linear_attn.norm.weight": "blk.{}.ssm_norm.weight",
    "model.layers.{}.linear_attn.out_proj.weight": "blk.{}.ssm_out.weight",
}
# Gemma 2 and 3 norm what goes into attention and feed-forward network and what comes out.
FOUR_NORMS: Final = {
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "blk.{}.post_ffw_norm.weight",
}
NORM_BIAS: Final = {
    "model.norm.bias": "output_norm.bias",
    "lm_head.bias": "output.bias",
    "model.layers.{}.input_layernorm.bias": "blk.{}.attn_norm.bias",
    "model.layers.{}.post_attention_layernorm.bias": "blk.{}.ffn_norm.bias",
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


# What `auto` takes tensors for. What `post_attention_layernorm` stands before cannot be told from
# the name: it is not among them.
ALL: Final = (
    {name: own for name, own in COMMON.items() if "post_attention" not in name}
    | ATTENTION_BIAS
    | OUTPUT_BIAS
    | QK_NORM
    | DENSE_FFN
    | SHARED_EXPERT
    | SHARED_EXPERTS
    | ROUTER_BIAS
    | LATENT_ATTENTION
    | NEXT_TOKENS
    | {
        "model.layers.{}.mlp.gate.weight": "blk.{}.ffn_gate_inp.weight",
        "model.layers.{}.mlp.router.weight": "blk.{}.ffn_gate_inp.weight",
        "model.layers.{}.block_sparse_moe.gate.weight": "blk.{}.ffn_gate_inp.weight",
        "model.layers.{}.block_sparse_moe.router.layer.weight": "blk.{}.ffn_gate_inp.weight",
        "model.layers.{}.block_sparse_moe.input_linear.weight": FUSED,
        "model.layers.{}.block_sparse_moe.output_linear.weight": "blk.{}.ffn_down_exps.weight",
    }
)


def take_column(left: dict[str, _T], template: str, first: int, n: int) -> list[_T]:
    """Takes what `left` has under names of `template` with the numbers `first` and 0 to `n` - 1.

    Nothing, and leaves all, unless every one is there. Nearly all tensors are experts' matrices:
    looking for names is many times as fast as taking them apart.
    """
    head, middle, tail = template.split("{}")
    head = f"{head}{first}{middle}"
    # Ends at the first that is not there, however many a description says there are.
    wanted = (f"{head}{number}{tail}" for number in range(n))
    names = list(takewhile(left.__contains__, wanted))
    return list(map(left.pop, names)) if len(names) == n else []


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """`name` with its whole numbers as `{}`, and those numbers.

    Braces of its own are doubled, as `str.format` wants them.

    >>> split_name("blk.3.ffn_gate.12.weight")
    ('blk.{}.ffn_gate.{}.weight', (3, 12))
    """
    if "{" in name or "}" in name:
        name = name.replace("{", "{{").replace("}", "}}")
    parts = name.split(".")
    numbers = []
    for i, part in enumerate(parts):
        # "007" is kept as text: two names must never mean one tensor.
        is_number = part.isdigit() and part.isascii() and len(part) <= _MAX_DIGITS
        if is_number and (part == "0" or part[0] != "0"):
            numbers.append(int(part))
            parts[i] = "{}"
    return ".".join(parts), tuple(numbers)
