"""The decoder that `config.json` describes.

Member names and defaults are those of transformers 5.24's configuration classes
(src/transformers/models/*/configuration_*.py), older spellings included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from colibri_format import ModelSpec, MoeSpec, RopeSpec

from ..sources import Source
from .family import Family
from .members import MAX_EXPERTS, MAX_LAYERS, Members
from .outline import EXPERT_COUNTS

GENERATION_CONFIG: Final = "generation_config.json"
# What each kind of scaling cannot do without (modeling_rope_utils.py, the validating functions).
_ROPE_NUMBERS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def read_hf_model(source: Source, family: Family) -> ModelSpec:
    """What `source`'s configuration says; ties of the embeddings as it claims them.

    Raises:
        SourceError: `bad-config` for a member that is missing or senseless, `unsupported-model`
            for one that asks for what engines of this format do not compute.
    """
    config = Members(source.config, source.path)
    activation = config.raw("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise config.unsupported("hidden_act", activation, "silu")
    n_layers = config.count("num_hidden_layers", most=MAX_LAYERS)
    hidden_size = config.count("hidden_size")
    n_heads = config.count("num_attention_heads")
    head_dim = config.count("head_dim", default=family.default_head_dim or hidden_size // n_heads)
    context_length = config.count("max_position_embeddings")
    dense_layers = hf_dense_layers(config, family, n_layers)
    is_all_moe = family.is_moe and not dense_layers
    return ModelSpec(
        family=family.architecture,
        n_layers=n_layers,
        hidden_size=hidden_size,
        vocab_size=config.count("vocab_size"),
        context_length=context_length,
        n_heads=n_heads,
        n_kv_heads=config.count("num_key_value_heads", default=n_heads),
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", default=family.default_rms_norm_eps),
        rope=_rope(config, family, head_dim, context_length),
        ffn_size=0 if is_all_moe else config.count("intermediate_size"),
        attention_bias=config.flag(family.bias_key, default=family.default_bias),
        qk_norm=family.qk_norm,
        clip_qkv=config.number("clip_qkv") if config.has("clip_qkv") else None,
        sliding_window=_sliding_window(config, family, n_layers, context_length),
        tie_embeddings=config.flag("tie_word_embeddings", default=False),
        moe=_moe(config, family) if family.is_moe else None,
        bos_token=_first(_tokens(config, "bos_token_id")),
        eos_tokens=_eos_tokens(source.config, config),
    )


def hf_dense_layers(config: Members, family: Family, n_layers: int) -> frozenset[int]:
    """The layers of an MoE model that have one plain feed-forward network.

    As `Qwen3MoeDecoderLayer` chooses: listed in `mlp_only_layers`, or not every
    `decoder_sparse_step`-th counting from 1.
    """
    if not family.is_moe:
        return frozenset()
    step = config.count("decoder_sparse_step", default=1)
    listed = set(config.counts("mlp_only_layers"))
    return frozenset(i for i in range(n_layers) if i in listed or (i + 1) % step)


def _moe(config: Members, family: Family) -> MoeSpec:
    shared = 0
    if family.has_shared_expert:
        shared = config.count("shared_expert_intermediate_size")
    return MoeSpec(
        n_experts=config.count(*EXPERT_COUNTS, most=MAX_EXPERTS),
        top_k=config.count("num_experts_per_tok"),
        expert_size=config.count(family.expert_size_key),
        norm_top_k=family.is_top_k_always_normalised
        or config.flag("norm_topk_prob", default=False),
        shared_size=shared,
        is_shared_gated=shared > 0,
    )


def _rope(config: Members, family: Family, head_dim: int, context_length: int) -> RopeSpec:
    # transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling.
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    found = config.raw(name)
    if found is not None and not isinstance(found, dict):
        raise config.bad(name, found, "an object")
    values: dict[str, Any] = dict(found or {})
    if any(isinstance(value, dict) for value in values.values()):
        raise config.unsupported(name, values, "one set of rope parameters for all layers")
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    theta = values.pop("rope_theta", None)
    partial = values.pop("partial_rotary_factor", None)
    overlay = Members({"rope_theta": theta, "partial_rotary_factor": partial}, config.where)
    n_dims = head_dim
    if partial is not None or config.has("partial_rotary_factor"):
        share = (overlay if partial is not None else config).number("partial_rotary_factor")
        n_dims = int(head_dim * share)
    if theta is None:
        overlay = config
    if not isinstance(kind, str) or kind not in _ROPE_NUMBERS:
        raise config.unsupported(f"{name}.rope_type", kind, f"one of {', '.join(_ROPE_NUMBERS)}")
    scaling: dict[str, Any] | None = None
    if kind != "default":
        numbers = {k: v for k, v in values.items() if v is not None}
        if kind in ("llama3", "yarn", "longrope", "dynamic"):
            original = config.raw("original_max_position_embeddings") or context_length
            numbers.setdefault("original_max_position_embeddings", original)
        checked = Members({f"{name}.{k}": v for k, v in numbers.items()}, config.where, f"{name}.")
        for member in _ROPE_NUMBERS[kind]:
            checked.number(member)
        scaling = {"type": kind, **numbers}
    return RopeSpec(
        theta=overlay.number("rope_theta", default=family.default_rope_theta),
        n_dims=n_dims,
        style="half",
        scaling=scaling,
    )


def _sliding_window(
    config: Members, family: Family, n_layers: int, context_length: int
) -> int | None:
    is_switched = family.model_type.startswith("qwen")
    if is_switched and not config.flag("use_sliding_window", default=False):
        return None
    if family.model_type not in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral", "mistral"):
        return None
    default = 0 if config.is_said("sliding_window") else family.default_sliding_window
    window = config.count("sliding_window", default=default, least=0)
    if not window or window >= context_length:
        return None
    # Qwen3-MoE, Mixtral and Mistral have the window in every layer, the others where layer_types
    # says so.
    kinds = config.raw("layer_types")
    if family.model_type in ("qwen2", "qwen2_moe", "qwen3"):
        if not isinstance(kinds, list) or len(kinds) != n_layers:
            first = config.count("max_window_layers", default=28, least=0)
            kinds = ["full_attention" if i < first else "sliding_attention"
                     for i in range(n_layers)]  # fmt: skip
        if "sliding_attention" not in kinds:
            return None
        if any(kind != "sliding_attention" for kind in kinds):
            raise config.unsupported("sliding_window", f"{window} in some layers only",
                                     "the same attention in every layer")  # fmt: skip
    return window


def _tokens(config: Members, name: str) -> tuple[int, ...]:
    """Token ids of a member that is null, a number or an array; negative ones mean none."""
    value = config.raw(name)
    items: list[object] = value if isinstance(value, list) else [value]
    if value is not None and not all(type(item) is int for item in items):
        raise config.bad(name, value, "a token id or an array of them")
    return tuple(dict.fromkeys(item for item in items if isinstance(item, int) and item >= 0))


def _eos_tokens(record: Mapping[str, object], config: Members) -> tuple[int, ...]:
    generation = record.get(GENERATION_CONFIG)
    if isinstance(generation, dict):
        tokens = _tokens(Members(generation, config.where), "eos_token_id")
        if tokens:
            return tokens
    return _tokens(config, "eos_token_id")


def _first(tokens: tuple[int, ...]) -> int | None:
    return tokens[0] if tokens else None
