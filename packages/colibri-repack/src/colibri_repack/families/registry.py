"""Which family a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import SourceError
from ..sources import Source
from .deepseek import DEEPSEEK2
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3
from .glm4moe import GLM4MOE
from .gptoss import GPTOSS
from .granitemoe import GRANITEMOE
from .llama import LLAMA
from .minimaxm2 import MINIMAXM2
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmoe import OLMOE
from .phimoe import PHIMOE
from .qwen2 import QWEN2
from .qwen2moe import QWEN2MOE
from .qwen3 import QWEN3
from .qwen3moe import QWEN3MOE
from .qwen3next import QWEN3NEXT, QWEN35MOE

# Where two read GGUF files of one architecture the first one does: Llama before Mistral.
FAMILIES: Final = (
    QWEN3MOE,
    QWEN2MOE,
    OLMOE,
    MIXTRAL,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    DEEPSEEK2,
    GLM4MOE,
    GPTOSS,
    GRANITEMOE,
    PHIMOE,
    MINIMAXM2,
    QWEN3NEXT,
    QWEN35MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
)
AUTO: Final = "auto"
_LONGEST: Final = 60
_REMEDY: Final = "--family auto repacks experts that names and shapes tell, for no engine here yet"


def choose_family(source: Source, name: str | None) -> tuple[Family, bool]:
    """The family called `name`, or the one that `source` says; and whether names are guessed.

    With `auto` a family that is not known becomes one of its own without a table.

    Raises:
        SourceError: `unknown-family`.
    """
    if name is None:
        return find_family(source), False
    if name != AUTO:
        for family in FAMILIES:
            if family.name == name:
                return family, False
        listed = ", ".join(family.name for family in FAMILIES)
        raise SourceError("unknown-family", source.path, f"family {name!r} is asked for",
                          f"{AUTO}, or one of {listed}")  # fmt: skip
    try:
        return find_family(source), False
    except SourceError as error:
        if error.code != "unknown-family":
            raise
    called = source.config.get("general.architecture" if source.format == "gguf" else "model_type")
    own_name = called if isinstance(called, str) and 0 < len(called) <= _LONGEST else "unknown"
    return Family(
        name=own_name,
        architecture=own_name,
        hf_architecture="",
        model_type=own_name,
        names={},
        is_moe=True,
        is_described=False,
        is_turned=None,
    ), True


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
        _REMEDY if is_moe else "",
    )


def _of_config(source: Source) -> Family:
    config: Mapping[str, object] = source.config
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    for family in FAMILIES:
        if {family.hf_architecture, *family.hf_aliases} & set(map(str, architectures)):
            return family
    model_type = config.get("model_type")
    if not architectures:
        for family in FAMILIES:
            if model_type in (family.model_type, *family.model_type_aliases):
                return family
    raise SourceError(
        "unknown-family",
        source.path,
        f"config.json has architectures {str(named)[:80]} and model_type {str(model_type)[:60]!r}",
        f"one of {', '.join(f.hf_architecture for f in FAMILIES)}",
        _REMEDY,
    )
