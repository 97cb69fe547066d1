"""OLMoE: RMSNorm over the whole of q and of k, optionally bounded q, k and v."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

OLMOE: Final = Family(
    name="olmoe",
    architecture="olmoe",
    hf_architecture="OlmoeForCausalLM",
    model_type="olmoe",
    names=names.COMMON
    | names.ATTENTION_BIAS
    | names.OUTPUT_BIAS
    | names.QK_NORM
    | names.expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    is_moe=True,
    qk_norm="full",
    expert_size_key="intermediate_size",
    default_rms_norm_eps=1e-5,
)
