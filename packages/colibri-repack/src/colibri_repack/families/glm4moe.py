"""GLM-4.5-MoE: sigmoid routing with a bias, dense first layers; repacked only."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

GLM4MOE: Final = Family(
    name="glm4moe",
    architecture="glm4moe",
    hf_architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    names=names.COMMON
    | names.ATTENTION_NORMED
    | names.ATTENTION_BIAS
    | names.OUTPUT_BIAS
    | names.QK_NORM
    | names.DENSE_FFN
    | names.SHARED_EXPERTS
    | names.ROUTER_BIAS
    | names.NEXT_TOKENS
    | names.expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    is_moe=True,
    is_described=False,
)
