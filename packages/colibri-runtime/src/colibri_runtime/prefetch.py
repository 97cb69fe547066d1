"""Which experts are asked for next: predictions, and whether reading by them pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_LOOK_AHEAD: Final = 2

AUTO_LOOK_AHEAD: Final = 1
"""Layers ahead that `auto` tries."""


class PrefetchSource(StrEnum):
    """Where predictions come from."""

    ROUTER = "router"
    LAST = "last"
    HISTORY = "history"


class Predictor(Protocol):
    """Foresees which experts a layer asks for; the store asks it after each fetch."""

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """`experts` of `layer` were asked for."""

    def predict(self, layer: int) -> Sequence[int]:
        """Experts that `layer` is likely to ask for next, the surest first."""


class LastExperts:
    """What a layer was asked for last is asked for again."""

    def __init__(self) -> None:
        self._last: dict[int, Sequence[int]] = {}

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        self._last[layer] = experts

    def predict(self, layer: int) -> Sequence[int]:
        return self._last.get(layer, ())


class FrequentExperts:
    """What was asked for most, lately and in the past, is asked for again.

    `counts[layer, expert]` are those of earlier runs; each visit of a layer lets what came before
    count `DECAY` times as much. As many experts are predicted as were asked for last.
    """

    DECAY: Final = 0.98
    """Half of a count is gone after 34 visits: some tens of tokens."""

    REFRESH: Final = 4
    """Visits after which a layer is sorted anew: sorting costs more than what it would gain."""

    def __init__(self, counts: NDArray[np.floating]) -> None:
        self._counts = np.array(counts, np.float64)
        self._widths = [0] * len(self._counts)
        self._visits = [0] * len(self._counts)
        self._order: list[list[int]] = [[] for _ in self._counts]

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        row = self._counts[layer]
        row *= self.DECAY
        row[list(experts)] += 1.0
        self._widths[layer] = len(experts)
        if self._visits[layer] % self.REFRESH == 0:
            self._sort(layer)
        self._visits[layer] += 1

    def predict(self, layer: int) -> Sequence[int]:
        # Before its first visit a layer is likely to ask for as many as others did.
        width = self._widths[layer] or max(self._widths)
        if not self._order[layer]:
            self._sort(layer)
        return self._order[layer][:width]

    def _sort(self, layer: int) -> None:
        row = self._counts[layer]
        order = np.argsort(-row, kind="stable")
        self._order[layer] = order[row[order] > 0].tolist()


class GivenExperts:
    """What is known beforehand: for each layer the experts of its visits to come, in order."""

    def __init__(self, visits: Sequence[Iterable[Sequence[int]]]) -> None:
        self._visits = [deque(layer) for layer in visits]

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        if self._visits[layer]:
            self._visits[layer].popleft()

    def predict(self, layer: int) -> Sequence[int]:
        return self._visits[layer][0] if self._visits[layer] else ()


@dataclass(frozen=True, slots=True)
class Trial:
    """Times of a token in nanoseconds, medians: with prefetch, and without."""

    with_ns: float
    without_ns: float

    @property
    def gain(self) -> float:
        """Share of the time that prefetch saves; negative where it costs."""
        return 1 - self.with_ns / self.without_ns if self.without_ns > 0 else 0.0


class PrefetchGate:
    """Whether to read ahead, by trial: tokens with and without it take turns and are timed.

    After `WARM_UP` tokens, in which caches fill, four windows follow each other: with, without,
    without, with. So a drift of speed, as of a cache that still fills, falls on both alike.
    Prefetch pays when the median token takes at least `LEAST_GAIN` less time with it. It is
    switched when `PATIENCE` trials in a row speak against what is set, the first time by one alone:
    nothing speaks for prefetch beforehand. Between trials lie `REST` tokens, twice as many after
    each that changed nothing, `MOST_REST` at most; after one that speaks against what is set the
    next follows at once.
    """

    WARM_UP: Final = 16
    WINDOW: Final = 6
    LEAST_GAIN: Final = 0.02
    PATIENCE: Final = 2
    REST: Final = 128
    MOST_REST: Final = 4096

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.is_set_on = True
        self._strikes = self.PATIENCE - 1
        self._rest = self.REST
        self._wait = self.WARM_UP
        self._place = -1
        self._times: dict[bool, list[int]] = {True: [], False: []}

    @property
    def is_on(self) -> bool:
        """Whether the token that comes is to be read ahead for."""
        if self._place < 0:
            return self.is_set_on
        return self._place // self.WINDOW in (0, 3)

    def tell(self, token_ns: int) -> None:
        """A token took `token_ns`, with prefetch or without as `is_on` said."""
        if self._place < 0:
            self._wait -= 1
            if self._wait <= 0:
                self._place = 0
            return
        # The first of a window still feels the one before: blocks read ahead, or not.
        if self._place % self.WINDOW:
            self._times[self.is_on].append(token_ns)
        self._place += 1
        if self._place == 4 * self.WINDOW:
            self._judge()

    def verdict(self) -> str:
        """What was decided and why, in words."""
        if not self.trials:
            return "not tried yet: too few tokens"
        last = self.trials[-1]
        state = "on" if self.is_set_on else "off"
        word = "saved" if last.gain >= 0 else "cost"
        return (
            f"{state}: in the last of {len(self.trials)} trials it {word} {abs(last.gain):.1%} "
            f"({last.with_ns / 1e6:.3g} ms a token with it, {last.without_ns / 1e6:.3g} without)"
        )

    def _judge(self) -> None:
        trial = Trial(median(self._times[True]), median(self._times[False]))
        self.trials.append(trial)
        self._place = -1
        self._times = {True: [], False: []}
        if (trial.gain >= self.LEAST_GAIN) == self.is_set_on:
            self._strikes = 0
            self._wait, self._rest = self._rest, min(2 * self._rest, self.MOST_REST)
            return
        self._strikes += 1
        self._wait = 0
        if self._strikes < self.PATIENCE:
            self._place = 0
            return
        self.is_set_on = not self.is_set_on
        self._strikes = 0
        self._wait, self._rest = self.REST, 2 * self.REST
