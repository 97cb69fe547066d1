"""Qwen2 and Qwen2.5, dense: biases on q, k and v and none on the output."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

QWEN2: Final = Family(
    name="qwen2",
    architecture="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    names=names.COMMON | names.ATTENTION_BIAS | names.DENSE_FFN,
    is_moe=False,
    bias_key="qkv_bias",
    default_bias=True,
    has_output_bias=False,
)
