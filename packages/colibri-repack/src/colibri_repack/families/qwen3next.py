"""Qwen3-Next and Qwen3.5-MoE: three of four layers have linear attention; repacked only."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

_NAMES: Final = (
    names.COMMON
    | names.ATTENTION_NORMED
    | names.QK_NORM
    | names.LINEAR_ATTENTION
    | names.SHARED_EXPERT
    | names.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
)

QWEN3NEXT: Final = Family(
    name="qwen3next",
    architecture="qwen3next",
    hf_architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    names=_NAMES | names.DENSE_FFN,
    is_moe=True,
    is_described=False,
    has_fused_gguf=True,
    left_out=("mtp.",),
)
QWEN35MOE: Final = Family(
    name="qwen35moe",
    architecture="qwen35moe",
    hf_architecture="Qwen3_5MoeForConditionalGeneration",
    hf_aliases=("Qwen3_5MoeForCausalLM",),
    model_type="qwen3_5_moe",
    model_type_aliases=("qwen3_5_moe_text",),
    names=_NAMES,
    is_moe=True,
    is_described=False,
    has_fused_gguf=True,
    prefixes={"model.language_model.": "model."},
    left_out=("mtp.", "model.visual."),
)
