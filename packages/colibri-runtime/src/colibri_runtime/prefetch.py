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

AUTO_LOOK_AHEAD: Final = 2
"""The most layers ahead that `auto` tries."""


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
    """Times of a token in nanoseconds, medians: with prefetch `depth` layers ahead, and with one
    layer less, which is without where `depth` is 1."""

    with_ns: float
    without_ns: float
    depth: int = 1

    @property
    def gain(self) -> float:
        """Share of the time that the deeper saves; negative where it costs."""
        return 1 - self.with_ns / self.without_ns if self.without_ns > 0 else 0.0


class PrefetchGate:
    """How many layers to read ahead, 0 to `most`, by trial: tokens with a layer more and a layer
    less take turns and are timed.

    After `WARM_UP` tokens, in which caches fill, four windows follow each other: deeper, shallower,
    shallower, deeper. So a drift of speed, as of a cache that still fills, falls on both alike.
    A layer pays when the median token takes at least `LEAST_GAIN` less time with it. What is set,
    at first one layer, is changed when `PATIENCE` trials in a row speak against it, the first time
    that two depths are compared by one alone: nothing speaks for prefetch beforehand. First one
    layer is compared with none, then two with one if one pays, and so on; from then on what is set
    with each of its neighbours in turn. Between trials lie `REST` tokens, twice as many after each
    that changed nothing, `MOST_REST` at most; after one that speaks against what is set the next
    follows at once.
    """

    WARM_UP: Final = 16
    WINDOW: Final = 6
    LEAST_GAIN: Final = 0.02
    PATIENCE: Final = 2
    REST: Final = 128
    MOST_REST: Final = 4096

    def __init__(self, most: int = 1) -> None:
        self.trials: list[Trial] = []
        self.most = most
        self.set_depth = 1
        self._depth = 1
        self._strikes = [self.PATIENCE - 1] * (most + 1)
        self._untried = set(range(1, most + 1))
        self._rest = self.REST
        self._wait = self.WARM_UP
        self._place = -1
        self._times: tuple[list[int], list[int]] = ([], [])

    @property
    def is_set_on(self) -> bool:
        """Whether reading ahead pays, so far as is known."""
        return self.set_depth > 0

    @property
    def depth(self) -> int:
        """How many layers are to be read ahead for the token that comes."""
        if self._place < 0:
            return self.set_depth
        return self._depth - self._is_shallower

    def tell(self, token_ns: int) -> None:
        """A token took `token_ns`, read ahead for as `depth` said."""
        if self._place < 0:
            self._wait -= 1
            if self._wait <= 0:
                self._place = 0
            return
        # The first of a window still feels the one before: blocks read ahead, or not.
        if self._place % self.WINDOW:
            self._times[self._is_shallower].append(token_ns)
        self._place += 1
        if self._place == 4 * self.WINDOW:
            self._judge()

    def verdict(self) -> str:
        """What was decided and why, in words."""
        if not self.trials:
            return "not tried yet: too few tokens"
        last = self.trials[-1]
        state = "on" if self.is_set_on else "off"
        if self.most > 1 and self.is_set_on:
            state = f"{self.set_depth} layer{'s' * (self.set_depth > 1)} ahead"
        word = "saved" if last.gain >= 0 else "cost"
        what, less = ("it", "without")
        if last.depth > 1:
            what, less = f"layer {last.depth}", f"with {last.depth - 1}"
        return (
            f"{state}: in the last of {len(self.trials)} trials {what} {word} "
            f"{abs(last.gain):.1%} ({last.with_ns / 1e6:.3g} ms a token with it, "
            f"{last.without_ns / 1e6:.3g} {less})"
        )

    @property
    def _is_shallower(self) -> bool:
        return self._place // self.WINDOW in (1, 2)

    def _judge(self) -> None:
        depth = self._depth
        trial = Trial(median(self._times[0]), median(self._times[1]), depth)
        self.trials.append(trial)
        self._place = -1
        self._times = ([], [])
        self._untried.discard(depth)
        better = depth if trial.gain >= self.LEAST_GAIN else depth - 1
        if better == self.set_depth:
            self._strikes[depth] = 0
            self._go_on()
            return
        self._strikes[depth] += 1
        if self._strikes[depth] < self.PATIENCE:
            self._place = 0
            return
        self.set_depth = better
        self._strikes[depth] = 0
        self._rest = self.REST
        self._go_on()

    def _go_on(self) -> None:
        """Chooses the next trial and when it is."""
        deeper = self.set_depth + 1
        if deeper in self._untried:
            self._depth, self._place = deeper, 0
            return
        neighbours = [d for d in (self.set_depth, deeper) if 1 <= d <= self.most]
        self._depth = next((d for d in neighbours if d != self._depth), self._depth)
        if self._depth not in neighbours:
            self._depth = neighbours[0]
        self._wait, self._rest = self._rest, min(2 * self._rest, self.MOST_REST)
