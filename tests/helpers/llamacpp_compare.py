"""A decoder's logits beside what llama.cpp said of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_runtime.decoder import Decoder

from .llamacpp import perplexity


@dataclass(frozen=True)
class Disagreement:
    """A step where the first choices differ, and how far each was ahead of the other's."""

    prompt: int
    step: int
    their_lead: float
    our_lead: float


def greedy_disagreements(decoder: Decoder, runs: list[dict[str, Any]]) -> list[Disagreement]:
    """Steps at which the decoder, fed llama.cpp's own continuation, would choose otherwise.

    Feeding theirs keeps the steps after a near-tie comparable. `our_lead` is in log-probability:
    our choice over theirs.
    """
    found = []
    for prompt, run in enumerate(runs):
        before, made = run["prompt_tokens"], run["tokens"]
        decoder.kv_cache.truncate(0)
        logits = decoder.forward(before + made[:-1], all_logits=True)[len(before) - 1 :]
        for step, (token, lead) in enumerate(zip(made, run["leads"], strict=True)):
            best = int(np.argmax(logits[step]))
            if best != token:
                ours = float(logits[step, best] - logits[step, token])
                found.append(Disagreement(prompt, step, lead, ours))
    return found


def log_probabilities(decoder: Decoder, tokens: list[int]) -> NDArray[np.float64]:
    """Of each of `tokens` but the first, given those before it."""
    decoder.kv_cache.truncate(0)
    logits = decoder.forward(tokens[:-1], all_logits=True).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found: NDArray[np.float64] = logits[np.arange(len(tokens) - 1), tokens[1:]]
    return found


def long_text_perplexities(decoder: Decoder, record: dict[str, Any]) -> tuple[float, float]:
    """Ours and llama.cpp's of a text that was recorded in windows (record_llamacpp_long.py)."""
    ours = [float(p) for w in record["windows"] for p in log_probabilities(decoder, w)]
    theirs = [p for window in record["log_probabilities"] for p in window]
    return perplexity(ours), perplexity(theirs)
