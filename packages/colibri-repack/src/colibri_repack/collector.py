"""Python's garbage collector, and when it only costs time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[Callable[[], None]]:
    """Without the garbage collector; what is given ends that before the context does.

    Plans are a million objects and no cycle. Looking through them again and again, as they grow,
    takes a fifth of the time.
    """
    was_enabled = gc.isenabled()

    def collect_again() -> None:
        if was_enabled:
            gc.enable()

    gc.disable()
    try:
        yield collect_again
    finally:
        collect_again()
