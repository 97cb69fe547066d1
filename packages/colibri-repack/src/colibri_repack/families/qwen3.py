"""Qwen3, dense: RMSNorm over each head of q and k; the feed-forward network is one expert."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

QWEN3: Final = Family(
    name="qwen3",
    architecture="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    names=names.COMMON | names.ATTENTION_BIAS | names.OUTPUT_BIAS | names.QK_NORM | names.DENSE_FFN,
    is_moe=False,
    qk_norm="head",
    default_head_dim=128,
)
