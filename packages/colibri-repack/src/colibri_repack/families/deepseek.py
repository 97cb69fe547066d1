"""DeepSeek-V2 and V3 (R1, Kimi-K2): latent attention, dense first layers; repacked only."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

DEEPSEEK2: Final = Family(
    name="deepseek2",
    architecture="deepseek2",
    hf_architecture="DeepseekV3ForCausalLM",
    hf_aliases=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v3",
    model_type_aliases=("deepseek_v2", "kimi_k2"),
    names=names.COMMON
    | names.LATENT_ATTENTION
    | names.DENSE_FFN
    | names.SHARED_EXPERTS
    | names.ROUTER_BIAS
    | names.NEXT_TOKENS
    | names.expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    is_moe=True,
    is_described=False,
)
