"""A token's way through all layers in one call to C: csrc/decode.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._native import NativeLibrary
from .native_core import NativeCore
from .native_layers import address_of, check_code
from .native_records import check_sizes
from .store import Store

_POINTERS: Final = (
    "decoder", "layers", "store", "blocks", "has_experts", "kinds", "experts", "addresses",
    "kinds_of",
)  # fmt: skip
_INTS: Final = (
    "n_layers", "first_layer", "look_ahead", "layer", "is_asked", "n_left", "is_store", "reserved",
)  # fmt: skip
# struct colibri_pass.
_PASS: Final = np.dtype(
    [
        *((name, "u8") for name in _POINTERS),
        ("position", "i8"),
        *((name, "i4") for name in _INTS),
    ]
)
_POSITION: Final = len(_POINTERS)
_FIRST_INT: Final = 2 * (len(_POINTERS) + 1)
_LOOK_AHEAD, _LAYER, _IS_ASKED, _N_LEFT, _IS_STORE = (
    _FIRST_INT + _INTS.index(name)
    for name in ("look_ahead", "layer", "is_asked", "n_left", "is_store")
)


class NativePass:
    """Steps and store in the order of `Decoder`, for one token, without Python in between.

    What a token costs in Python, some thirty calls a layer, is then one call; results, and what
    the store does, are the same.

    Args:
        library: has the steps and the store.
        core: of the store, in C.
        store: whose passes are told apart.
        first_layer: the store's number of the model's first layer.
        has_experts: of each layer.
        kinds: of each block of the store's, `(n_blocks,) int32`: its layout among `addresses`.
        addresses: of the structs `decoder`, `layers` and `blocks`, which outlive the pass.
        n_experts: a layer's most.

    Raises:
        ModelError: `native-records`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        core: NativeCore,
        store: Store,
        first_layer: int,
        has_experts: Sequence[bool],
        kinds: NDArray[np.int32],
        addresses: Mapping[str, int],
        n_experts: int,
    ) -> None:
        self._core = core
        self._store = store
        self._first = first_layer
        self._last = first_layer + max(
            (layer for layer, has in enumerate(has_experts) if has), default=-1
        )
        # Pointed to by the record.
        self._arrays: dict[str, NDArray[Any]] = {
            "has_experts": np.array(has_experts, np.uint8),
            "kinds": kinds,
            "experts": np.zeros(n_experts, np.int32),
            "addresses": np.zeros(n_experts, np.uint64),
            "kinds_of": np.zeros(n_experts, np.int32),
        }
        self._state = np.zeros(1, _PASS)
        state = self._state[0]
        for name, address in addresses.items():
            state[name] = address
        for name, array in self._arrays.items():
            state[name] = address_of(array)
        state["store"] = core.address
        state["n_layers"], state["first_layer"] = len(has_experts), first_layer
        self._at = address_of(self._state)
        self._words = self._state.view(np.uint8).data.cast("i")
        self._longs = self._state.view(np.uint8).data.cast("q")
        check_sizes(library, "colibri_pass_bytes", [_PASS], __name__)
        self._run = library.function("colibri_pass_run", "i32", "ptr")

    @property
    def is_ready(self) -> bool:
        """Whether nobody is to be told of single fetches now."""
        return self._store.native() is self._core and not self._store.is_preloading

    def run(self, position: int) -> None:
        """Takes the stream of the token at `position` through all layers.

        Raises:
            StorageError, FormatError: as `Fetch.take`.
            UsageError: `store-closed`, `fetch-open`, `no-slot`.
            ModelError: `native-call`.
        """
        store, core, words = self._store, self._core, self._words
        if self._last >= self._first:
            store.begin_pass(self._first, self._last)
        self._longs[_POSITION] = position
        words[_LOOK_AHEAD] = store.look_ahead
        words[_LAYER] = words[_IS_ASKED] = words[_N_LEFT] = 0
        core.begin_pass()
        try:
            while (code := self._run(self._at)) < 0:
                if not words[_IS_STORE]:
                    check_code(code, f"layer {words[_LAYER]}")
                core.answer(code)
        finally:
            core.end_pass()
