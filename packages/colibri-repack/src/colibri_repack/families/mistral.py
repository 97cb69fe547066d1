"""Mistral, dense: Llama with a sliding window. GGUF files of it say `llama`."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

MISTRAL: Final = Family(
    name="mistral",
    architecture="llama",
    hf_architecture="MistralForCausalLM",
    model_type="mistral",
    names=names.COMMON | names.DENSE_FFN,
    is_moe=False,
    gguf_rope_style="interleaved",
    has_output_bias=False,
    default_sliding_window=4096,
)
