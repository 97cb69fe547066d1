"""Canonical names told from the form of names that no table has."""

from __future__ import annotations

import re
from typing import Final

from . import names

_LAYER: Final = re.compile(r"(?:.*\.)?(?:layers|h|blocks|decoder\.block)\.(\d{1,7})\.(.+)")
_SINGLE: Final = re.compile(r"(?:.*\.)?experts\.(\d{1,7})\.(?:mlp\.)?(\w+?)(?:\.(weight|bias))?")
_STACK: Final = re.compile(
    r"(?:.*\.)?(?:experts|switch_mlp|expert_weights)\.(?:mlp\.)?(\w+?)(?:\.(weight|bias)|_(bias))?"
)
_EXPERT: Final = re.compile(r"(?:^|\.)(?:experts|switch_mlp)\.")
_SHARED: Final = re.compile(r"shared_experts?\.")
# Gate, up and down by the names that public checkpoints give them; Mixtral's w1, w3, w2.
_MATRICES: Final = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
    "gate": "gate", "up": "up", "down": "down",
    "linear": "gate", "linear_v": "up", "linear_1": "down",
    "gate_up_proj": "gate_up", "gate_and_up_proj": "gate_up", "w13": "gate_up",
}  # fmt: skip


def guess_name(name: str) -> tuple[str | None, tuple[int, ...]]:
    """The canonical template of a Hugging Face name and its numbers; None for an unknown expert's.

    Tensors of no expert get the canonical name that most families give them, else keep their own
    (behind `blk.N.` where a layer is named).

    >>> guess_name("model.layers.3.moe.experts.12.w2.weight")
    ('blk.{}.ffn_down.{}.weight', (3, 12))
    """
    layered = _LAYER.fullmatch(name)
    if layered is None:
        return (None, ()) if _EXPERT.search(name) else (_plain(name), ())
    layer, rest = int(layered[1]), layered[2]
    if not _SHARED.search(rest) and _EXPERT.search(rest):
        return _expert(layer, rest)
    known = names.ALL.get(f"model.layers.{{}}.{rest}")
    if known is not None:
        return known, (layer,)
    # Braces in a name would be taken for places of numbers.
    return "blk.{}." + _plain(rest), (layer,)


def _expert(layer: int, rest: str) -> tuple[str | None, tuple[int, ...]]:
    if match := _SINGLE.fullmatch(rest):
        matrix = _MATRICES.get(match[2])
        if matrix is None or matrix == "gate_up":
            return None, ()
        return f"blk.{{}}.ffn_{matrix}.{{}}.{match[3] or 'weight'}", (layer, int(match[1]))
    if match := _STACK.fullmatch(rest):
        matrix = _MATRICES.get(match[1])
        if matrix is not None:
            return f"blk.{{}}.ffn_{matrix}_exps.{match[2] or match[3] or 'weight'}", (layer,)
    return None, ()


def _plain(name: str) -> str:
    found = names.ALL.get(name)
    return name.replace("{", "{{").replace("}", "}}") if found is None else found
