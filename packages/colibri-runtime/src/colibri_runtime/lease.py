"""A block that may be read: where it lies in memory and what stands where in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, Role


class Lease:
    """The right to read one expert's block until the fetch that gave it goes on or is closed.

    Attributes:
        layer, expert: whose block it is.
        slot: the number of the slot it stands in.
        address: of the block's first byte, a multiple of 4096, for code that takes pointers.
        layout: the block's segments.
        cache: None at first, and the user's own: what is put here is found again at the next
            fetch of the block, as long as it stays in its slot (a prepared argument block for a
            kernel, say). It is dropped with the block.

    A fetch that finds the block still resident gives the same object again. Once a lease has
    ended the memory may hold another block at any time: keep results, never views or addresses.
    """

    __slots__ = (
        "_segments", "_view", "address", "cache", "expert", "layer", "layout", "slot",
    )  # fmt: skip

    def __init__(
        self,
        layer: int,
        expert: int,
        layout: Layout,
        slot: int,
        address: int,
        view: NDArray[np.uint8],
    ) -> None:
        self.layer: Final = layer
        self.expert: Final = expert
        self.layout: Final = layout
        self.slot: Final = slot
        self.address: Final = address
        self.cache: Any = None
        self._view = view
        self._segments: dict[Role, NDArray[np.uint8]] | None = None

    @property
    def segments(self) -> Mapping[Role, NDArray[np.uint8]]:
        """Each segment's bytes: read-only `(n_bytes,) uint8` views into the slot, each starting at
        a multiple of 64 bytes. Made when first asked for."""
        if self._segments is None:
            view = self._view
            self._segments = {
                s.role: view[s.offset : s.offset + s.size] for s in self.layout.segments
            }
        return self._segments

    def __repr__(self) -> str:
        return f"<Lease L{self.layer}/E{self.expert} at {self.address:#x}>"
