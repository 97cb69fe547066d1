"""Mixtral: Llama's attention, experts w1 (gate), w3 (up) and w2 (down), weights renormalised.

GGUF files of it say `llama` with an `expert_count`.
"""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

MIXTRAL: Final = Family(
    name="mixtral",
    architecture="llama",
    hf_architecture="MixtralForCausalLM",
    model_type="mixtral",
    names=names.COMMON
    | names.expert_names("block_sparse_moe", "w1", "w3", "w2")
    | names.expert_names("mlp", "w1", "w3", "w2"),
    is_moe=True,
    gguf_rope_style="interleaved",
    gguf_norm_top_k=True,
    is_top_k_always_normalised=True,
    has_output_bias=False,
    expert_size_key="intermediate_size",
    default_rope_theta=1_000_000.0,
    default_rms_norm_eps=1e-5,
)
