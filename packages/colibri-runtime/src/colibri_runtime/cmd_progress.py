"""Progress of `colibri run` on a terminal's stderr: loading, then reading the prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

PATIENCE_S: Final = 1.0
"""Seconds of work after which a bar appears: shorter work needs none."""


class ProgressBars:
    """Bars that appear only for work that lasts, and only where someone sees them.

    `loaded` is told of bytes, `routed` (a decoder's observer) of layers passed by the prompt's
    tokens. A context manager; leaving it clears the bar. `is_shown` None: when stderr is a
    terminal.
    """

    def __init__(
        self,
        n_prompt: int,
        n_layers: int,
        *,
        is_shown: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._n_prompt = n_prompt
        self._n_layers = n_layers
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._clock = clock
        self._started = clock()
        self._bar: Any = None
        self._task: Any = None

    def loaded(self, done: int, total: int) -> None:
        """`done` of `total` bytes of dense tensors are loaded."""
        self._show("loading", done, total, is_bytes=True)

    def routed(
        self, layer: int, first_position: int, experts: Any, weights: Any, predicted: Any
    ) -> None:
        """Tokens from `first_position` on reached `layer`."""
        if first_position >= self._n_prompt:
            return
        n_tokens = len(experts)
        done = first_position * self._n_layers + n_tokens * (layer + 1)
        self._show("reading the prompt", done, self._n_prompt * self._n_layers, is_bytes=False)

    def clear(self) -> None:
        """Takes the bar away; the next one waits again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._started = self._clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def _show(self, label: str, done: int, total: int, *, is_bytes: bool) -> None:
        if not self._is_shown:
            return
        if done >= total:
            self.clear()
            return
        if self._bar is None:
            if self._clock() - self._started < PATIENCE_S:
                return
            self._bar = _new_bar(is_bytes=is_bytes)
            self._task = self._bar.add_task(label, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)


def _new_bar(*, is_bytes: bool) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    rate = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if is_bytes
        else (TaskProgressColumn(show_speed=True),)
    )
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *rate,
        TimeRemainingColumn(),
        console=Console(stderr=True, force_terminal=True),
        transient=True,
    )
