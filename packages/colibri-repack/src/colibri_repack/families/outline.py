"""What little of a decoder must be known to repack it without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..sources import Source
from .members import MAX_EXPERTS, MAX_LAYERS, Members

EXPERT_COUNTS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_TOP_K: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "num_selected_experts",
    "router_top_k",
    "top_k_experts",
)


@dataclass(frozen=True, slots=True)
class Outline:
    """Counts of a decoder; `n_experts` is 0 for a dense one, or where nothing says it.

    `n_layers` includes the `n_extra` layers that predict further tokens (DeepSeek-V3 and GLM-4.5
    number them on after the others). `ties_head` is whether the head is the embedding: None where
    it is told by the tensors alone.
    """

    n_layers: int
    n_extra: int
    hidden_size: int
    n_experts: int
    top_k: int | None
    ties_head: bool | None


def read_outline(source: Source, architecture: str, default_tie: bool) -> Outline:
    """The outline that `source` gives of itself; `architecture` is the prefix of GGUF's keys.

    Raises:
        SourceError: `bad-config`.
    """
    if source.format == "gguf":
        keys = Members(source.config, source.path, f"{architecture}.")
        n_experts = keys.count("expert_count", default=0, least=0, most=MAX_EXPERTS)
        n_layers = keys.count("block_count", most=MAX_LAYERS)
        n_extra = keys.count("nextn_predict_layers", default=0, least=0)
        return Outline(
            n_layers=n_layers,
            n_extra=min(n_extra, n_layers - 1),
            hidden_size=keys.count("embedding_length"),
            n_experts=n_experts,
            top_k=keys.count("expert_used_count") if n_experts else 1,
            ties_head=None,
        )
    config = Members(text_config(source), source.path)
    n_experts = config.count(*EXPERT_COUNTS, default=0, least=0, most=MAX_EXPERTS)
    n_layers = config.count("num_hidden_layers", "n_layer", "num_layers", most=MAX_LAYERS)
    top_k: int | None = 1
    if n_experts:
        top_k = config.count(*_TOP_K, default=0, least=0) or None
    n_extra = config.count("num_nextn_predict_layers", default=0, least=0, most=64)
    return Outline(
        n_layers=n_layers + n_extra,
        n_extra=n_extra,
        hidden_size=config.count("hidden_size", "n_embd", "d_model"),
        n_experts=n_experts,
        top_k=top_k,
        ties_head=config.flag("tie_word_embeddings", default=default_tie),
    )


def text_config(source: Source) -> Mapping[str, object]:
    """The description of the text model, which multimodal checkpoints keep in a section."""
    config = source.config
    section = config.get("text_config")
    if isinstance(section, dict) and "hidden_size" not in config:
        outer = {k: v for k, v in config.items() if k in ("tie_word_embeddings",)}
        return {**outer, **section}
    return config
