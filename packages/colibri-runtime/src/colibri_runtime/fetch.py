"""A fetch: blocks of one layer, leased as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from colibri_format import UsageError

from .lease import Lease

if TYPE_CHECKING:
    from .core import Core

ReadyCallback = Callable[[Lease], object]
"""Told of a block that may be read until it returns."""


def closed_error() -> UsageError:
    """What is raised when a closed store is used."""
    return UsageError("store-closed", "store", "is closed", "an open store")


class Fetch:
    """Leases of the experts that were asked for, each once, in order of arrival.

    Three ways to use it, which may be mixed; each ends the leases given before.

    - As an iterator: one lease at a time.
    - `take`: all that are ready at once, to compute what is resident in one go and what arrives
      piece by piece.
    - `run`: the store's callback is called with each.

    A context manager; `close`, leaving the `with` block, or dropping it gives everything back.
    """

    __slots__ = ("_current", "_number")

    def __init__(self, current: Core, number: int) -> None:
        self._number = number
        self._current = current

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Lease:
        lease = self._current.next(self._number)
        if lease is None:
            raise StopIteration
        return lease

    def take(self) -> list[Lease]:
        """All blocks that are ready now, at least one: waits until there is one. Empty when every
        block was given. They stay leased until the next call, or `close`.

        Raises:
            FormatError: `block-checksum`.
            StorageError: `short-read`, or what the kernel said.
            UsageError: `store-closed`.
        """
        return self._current.take(self._number)

    def run(self) -> int:
        """Calls the store's callback with each block as it arrives; gives how many there were.

        The callback runs in the thread that calls this, and a lease ends when it returns. When it
        raises, the fetch is closed and the exception goes on.

        Raises:
            UsageError: `no-callback` unless `Store.on_ready` was called before; else as `take`.
        """
        return self._current.run(self._number)

    def close(self) -> None:
        """Ends the leases, and reads that have not begun; those that have land for later."""
        self._current.close(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._current.close(self._number)

    def __del__(self) -> None:
        # It is not there where an exception, Ctrl-C say, came while this was made.
        current: Core | None = getattr(self, "_current", None)
        if current is not None:
            current.close(self._number)
