"""Llama, dense: each layer's feed-forward network is its single expert."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

LLAMA: Final = Family(
    name="llama",
    architecture="llama",
    hf_architecture="LlamaForCausalLM",
    model_type="llama",
    names=names.COMMON | names.ATTENTION_BIAS | names.OUTPUT_BIAS | names.DENSE_FFN,
    is_moe=False,
    gguf_rope_style="interleaved",
)
