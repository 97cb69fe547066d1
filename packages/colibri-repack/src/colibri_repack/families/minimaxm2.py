"""MiniMax-M2: Mixtral's names, sigmoid routing with a bias; repacked only."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

MINIMAXM2: Final = Family(
    name="minimax-m2",
    architecture="minimax-m2",
    hf_architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    names=names.COMMON
    | names.QK_NORM
    | names.ROUTER_BIAS
    | names.expert_names("block_sparse_moe", "w1", "w3", "w2")
    | names.expert_names("mlp", "w1", "w3", "w2"),
    is_moe=True,
    is_described=False,
)
