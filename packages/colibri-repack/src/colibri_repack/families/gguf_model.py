"""The decoder that a GGUF file's key-values describe.

Key names: gguf-py's constants.py, class Keys; what absent ones mean: llama.cpp's
src/llama-model.cpp (`load_hparams`) and src/models.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from colibri_format import ModelSpec, MoeSpec, RopeSpec

from ..errors import SourceError
from ..sources import Source
from .family import Family
from .members import MAX_EXPERTS, MAX_LAYERS, Members

_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_SOFTMAX: Final = 1  # llama_expert_gating_func_type


def read_gguf_model(source: Source, family: Family) -> ModelSpec:
    """What `source`'s key-values say, completed by its tensors where llama.cpp does the same.

    Raises:
        SourceError: `bad-config`, `unsupported-model`, `missing-tensor` (no embedding).
    """
    config = Members(source.config, source.path, f"{family.architecture}.")
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise SourceError("missing-tensor", source.path, "has no matrix 'token_embd.weight'",
                          "the token embedding")  # fmt: skip
    hidden_size = config.count("embedding_length")
    n_heads = config.count("attention.head_count")
    head_dim = config.count("attention.key_length", default=hidden_size // n_heads)
    value_dim = config.count("attention.value_length", default=head_dim)
    if value_dim != head_dim:
        raise config.unsupported("attention.value_length", value_dim, f"key_length ({head_dim})")
    _check_arithmetic(config, head_dim)
    vocab_size = embedding.shape[0]
    tokens = Members(source.config, source.path, "tokenizer.ggml.")
    names = source.tensors
    has_dense_ffn = any(name.endswith(".ffn_gate.weight") for name in names)
    return ModelSpec(
        family=family.architecture,
        n_layers=config.count("block_count", most=MAX_LAYERS),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        context_length=config.count("context_length"),
        n_heads=n_heads,
        n_kv_heads=config.count("attention.head_count_kv", default=n_heads),
        head_dim=head_dim,
        rms_norm_eps=_decimal(config.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(config, family, head_dim),
        ffn_size=config.count("feed_forward_length") if has_dense_ffn else 0,
        attention_bias=any(name.endswith(".attn_q.bias") for name in names),
        qk_norm=family.qk_norm,
        clip_qkv=config.number("attention.clamp_kqv")
        if _is_set(config, "attention.clamp_kqv")
        else None,
        sliding_window=None,
        tie_embeddings="output.weight" not in names,
        moe=_moe(config, family) if family.is_moe else None,
        bos_token=_token(tokens, "bos_token_id", vocab_size),
        eos_tokens=_end_tokens(tokens, vocab_size),
    )


def _check_arithmetic(config: Members, head_dim: int) -> None:
    gating = config.scalar("expert_gating_func")
    if gating not in (None, 0, _SOFTMAX):
        raise config.unsupported("expert_gating_func", gating, f"{_SOFTMAX} (softmax)")
    # The rest are numbers where 0 and 1 change nothing.
    for name in ("expert_weights_scale", "residual_scale", "embedding_scale", "logit_scale"):
        if _is_set(config, name) and config.number(name) != 1:
            raise config.unsupported(name, config.raw(name), "1")
    scale = config.scalar("attention.scale")
    if isinstance(scale, float) and scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise config.unsupported("attention.scale", scale, f"1 / sqrt({head_dim})")


def _moe(config: Members, family: Family) -> MoeSpec:
    top_k = config.count("expert_used_count")
    ffn_size = config.count("feed_forward_length", default=0, least=0)
    # llama.cpp: n_ff_exp defaults to n_ff / n_expert_used for Qwen, n_ff for Llama and OLMoE.
    fallback = ffn_size
    if family.expert_size_key == "moe_intermediate_size":
        fallback = ffn_size // top_k
    shared = 0
    if family.has_shared_expert:
        shared = config.count("expert_shared_feed_forward_length", default=ffn_size)
    return MoeSpec(
        n_experts=config.count("expert_count", most=MAX_EXPERTS),
        top_k=top_k,
        expert_size=config.count("expert_feed_forward_length", default=fallback),
        norm_top_k=config.flag("expert_weights_norm", default=family.gguf_norm_top_k),
        shared_size=shared,
        is_shared_gated=shared > 0,
    )


def _rope(config: Members, family: Family, head_dim: int) -> RopeSpec:
    return RopeSpec(
        theta=_decimal(config.number("rope.freq_base", default=10_000.0)),
        n_dims=config.count("rope.dimension_count", default=head_dim),
        style=family.gguf_rope_style,
        scaling=_rope_scaling(config),
    )


def _rope_scaling(config: Members) -> dict[str, Any] | None:
    kind = config.scalar("rope.scaling.type")
    if kind is None and _is_set(config, "rope.scale_linear"):
        factor = config.number("rope.scale_linear")
        return None if factor == 1 else {"type": "linear", "factor": _decimal(factor)}
    if kind in (None, "none", ""):
        return None
    if kind == "linear":
        factor = config.number("rope.scaling.factor")
        return None if factor == 1 else {"type": "linear", "factor": _decimal(factor)}
    if kind != "yarn":
        raise config.unsupported("rope.scaling.type", kind, "none, linear or yarn")
    scaling: dict[str, Any] = {
        "type": "yarn",
        "factor": _decimal(config.number("rope.scaling.factor")),
        "original_max_position_embeddings": config.count(
            "rope.scaling.original_context_length", default=config.count("context_length")
        ),
    }
    for key, member in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if _is_set(config, f"rope.scaling.{key}"):
            scaling[member] = _decimal(config.number(f"rope.scaling.{key}"))
    if _is_set(config, "rope.scaling.attn_factor"):
        # ggml multiplies it with YaRN's own factor; config.json's attention_factor is the product.
        factor = config.number("rope.scaling.attn_factor")
        scaling["attention_factor"] = factor * (0.1 * math.log(scaling["factor"]) + 1.0)
    return scaling


def _is_set(config: Members, name: str) -> bool:
    """Whether the number is there and not 0, which GGUF writers use for "none"."""
    return config.scalar(name) not in (None, 0, 0.0)


def _decimal(value: float) -> float:
    """`value`, which went through float32, as the shortest decimal that means the same float32.

    The checkpoint said 1e-6; the float32 nearest to it is 9.99999997e-07 as a double.
    """
    return float(str(np.float32(value)))


def _token(tokens: Members, name: str, vocab_size: int) -> int | None:
    value = tokens.raw(name)
    return value if type(value) is int and 0 <= value < vocab_size else None


def _end_tokens(tokens: Members, vocab_size: int) -> tuple[int, ...]:
    found = (_token(tokens, name, vocab_size) for name in _END_KEYS)
    return tuple(dict.fromkeys(token for token in found if token is not None))
