"""Generation: pieces of text, and every way it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import UsageError
from colibri_runtime.generate import Piece, StopReason, generate, prompt_tokens
from colibri_runtime.kv_cache import KvCache
from colibri_runtime.sampler import Sampler, SamplingSpec
from colibri_runtime.tokenizer import TextStream
from helpers.memory_model import model_spec
from helpers.random_models import CONFIGS


class Letters:
    """A tokenizer whose token n is the n-th byte of a text that begins with a two-byte letter."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return bytes(tokens).decode(errors="replace")

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        return TextStream(self, context)  # type: ignore[arg-type]


class Script:
    """A decoder that says the bytes of a text, one at a time."""

    def __init__(self, says: bytes, capacity: int = 100) -> None:
        self.kv_cache = KvCache(model_spec(CONFIGS["llama"]), capacity)
        self.fed: list[list[int]] = []
        self._says = iter(says)

    def forward(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.kv_cache.require(len(tokens))
        self.kv_cache.advance(len(tokens))
        self.fed.append(list(tokens))
        logits = np.zeros(256, np.float32)
        logits[next(self._says)] = 1
        return logits


def run(script: Script, prompt: str = "ab", max_tokens: int = 9) -> list[Piece]:
    return list(
        generate(
            script,
            Letters(),  # type: ignore[arg-type]
            list(prompt.encode()),
            Sampler(SamplingSpec()),
            max_tokens=max_tokens,
            eos_tokens=(0,),
        )
    )


def test_tokens_are_fed_back_one_by_one_until_eos() -> None:
    script = Script(b"xy\0z")

    pieces = run(script)

    assert script.fed == [[97, 98], [120], [121]]
    assert pieces == [Piece(120, "x"), Piece(121, "y"), Piece(0, "", StopReason.EOS)]


def test_characters_come_whole() -> None:
    pieces = run(Script("ö!\0".encode()))

    assert [piece.text for piece in pieces] == ["", "ö", "!", ""]


def test_max_tokens_ends_and_shows_what_was_held_back() -> None:
    script = Script("xö".encode())

    pieces = run(script, max_tokens=2)

    assert pieces[-1] == Piece(0xC3, "\ufffd", StopReason.MAX_TOKENS)
    assert len(script.fed) == 2


def test_a_full_context_ends() -> None:
    script = Script(b"xyzxyz", capacity=4)

    pieces = run(script)

    assert [piece.token for piece in pieces] == [120, 121, 122]
    assert pieces[-1].stop is StopReason.CONTEXT


def test_bytes_held_back_come_with_eos() -> None:
    pieces = run(Script(b"\xc3\0"))

    assert pieces[-1] == Piece(0, "\ufffd", StopReason.EOS)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"), [("", 1, "empty-prompt"), ("a", 0, "bad-max-tokens")]
)
def test_nothing_to_do_is_refused(prompt: str, max_tokens: int, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(Script(b""), prompt, max_tokens)

    assert caught.value.code == code


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        run(Script(b"x", capacity=2), "abc")

    assert caught.value.code == "context-full"


def test_an_empty_prompt_begins_with_bos_or_is_refused() -> None:
    assert prompt_tokens(Letters(), "a", 7) == [97]  # type: ignore[arg-type]
    assert prompt_tokens(Letters(), "", 7) == [7]  # type: ignore[arg-type]

    with pytest.raises(UsageError) as caught:
        prompt_tokens(Letters(), "", None)  # type: ignore[arg-type]

    assert caught.value.code == "empty-prompt"
