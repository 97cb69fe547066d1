"""Choosing a token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from colibri_format import UsageError

from .backend import Floats
from .decoder_errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are chosen.

    `temperature` 0 takes the likeliest. Otherwise, in llama.cpp's order: the `top_k` likeliest
    are kept (0: all), of these the fewest whose probability reaches `top_p` (Holtzman et al.
    2019, arXiv 1904.09751), and the rest is drawn at `temperature`. `seed` fixes the draws;
    None takes one from the system.

    Raises:
        UsageError: `bad-sampling` naming the member that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise _bad("temperature", self.temperature, "a finite number of at least 0")
        if self.top_k < 0:
            raise _bad("top_k", self.top_k, "at least 0 (0: no limit)")
        if not 0 < self.top_p <= 1:
            raise _bad("top_p", self.top_p, "above 0 and at most 1")
        if self.seed is not None and self.seed < 0:
            raise _bad("seed", self.seed, "a whole number of at least 0")


class Sampler:
    """Draws tokens by a `SamplingSpec`; the same seed and logits give the same tokens.

    Random numbers come from NumPy's PCG64, one a token, so that the n-th draw does not depend
    on the numbers of candidates before it.
    """

    def __init__(self, spec: SamplingSpec) -> None:
        self.spec = spec
        self._random = np.random.Generator(np.random.PCG64(spec.seed))

    def choose(self, logits: Floats) -> int:
        """A token by `logits`, `(vocab_size,) float32`, which stay as they are.

        Of equal logits the lower token counts as likelier.

        Raises:
            ModelError: `bad-logits` when one of them is not a number, or none is finite.
        """
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise ModelError(
                "bad-logits",
                "model",
                f"the logit of token {best} is {logits[best]}",
                "finite logits",
                "its weights hold NaN or infinity: run colibri verify on the file, or repack a "
                "sound source",
            )
        if self.spec.temperature == 0:
            return best
        candidates, probabilities = _candidates(logits, self.spec)
        totals = np.cumsum(probabilities)
        drawn = int(np.searchsorted(totals, self._random.random() * totals[-1], side="right"))
        return int(candidates[min(drawn, len(candidates) - 1)])


def _candidates(
    logits: Floats, spec: SamplingSpec
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Tokens that may be drawn, likeliest first, and their probabilities."""
    order = np.argsort(-logits, kind="stable")
    if spec.top_k:
        order = order[: spec.top_k]
    shifted = logits[order].astype(np.float64) - float(logits[order[0]])
    if spec.top_p < 1:
        shares = np.exp(shifted)
        totals = np.cumsum(shares) / shares.sum()
        n_kept = int(np.searchsorted(totals, spec.top_p, side="left")) + 1
        order, shifted = order[:n_kept], shifted[:n_kept]
    # A tiny temperature sends all but the likeliest to minus infinity, as it should.
    with np.errstate(over="ignore"):
        shares = np.exp(shifted / spec.temperature)
    return order, shares / shares.sum()


def _bad(name: str, value: object, required: str) -> UsageError:
    return UsageError("bad-sampling", "sampling", f"{name} is {value!r}", required)
