"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from colibri_format import UsageError

from ._native import native
from .policy import Key, Policy
from .policy_cadence import Cadence, half_life_of
from .policy_hybrid import HOT_SHARE, LFU_WEIGHT, Hybrid
from .policy_lfu import Lfu
from .policy_lru import GlobalLru, LayerLru
from .policy_native import NativePolicy
from .policy_recall import RECALL, RecallPolicy

POLICY_NAMES: Final = ("recall", "cadence", "hybrid", "lfu", "lru")
DEFAULT_POLICY: Final = "recall"


def make_policy(
    name: str = DEFAULT_POLICY,
    *,
    n_layers: int,
    n_slots: int,
    n_blocks: int | None = None,
    quotas: Sequence[int] | None = None,
    lfu_weight: float | None = None,
    hot_share: float | None = None,
    shares: Mapping[Key, float] | None = None,
    is_native: bool | None = None,
) -> Policy:
    """A new policy for `n_slots` slots, over all layers together.

    Args:
        name: one of `POLICY_NAMES`.
        n_layers: of the model, those without experts included.
        n_slots: of the pool.
        n_blocks: that share them; None: not known, taken for many more.
        quotas: blocks that each layer keeps for itself (`SlotPlan.quotas`); None: none, a slot
            goes to whichever layer gains most by it.
        lfu_weight: of `hybrid`, 0 (recency) to 1 (frequency).
        hot_share: of `hybrid`, the share of slots whose blocks stay, 0 to 1.
        shares: what was learned before (`History.shares`).
        is_native: whether `recall` and `cadence` compute in C; None: where the library is there.

    Raises:
        UsageError: `unknown-policy`; `bad-lfu-weight`, `bad-hot-share` outside 0 to 1, or where
            the policy takes none; `bad-quotas` unless there is one for each layer.
    """
    if name not in POLICY_NAMES:
        raise UsageError(
            "unknown-policy", "policy", f"{name!r} is none", f"one of {', '.join(POLICY_NAMES)}"
        )
    if quotas is not None and len(quotas) != n_layers:
        raise UsageError(
            "bad-quotas", "policy", f"{len(quotas)} quotas", f"one for each of {n_layers} layers"
        )
    for code, option, value in (
        ("bad-lfu-weight", "weight of frequency", lfu_weight),
        ("bad-hot-share", "share of hot blocks", hot_share),
    ):
        if value is not None and not (name == "hybrid" and 0.0 <= value <= 1.0):
            raise UsageError(
                code,
                f"policy {name}",
                f"a {option} of {value}",
                "0 to 1, of the policy hybrid alone",
            )
    policy: Policy
    if name == "lru":
        policy = GlobalLru(n_layers) if quotas is None else LayerLru(quotas)
    elif name == "lfu":
        policy = Lfu(n_layers, quotas)
    elif name == "hybrid":
        share = HOT_SHARE if hot_share is None else hot_share
        policy = Hybrid(
            n_layers,
            quotas,
            lfu_weight=LFU_WEIGHT if lfu_weight is None else lfu_weight,
            n_hot=int(share * n_slots / max(n_layers, 1)),
        )
    elif is_native is not False and (library := native().library) is not None:
        weight = RECALL if name == "recall" else None
        half_life = half_life_of(n_slots, n_blocks)
        policy = NativePolicy(library, n_layers, quotas, half_life=half_life, recall=weight)
    else:
        kind = Cadence if name == "cadence" else RecallPolicy
        policy = kind(n_layers, quotas, half_life=half_life_of(n_slots, n_blocks))
    if shares:
        policy.seed(shares)
    return policy
