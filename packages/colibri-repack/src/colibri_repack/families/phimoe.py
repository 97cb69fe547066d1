"""Phi-3.5-MoE: Mixtral's names, LayerNorm with biases, SparseMixer routing; repacked only."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

PHIMOE: Final = Family(
    name="phimoe",
    architecture="phimoe",
    hf_architecture="PhimoeForCausalLM",
    hf_aliases=("PhiMoEForCausalLM",),
    model_type="phimoe",
    names=names.COMMON
    | names.ATTENTION_BIAS
    | names.OUTPUT_BIAS
    | names.NORM_BIAS
    | names.expert_names("block_sparse_moe", "w1", "w3", "w2")
    | names.expert_names("mlp", "w1", "w3", "w2"),
    is_moe=True,
    is_described=False,
)
