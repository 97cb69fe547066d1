"""gpt-oss: experts in MXFP4 with biases, gate and up row by row in turn; repacked only.

Checkpoints in BF16 hold the same stacks transposed, `(n_experts, inputs, outputs)` (transformers'
GptOssExperts).
"""

from __future__ import annotations

from typing import Final

from . import names
from .expert_parts import Fused
from .family import Family

_EXPERTS: Final = "model.layers.{}.mlp.experts"

GPTOSS: Final = Family(
    name="gpt-oss",
    architecture="gpt-oss",
    hf_architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    names=names.COMMON
    | names.ATTENTION_NORMED
    | names.ATTENTION_BIAS
    | names.OUTPUT_BIAS
    | {
        "model.layers.{}.self_attn.sinks": "blk.{}.attn_sinks.weight",
        "model.layers.{}.mlp.router.weight": "blk.{}.ffn_gate_inp.weight",
        "model.layers.{}.mlp.router.bias": "blk.{}.ffn_gate_inp.bias",
        f"{_EXPERTS}.gate_up_proj": "blk.{}.ffn_gate_up_exps.weight",
        f"{_EXPERTS}.gate_up_proj_blocks": "blk.{}.ffn_gate_up_exps.blocks",
        f"{_EXPERTS}.gate_up_proj_scales": "blk.{}.ffn_gate_up_exps.scales",
        f"{_EXPERTS}.gate_up_proj_bias": "blk.{}.ffn_gate_up_exps.bias",
        f"{_EXPERTS}.down_proj": "blk.{}.ffn_down_exps.weight",
        f"{_EXPERTS}.down_proj_blocks": "blk.{}.ffn_down_exps.blocks",
        f"{_EXPERTS}.down_proj_scales": "blk.{}.ffn_down_exps.scales",
        f"{_EXPERTS}.down_proj_bias": "blk.{}.ffn_down_exps.bias",
    },
    is_moe=True,
    is_described=False,
    fused=Fused.IN_TURN,
    is_turned=True,
    packings=frozenset({"mxfp4"}),
)
