"""Qwen2-MoE: a gated shared expert beside the routed ones, biases on q, k and v."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

QWEN2MOE: Final = Family(
    name="qwen2moe",
    architecture="qwen2moe",
    hf_architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    names=names.COMMON
    | names.ATTENTION_BIAS
    | names.DENSE_FFN
    | names.SHARED_EXPERT
    | names.expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    is_moe=True,
    bias_key="qkv_bias",
    default_bias=True,
    has_output_bias=False,
    has_shared_expert=True,
)
