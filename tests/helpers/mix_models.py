"""Random models that llama.cpp's mixes treat differently: wide enough for K-quants, many layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .gguf_builder import STRING, GgufBuilder
from .gguf_models import gguf_model
from .random_models import CONFIGS

_WIDE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": 256,
}

MIX_MODELS: dict[str, dict[str, Any]] = {
    "dense": {**CONFIGS["llama"], **_WIDE, "num_hidden_layers": 11},
    "dense tied": {**CONFIGS["qwen3"], **_WIDE, "num_hidden_layers": 17},
    "narrow": {**CONFIGS["llama"], "num_hidden_layers": 8, "vocab_size": 32},
    "eight experts": {
        **CONFIGS["mixtral"], **_WIDE, "num_hidden_layers": 9, "num_local_experts": 8,
    },
    "shared expert": {
        **CONFIGS["qwen2moe"], **_WIDE, "num_hidden_layers": 8, "num_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 96,
    },
}  # fmt: skip


@contextmanager
def mix_model(name: str) -> Iterator[GgufBuilder]:
    """The model as a GGUF builder, float32; its vocabulary is none."""
    CONFIGS[name] = MIX_MODELS[name]
    try:
        yield gguf_model(name).add("tokenizer.ggml.model", STRING, "no_vocab")
    finally:
        del CONFIGS[name]
