"""What followed tokens that were routed like this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._native import native

WINDOW: Final = 128
"""Visits of a layer that are remembered, in 16 KiB a layer."""
SHARPNESS: Final = 10.0
"""Logarithm of how much more a token counts that was routed alike than one that shares nothing."""
FADING: Final = 0.99
"""How much less each further token counts."""
KEPT_A_TOKEN: Final = 0.1
"""What is left of a layer's say in how alike two tokens are when its turn comes again."""
N_AHEAD: Final = 3
"""Successors of a token that was routed alike, whose choices are likely."""
LATER: Final = 0.6
"""How much less each further one of them counts."""
LEAST: Final = 0.02
"""Likelihood from which an expert is told of."""
MAX_PICKS: Final = 16
"""Experts of one event; a batch that asks for more is no token, and is not remembered."""
MAX_LIKELY: Final = 64

# struct colibri_recall of recall.h.
_STATE: Final = np.dtype(
    [
        *((name, "i4") for name in ("window", "max_picks", "max_likely", "n_ahead", "n_experts")),
        *((name, "f4") for name in ("sharpness", "fading", "least", "later")),
        ("reserved", "i4"),
        *(
            (name, "u8")
            for name in (
                "picks", "shares", "sizes", "overlaps", "likelihoods", "is_picked", "touched",
                "likely", "likely_by",
            )
        ),
    ]
)  # fmt: skip


class Recall:
    """Predicts what a layer is asked for at its next visit from what followed similar tokens.

    Two tokens are alike when their layers chose the same experts. The overlap of the present token
    with each of the last `WINDOW` ones is followed through the layers, a decayed mean; each of
    those tokens votes for what its successors chose, with `FADING**lag * exp(SHARPNESS * overlap)`,
    and for later ones less. This is attention over tokens, with routing as key and the routing
    of the tokens that came next as value.

    Computes in C, and in NumPy where the library is missing; equal but for rounding.
    """

    def __init__(self, n_layers: int, *, is_native: bool | None = None) -> None:
        self._picks = np.zeros((n_layers, WINDOW, MAX_PICKS), np.int32)
        self._shares = np.zeros((n_layers, WINDOW, MAX_PICKS), np.float32)
        self._sizes = np.zeros((n_layers, WINDOW), np.int32)
        self._overlaps = np.zeros(WINDOW, np.float32)
        self._visits = [0] * n_layers
        self._seen: set[int] = set()
        self._keep = 0.0
        self._likely = np.zeros(MAX_LIKELY, np.int32)
        self._likely_by = np.zeros(MAX_LIKELY, np.float32)
        self._ages = FADING ** np.arange(1, WINDOW, dtype=np.float32)
        self._lags = np.arange(1, WINDOW)
        self._scratch: list[NDArray[Any]] = []
        self._n_experts = 0
        self._state = np.zeros(1, _STATE)
        library = native().library if is_native in (None, True) else None
        self._call: Callable[..., int] | None = None
        if library is not None:
            self._call = library.function("colibri_recall", "i32", "ptr", "i32", "i64", "f32")
        self._grow(256)

    @property
    def is_native(self) -> bool:
        """Whether it computes in C."""
        return self._call is not None

    def observe(
        self, layer: int, experts: Sequence[int], counts: Sequence[float], *, is_asked: bool = True
    ) -> tuple[list[int], list[float]]:
        """Experts that the layer's next visit is likely to ask for, and how likely each is.

        `experts` of this visit, each once, count `counts`. Unless `is_asked` it is remembered
        alone, and nothing is given.
        """
        visit = self._visits[layer]
        self._visits[layer] = visit + 1
        row = visit % WINDOW
        n = len(experts)
        if n > MAX_PICKS:
            self._sizes[layer, row] = 0
            return [], []
        self._sizes[layer, row] = n
        self._picks[layer, row, :n] = experts
        self._shares[layer, row, :n] = counts
        if n and (top := max(experts)) >= self._n_experts:
            self._grow(top + 1)
        if layer not in self._seen:
            self._seen.add(layer)
            self._keep = KEPT_A_TOKEN ** (1.0 / len(self._seen))
        if not is_asked:
            return [], []
        if self._call is None:
            return self._compute(layer, visit)
        n_likely = self._call(self._address, layer, visit, self._keep)
        return self._likely[:n_likely].tolist(), self._likely_by[:n_likely].tolist()

    def _compute(self, layer: int, visit: int) -> tuple[list[int], list[float]]:
        """As colibri_recall in recall.c."""
        n_past = min(visit, WINDOW - 1)
        rows = (visit - self._lags[:n_past]) % WINDOW
        now = self._picks[layer, visit % WINDOW, : self._sizes[layer, visit % WINDOW]]
        is_picked = np.zeros(self._n_experts, np.float32)
        is_picked[now] = 1.0
        is_there = np.arange(MAX_PICKS) < self._sizes[layer][:, None]
        same = (is_picked[self._picks[layer]] * is_there).sum(axis=1)[rows]
        overlaps = self._overlaps[:n_past]
        overlaps *= self._keep
        if len(now):
            overlaps += np.float32(1.0 - self._keep) * same / np.float32(len(now))
        votes = self._ages[:n_past] * np.exp(np.float32(SHARPNESS) * overlaps)
        likelihoods = np.zeros(self._n_experts)
        for ahead in range(min(N_AHEAD, n_past)):
            # Of the token before, one follows; of the one before that, two.
            rows = (visit - self._lags[ahead:n_past] + 1 + ahead) % WINDOW
            there = is_there[rows]
            by_pick = (votes[ahead:, None] * self._shares[layer][rows])[there] * LATER**ahead
            likelihoods += np.bincount(
                self._picks[layer][rows][there], by_pick, minlength=self._n_experts
            )
        likelihoods /= 1.0 + votes.sum()
        likely = np.flatnonzero(likelihoods >= LEAST)[:MAX_LIKELY]
        return likely.tolist(), likelihoods[likely].tolist()

    def require(self, n_experts: int) -> None:
        """Makes sure that there is room for experts below `n_experts`."""
        if n_experts > self._n_experts:
            self._grow(n_experts)

    @property
    def state_address(self) -> int:
        """Of the struct colibri_recall, which stays where it is."""
        return self._address

    def _grow(self, n_experts: int) -> None:
        """Makes room for experts below `n_experts`, and tells the library where everything is."""
        self._n_experts = max(n_experts, 2 * self._n_experts)
        self._scratch = [
            np.zeros(self._n_experts, kind) for kind in (np.float32, np.uint8, np.int32)
        ]
        places = (
            self._picks, self._shares, self._sizes, self._overlaps, *self._scratch,
            self._likely, self._likely_by,
        )  # fmt: skip
        self._state[0] = (
            WINDOW, MAX_PICKS, MAX_LIKELY, N_AHEAD, self._n_experts,
            SHARPNESS, FADING, LEAST, LATER, 0,
            *(place.ctypes.data for place in places),
        )  # fmt: skip
        self._address = self._state.ctypes.data
