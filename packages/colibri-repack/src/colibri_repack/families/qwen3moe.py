"""Qwen3-MoE: RMSNorm over each head of q and k, no shared expert."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

QWEN3MOE: Final = Family(
    name="qwen3moe",
    architecture="qwen3moe",
    hf_architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    names=names.COMMON
    | names.ATTENTION_BIAS
    | names.OUTPUT_BIAS
    | names.QK_NORM
    | names.DENSE_FFN
    | names.expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    is_moe=True,
    qk_norm="head",
    gguf_norm_top_k=True,
)
