"""What a store is built around: slots, reads and the open fetch, as one thing that steps drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .blocks import BlockTable
from .fetch import Fetch, ReadyCallback
from .lease import Lease
from .policy import Key
from .stats import LayerStats

Experts = Iterable[int] | NDArray[np.integer[Any]]
"""Experts of a layer by number, in order; one that is named again counts once."""


class CoreStats(Protocol):
    """Counts of every layer; `stats.Stats` is one."""

    @property
    def layers(self) -> tuple[LayerStats, ...]: ...
    def total(self) -> LayerStats: ...


class Slots(Protocol):
    """Which block stands in which slot, to look at; `cache.Cache` is one."""

    @property
    def n_slots(self) -> int: ...
    @property
    def n_evicted(self) -> int: ...
    @property
    def n_resident(self) -> int: ...
    @property
    def n_loading(self) -> int: ...
    @property
    def n_pinned(self) -> int: ...
    @property
    def n_free(self) -> int: ...
    @property
    def n_waiting(self) -> int: ...
    def __contains__(self, key: Key) -> bool: ...
    def slot_of(self, key: Key) -> int | None: ...
    def owners(self) -> Mapping[int, Key]: ...


class Core(ABC):
    """Leases, reads, predictions and counts of a store, for one thread.

    Two do the same: `PlainCore` drives any disk engine and any policy, `NativeCore` does in one
    call to C what the former does in some fifty of Python, for what C has.

    Attributes:
        cache: who stands in which slot.
        stats: what was counted.
        callback: of `Store.on_ready`.
    """

    cache: Slots
    stats: CoreStats
    callback: ReadyCallback | None = None

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether a fetch is."""

    @property
    @abstractmethod
    def layer(self) -> int:
        """Of the open fetch, or of the last."""

    @property
    @abstractmethod
    def ended_ns(self) -> int:
        """When the last leases ended, by the store's clock."""

    @property
    @abstractmethod
    def n_reads(self) -> int:
        """Blocks that are being read or queued to be."""

    @property
    @abstractmethod
    def n_pending(self) -> int:
        """Blocks that the open fetch wants and has no slot for."""

    @property
    @abstractmethod
    def n_asked(self) -> int:
        """Blocks that the last fetch asked for."""

    @abstractmethod
    def observe(
        self, layer: int, experts: NDArray[np.integer], weights: NDArray[np.floating] | None
    ) -> None:
        """As `Store.observe`."""

    @abstractmethod
    def fetch(self, layer: int, experts: Experts) -> Fetch:
        """As `Store.fetch`, while none is open."""

    @abstractmethod
    def next(self, number: int) -> Lease | None:
        """One lease more of fetch `number`, None when every block was given."""

    @abstractmethod
    def take(self, number: int) -> list[Lease]:
        """All that are ready, at least one; none when every block was given."""

    @abstractmethod
    def close(self, number: int) -> None:
        """Gives back what fetch `number` still holds, if it is open."""

    def run(self, number: int) -> int:
        """How many blocks the callback was given."""
        callback = self.callback
        if callback is None:
            raise UsageError(
                "no-callback",
                f"fetch of layer {self.layer}",
                "nothing was registered to be called",
                "Store.on_ready(callback) before",
            )
        n_given = 0
        try:
            while (lease := self.next(number)) is not None:
                callback(lease)
                n_given += 1
        finally:
            self.close(number)
        return n_given

    @abstractmethod
    def prefetch(self, layer: int, experts: Experts, *, is_read: bool = True) -> None:
        """As `Store.prefetch`; without `is_read` it is only seen to that there are such experts."""

    @abstractmethod
    def preload(self, key: Key) -> bool:
        """Whether the block was not here and is now read into a slot that was free."""

    @abstractmethod
    def resize(self, n_open: int) -> None:
        """As `Store.resize`, while no fetch is open: the last class has more slots or fewer."""

    def recover(self) -> None:  # noqa: B027  (nothing to do for most)
        """Closes what whoever drives the core from C left open when it was broken off."""

    @abstractmethod
    def shut(self) -> None:
        """The store is closing: whatever was open is void, and the pool's memory let go of."""


def check_experts(table: BlockTable, layer: int, experts: Iterable[int]) -> None:
    """Nothing, when the layer has all of `experts`.

    Raises:
        UsageError: `no-such-expert`.
    """
    is_layer = 0 <= layer < table.n_layers
    absent = [int(expert) for expert in experts if not table.has(layer, int(expert))]
    if absent or not is_layer:
        raise UsageError(
            "no-such-expert",
            f"layer {layer}",
            f"has no experts {absent}",
            f"layers 0 to {table.n_layers - 1} and experts that the index holds",
        )


def no_slot(layer: int) -> UsageError:
    """What is raised when a policy breaks its promise, instead of waiting for ever."""
    return UsageError(
        "no-slot",
        f"fetch of layer {layer}",
        "no slot can be had and no read is under way",
        "a policy that gives up what is beyond its quotas",
    )
