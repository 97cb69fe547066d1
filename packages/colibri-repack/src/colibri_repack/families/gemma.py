"""Gemma, Gemma 2 and Gemma 3, dense: GELU, norms of 1 + w, scaled embeddings; repacked only."""

from __future__ import annotations

from typing import Final

from . import names
from .family import Family

_NAMES: Final = names.COMMON | names.QK_NORM | names.DENSE_FFN

GEMMA: Final = Family(
    name="gemma",
    architecture="gemma",
    hf_architecture="GemmaForCausalLM",
    model_type="gemma",
    names=_NAMES,
    is_moe=False,
    is_described=False,
    default_tie=True,
)
GEMMA2: Final = Family(
    name="gemma2",
    architecture="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    names=_NAMES | names.FOUR_NORMS,
    is_moe=False,
    is_described=False,
    default_tie=True,
)
GEMMA3: Final = Family(
    name="gemma3",
    architecture="gemma3",
    hf_architecture="Gemma3ForCausalLM",
    hf_aliases=("Gemma3ForConditionalGeneration",),
    model_type="gemma3_text",
    model_type_aliases=("gemma3",),
    names=_NAMES | names.FOUR_NORMS,
    is_moe=False,
    is_described=False,
    default_tie=True,
    prefixes={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    left_out=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
