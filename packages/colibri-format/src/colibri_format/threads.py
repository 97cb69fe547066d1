"""Threads that are there, or a clear error."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread that runs `run`; a daemon, so that no failure keeps the process waiting for it.

    Raises:
        MemoryError: the system gives no further thread, mostly for want of memory for its stack.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise MemoryError(f"no thread {name} can be started") from error
    return thread
