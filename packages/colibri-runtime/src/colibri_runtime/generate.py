"""Text from a prompt, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from colibri_format import UsageError

from .backend import Floats
from .kv_cache import KvCache
from .sampler import Sampler
from .tokenizer import Tokenizer


class StopReason(StrEnum):
    """Why generation ended."""

    EOS = "eos"
    MAX_TOKENS = "max-tokens"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, the text it completes (often empty inside a character), and why it is the last.

    A token that ends the text has no text of its own. `stop` is None for all but the last.
    """

    token: int
    text: str
    stop: StopReason | None = None


class Forward(Protocol):
    """The part of a decoder that generation needs."""

    kv_cache: KvCache

    def forward(self, tokens: Sequence[int]) -> Floats: ...


def prompt_tokens(tokenizer: Tokenizer, prompt: str, bos_token: int | None = None) -> list[int]:
    """Tokens of `prompt`; of an empty one, the model's bos.

    Raises:
        UsageError: `empty-prompt` when there is no token to begin with.
    """
    tokens = tokenizer.encode(prompt)
    if tokens:
        return tokens
    if bos_token is None:
        raise UsageError(
            "empty-prompt",
            "prompt",
            "is empty, and the model has no token that begins a text",
            "at least one token",
            "give a prompt",
        )
    return [bos_token]


def generate(
    decoder: Forward,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    sampler: Sampler,
    *,
    max_tokens: int,
    eos_tokens: Sequence[int] = (),
) -> Iterator[Piece]:
    """The continuation of `tokens`, which follow what the decoder's KV cache holds.

    Ends at one of `eos_tokens`, after `max_tokens`, or when the KV cache is full. The last piece
    says which, and its text completes what was held back.

    Raises:
        UsageError: `empty-prompt`, `bad-max-tokens`, and what `Decoder.forward` raises; all at
            the first step.
    """
    if not tokens:
        raise UsageError("empty-prompt", "prompt", "has no tokens", "at least one", "give a prompt")
    if max_tokens < 1:
        raise UsageError(
            "bad-max-tokens", "generation", f"max_tokens is {max_tokens}", "at least 1"
        )
    stream = tokenizer.stream(tokens)
    logits = decoder.forward(tokens)
    for n_made in range(1, max_tokens + 1):
        token = sampler.choose(logits)
        if token in eos_tokens:
            yield Piece(token, stream.finish(), StopReason.EOS)
            return
        text = stream.push(token)
        stop = None
        if n_made == max_tokens:
            stop = StopReason.MAX_TOKENS
        elif decoder.kv_cache.length >= decoder.kv_cache.capacity:
            stop = StopReason.CONTEXT
        if stop is not None:
            yield Piece(token, text + stream.finish(), stop)
            return
        yield Piece(token, text)
        logits = decoder.forward([token])
