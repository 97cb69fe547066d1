"""Granite-MoE: gate and up fused in `input_linear`; scaled residuals; repacked only."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

_MOE: Final = "model.layers.{}.block_sparse_moe"

GRANITEMOE: Final = Family(
    name="granitemoe",
    architecture="granitemoe",
    hf_architecture="GraniteMoeForCausalLM",
    hf_aliases=("GraniteMoeSharedForCausalLM",),
    model_type="granitemoe",
    model_type_aliases=("granitemoeshared",),
    names=names.COMMON
    | names.ATTENTION_BIAS
    | names.OUTPUT_BIAS
    | {
        f"{_MOE}.router.layer.weight": "blk.{}.ffn_gate_inp.weight",
        f"{_MOE}.input_linear.weight": names.FUSED,
        f"{_MOE}.output_linear.weight": "blk.{}.ffn_down_exps.weight",
        "model.layers.{}.shared_mlp.input_linear.weight": "blk.{}.ffn_gate_up_shexp.weight",
        "model.layers.{}.shared_mlp.output_linear.weight": "blk.{}.ffn_down_shexp.weight",
    },
    is_moe=True,
    is_described=False,
)
