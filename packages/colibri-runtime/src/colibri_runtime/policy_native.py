"""`cadence` and `recall` in C: csrc/policy.h."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._native import NativeLibrary
from .policy import Key
from .policy_cadence import APPROACH, ECHO, HALF_LIFE
from .policy_decayed import seed_count
from .policy_recall import RECALL
from .recall import Recall

_OUT: Final = -2
_NONE: Final = -1
_FIRST_WIDTH: Final = 64
_MOST_LIKELY: Final = 64

_LISTS: Final = ("first_ahead", "last_ahead", "first_surplus", "last_surplus")
_BY_LAYER: Final[dict[str, tuple[str, float]]] = {
    "units": ("f8", 1.0),
    "offsets": ("f8", 0.0),
    "ranks": ("f8", 0.0),
    "lowest": ("i4", _NONE),
    "n_values": ("i4", 0),
    "n_recent": ("i4", 0),
    "n_touched": ("i4", 0),
    "quotas": ("i4", 0),
    "next_surplus": ("i4", _OUT),
    "previous_surplus": ("i4", _NONE),
    "n_visits": ("i8", 0),
    "is_seen": ("u1", 0),
}
_BY_BLOCK: Final[dict[str, tuple[str, float]]] = {
    "values": ("f8", np.inf),
    "counts": ("f8", 0.0),
    "recents": ("f8", 0.0),
    "recent": ("i4", 0),
    "touched": ("i4", 0),
    "next_ahead": ("i4", _OUT),
    "previous_ahead": ("i4", _NONE),
    "is_touched": ("u1", 0),
}
# struct colibri_policy of policy.h.
_STATE: Final = np.dtype(
    [
        *((name, "i4") for name in ("n_layers", "width", "has_quotas", "is_observed")),
        *((name, "i4") for name in ("is_pressed", "latest", "n_seen", "n_recalled", "n_stale")),
        *((name, "i4") for name in _LISTS),
        ("reserved", "i4"),
        *((name, "f8") for name in ("growth", "echo", "approach", "recall_weight", "clock")),
        *((name, "u8") for name in ("recall", *_BY_LAYER, *_BY_BLOCK, "stale", "is_asked")),
    ]
)  # fmt: skip


@cache
def int_packer(n: int) -> struct.Struct:
    """Writes `n` numbers as int32 where C reads them."""
    return struct.Struct(f"={n}i")


@cache
def float_packer(n: int) -> struct.Struct:
    """Writes `n` numbers as float64 where C reads them."""
    return struct.Struct(f"={n}d")


class NativePolicy:
    """`Cadence`, or with `recall` `RecallPolicy`, computed by the C library; the same victims.

    A victim costs a look at each layer and at one layer's experts, whatever the number of slots.
    """

    def __init__(
        self,
        library: NativeLibrary,
        n_layers: int,
        quotas: Sequence[int] | None = None,
        *,
        half_life: float = HALF_LIFE,
        echo: float = ECHO,
        approach: float = APPROACH,
        recall: float | None = RECALL,
    ) -> None:
        self._recall = None if recall is None else Recall(n_layers)
        self._state = np.zeros(1, _STATE)
        self._arrays: dict[str, NDArray[Any]] = {}
        state = self._state[0]
        state["n_layers"] = n_layers
        state["has_quotas"] = quotas is not None
        state["latest"] = _NONE
        for name in _LISTS:
            state[name] = _NONE
        state["growth"] = 2.0 ** (1.0 / half_life)
        state["echo"] = echo
        state["approach"] = approach
        state["recall_weight"] = recall or 0.0
        for name, (kind, value) in _BY_LAYER.items():
            self._arrays[name] = np.full(n_layers, value, kind)
        if quotas is not None:
            self._arrays["quotas"][:] = quotas
        self._n_layers = n_layers
        self._width = 0
        self._most_asked = 0
        self._make_room(16)
        self._grow(_FIRST_WIDTH)
        self._at = int(self._state.__array_interface__["data"][0])
        function, block = library.function, ("i32", "ptr", "i32", "i32")
        self._observe = function("colibri_policy_observe", *block, "ptr", "ptr")
        self._pin = function("colibri_policy_pin", *block)
        self._release = function("colibri_policy_release", *block)
        self._admit = function("colibri_policy_admit", *block)
        self._touch = function("colibri_policy_touch", *block)
        self._expire = function("colibri_policy_expire", *block)
        self._victim = function("colibri_policy_victim", "i64", "ptr", "i32")
        self._pin_all = function("colibri_policy_pin_all", *block, "ptr")
        self._release_all = function("colibri_policy_release_all", *block, "ptr")
        self._touch_all = function("colibri_policy_touch_all", *block, "ptr")

    def address(self, n_experts: int) -> int:
        """Of its struct colibri_policy, with room for `n_experts` a layer."""
        if n_experts > self._width:
            self._grow(n_experts)
        return self._at

    def observe(
        self, layer: int, experts: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        n = self._tell(experts)
        if weights is not None:
            float_packer(n).pack_into(self._weights, 0, *weights)
        self._observe(
            self._at, layer, n, self._experts_at, 0 if weights is None else self._weights_at
        )

    def pin_all(self, layer: int, experts: Sequence[int]) -> None:
        if self._pin_all(self._at, layer, self._tell(experts), self._experts_at) < 0:
            raise KeyError((layer, experts))

    def release_all(self, layer: int, experts: Sequence[int]) -> None:
        self._release_all(self._at, layer, self._tell(experts), self._experts_at)

    def touch_all(self, layer: int, experts: Sequence[int]) -> None:
        self._touch_all(self._at, layer, self._tell(experts), self._experts_at)

    def pin(self, key: Key) -> None:
        layer, expert = key
        if expert >= self._width or self._pin(self._at, layer, expert) < 0:
            raise KeyError(key)

    def release(self, key: Key) -> None:
        layer, expert = key
        if expert >= self._width:
            self._grow(expert + 1)
        self._release(self._at, layer, expert)

    def admit(self, key: Key) -> None:
        layer, expert = key
        if expert >= self._width:
            self._grow(expert + 1)
        self._admit(self._at, layer, expert)

    def touch(self, key: Key) -> None:
        layer, expert = key
        if expert < self._width:
            self._touch(self._at, layer, expert)

    def expire(self, key: Key) -> None:
        layer, expert = key
        if expert < self._width:
            self._expire(self._at, layer, expert)

    def seed(self, shares: Mapping[Key, float]) -> None:
        if not shares:
            return
        growth = float(self._state[0]["growth"])
        top = max(expert for _, expert in shares)
        if top >= self._width:
            self._grow(top + 1)
        counts, units = self._arrays["counts"], self._arrays["units"]
        for (layer, expert), share in shares.items():
            counts[layer, expert] = seed_count(share, growth) * units[layer]

    def victim(self, *, is_prefetch: bool) -> Key | None:
        block: int = self._victim(self._at, is_prefetch)
        return None if block < 0 else (block >> 32, block & 0xFFFFFFFF)

    def _tell(self, experts: Sequence[int]) -> int:
        """Writes `experts` where the library reads them; how many there are."""
        n = len(experts)
        if n and (top := max(experts)) >= self._width:
            self._grow(top + 1)
        if n > self._most_asked:
            self._make_room(n)
        int_packer(n).pack_into(self._experts, 0, *experts)
        return n

    def _grow(self, n_experts: int) -> None:
        """Makes room for experts below `n_experts`, and tells the library where everything is."""
        before = self._width
        width = self._width = max(n_experts, 2 * before)
        for name, (kind, value) in _BY_BLOCK.items():
            wider = np.full((self._n_layers, width), value, kind)
            if before:
                wider[:, :before] = self._arrays[name]
            self._arrays[name] = wider
        if before:
            self._renumber(before)
        self._arrays["stale"] = np.zeros(width + _MOST_LIKELY, np.int32)
        self._arrays["is_asked"] = np.zeros(width, np.uint8)
        state = self._state[0]
        state["width"] = width
        if self._recall is not None:
            self._recall.require(width)
            state["recall"] = self._recall.state_address
        for name, array in self._arrays.items():
            state[name] = array.__array_interface__["data"][0]

    def _renumber(self, before: int) -> None:
        """A block's number in the list of those read ahead depends on the width."""
        for name in ("next_ahead", "previous_ahead"):
            numbers = self._arrays[name]
            known = numbers >= 0
            numbers[known] = numbers[known] // before * self._width + numbers[known] % before
        for name in ("first_ahead", "last_ahead"):
            number = int(self._state[0][name])
            if number >= 0:
                self._state[0][name] = number // before * self._width + number % before

    def _make_room(self, n: int) -> None:
        """For an event of `n` experts."""
        self._most_asked = n = max(n, 2 * self._most_asked)
        self._experts = bytearray(4 * n)
        self._weights = bytearray(8 * n)
        self._experts_at, self._weights_at = (
            int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
            for memory in (self._experts, self._weights)
        )
