"""One model's view of a store that several share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .fetch import Fetch

if TYPE_CHECKING:
    from .store import Store


class StorePart:
    """The layers of one source in a store that several share; `fetch` and so on as there."""

    def __init__(self, store: Store, first_layer: int, n_layers: int) -> None:
        self.store = store
        self.first_layer = first_layer
        self.n_layers = n_layers

    @property
    def look_ahead(self) -> int:
        """As `Store.look_ahead`."""
        return self.store.look_ahead

    def fetch(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> Fetch:
        """As `Store.fetch`; leases and statistics count layers through all sources."""
        return self.store.fetch(self._layer(layer), experts)

    def observe(
        self,
        layer: int,
        experts: NDArray[np.integer],
        weights: NDArray[np.floating] | None = None,
    ) -> None:
        """As `Store.observe`."""
        self.store.observe(self._layer(layer), experts, weights)

    def prefetch(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> None:
        """As `Store.prefetch`."""
        self.store.prefetch(self._layer(layer), experts)

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.n_layers:
            raise UsageError(
                "no-such-expert",
                f"layer {layer}",
                "is not in this source",
                f"layers 0 to {self.n_layers - 1}",
            )
        return self.first_layer + layer
