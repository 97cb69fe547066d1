"""Shapes of synthetic models: sizes of published ones, with random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from colibri_format import UsageError

SKEW_SHARE: Final = 0.57
"""Share of the picks that the hottest quarter of a layer's experts takes.

Short runs of real models lie there: half of the experts take nearly all, a quarter over half."""

_N_DRAWS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model; `architecture` is GGUF's name of its family.

    `is_normalised` says whether the weights of the chosen experts are scaled to a sum of 1,
    `has_qk_norm` whether q and k are normalised as a whole before they are turned.
    """

    name: str
    architecture: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    n_experts: int
    top_k: int
    expert_size: int
    vocab_size: int
    context_length: int
    has_qk_norm: bool
    is_normalised: bool


SHAPES: Final = {
    shape.name: shape
    for shape in (
        # allenai/OLMoE-1B-7B-0924, config.json.
        Shape(
            name="olmoe", architecture="olmoe", n_layers=16, hidden_size=2048, n_heads=16,
            n_kv_heads=16, n_experts=64, top_k=8, expert_size=1024, vocab_size=50304,
            context_length=4096, has_qk_norm=True, is_normalised=False,
        ),
        # mistralai/Mixtral-8x7B-v0.1, config.json, but for the number of layers: 32 there.
        Shape(
            name="mixtral", architecture="llama", n_layers=5, hidden_size=4096, n_heads=32,
            n_kv_heads=8, n_experts=8, top_k=2, expert_size=14336, vocab_size=32000,
            context_length=4096, has_qk_norm=False, is_normalised=True,
        ),
        # For tests: everything small, blocks still whole.
        Shape(
            name="tiny", architecture="olmoe", n_layers=3, hidden_size=256, n_heads=4,
            n_kv_heads=4, n_experts=16, top_k=2, expert_size=256, vocab_size=512,
            context_length=256, has_qk_norm=True, is_normalised=False,
        ),
    )
}  # fmt: skip


def shape_of(name: str, n_layers: int | None = None) -> Shape:
    """The shape called `name`, with another number of layers where one is given.

    Raises:
        UsageError: `unknown-shape`, `bad-layers`.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise UsageError(
            "unknown-shape", f"shape {name!r}", "is not known", f"one of {', '.join(SHAPES)}"
        )
    if n_layers is None:
        return shape
    if n_layers < 1:
        raise UsageError("bad-layers", f"shape {name}", f"{n_layers} layers", "at least 1")
    return replace(shape, n_layers=n_layers)


def plan_skew(shape: Shape, share: float = SKEW_SHARE) -> float:
    """The slope a of the bias -a * log(rank) that gives the hottest quarter `share` of the picks.

    A router's logit is taken as a standard normal number plus the bias; found by bisection over
    fixed draws, so the same shape always gives the same slope.
    """
    draws = np.random.default_rng(1).standard_normal((_N_DRAWS, shape.n_experts))
    ranks = np.log(np.arange(1, shape.n_experts + 1))
    n_hot = max(1, shape.n_experts // 4)
    low, high = 0.0, 8.0
    for _ in range(30):
        slope = (low + high) / 2
        picks = np.argpartition(-(draws - slope * ranks), shape.top_k - 1)[:, : shape.top_k]
        if np.mean(picks < n_hot) < share:
            low = slope
        else:
            high = slope
    return (low + high) / 2
