"""Which family a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import SourceError
from ..sources import Source
from .family import Family
from .llama import LLAMA
from .mixtral import MIXTRAL
from .olmoe import OLMOE
from .qwen2moe import QWEN2MOE
from .qwen3 import QWEN3
from .qwen3moe import QWEN3MOE

FAMILIES: Final = (QWEN3MOE, QWEN2MOE, OLMOE, MIXTRAL, LLAMA, QWEN3)


def find_family(source: Source) -> Family:
    """The family that `source` names as its own.

    Raises:
        SourceError: `unknown-family` listing what is supported.
    """
    return _of_gguf(source) if source.format == "gguf" else _of_config(source)


def _of_gguf(source: Source) -> Family:
    architecture = source.config.get("general.architecture")
    experts = source.config.get(f"{architecture}.expert_count", 0)
    is_moe = isinstance(experts, int) and experts > 0
    for family in FAMILIES:
        if family.architecture == architecture and family.is_moe == is_moe:
            return family
    kind = "with experts" if is_moe else "without experts"
    listed = sorted({f"{f.architecture} ({'MoE' if f.is_moe else 'dense'})" for f in FAMILIES})
    raise SourceError(
        "unknown-family",
        source.path,
        f"general.architecture is {str(architecture)[:60]!r}, {kind}",
        f"one of {', '.join(listed)}",
    )


def _of_config(source: Source) -> Family:
    config: Mapping[str, object] = source.config
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    for family in FAMILIES:
        if family.hf_architecture in architectures:
            return family
    model_type = config.get("model_type")
    if not architectures:
        for family in FAMILIES:
            if family.model_type == model_type:
                return family
    raise SourceError(
        "unknown-family",
        source.path,
        f"config.json has architectures {str(named)[:80]} and model_type {str(model_type)[:60]!r}",
        f"one of {', '.join(f.hf_architecture for f in FAMILIES)}",
    )
