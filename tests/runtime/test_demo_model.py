"""The demo model says what llama.cpp, as recorded, says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_runtime.decoder import Decoder
from colibri_runtime.generate import StopReason, generate
from colibri_runtime.sampler import Sampler, SamplingSpec
from colibri_runtime.tokenizer import load_tokenizer
from helpers.gguf_model import GgufTextFile, gguf_model
from helpers.llamacpp import perplexity
from helpers.llamacpp_compare import greedy_disagreements, log_probabilities
from helpers.memory_model import memory_decoder
from helpers.oracle_texts import PASSAGE, PROMPTS

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.q8_0.gguf"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "tests/fixtures/llamacpp.json").read_text())
    return record["demo"]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return memory_decoder(gguf_model(DEMO), context=160)


def test_greedy_choices_are_those_of_llamacpp_with_float_weights(
    decoder: Decoder, recorded: dict[str, Any]
) -> None:
    assert greedy_disagreements(decoder, recorded["twin"]["greedy"]) == []


def test_greedy_choices_differ_from_llamacpp_at_near_ties_alone(
    decoder: Decoder, recorded: dict[str, Any]
) -> None:
    found = greedy_disagreements(decoder, recorded["stored"]["greedy"])

    # Rounding of activations moves log-probabilities by 0.015 (standard deviation) on this model.
    assert all(d.their_lead < 0.06 and d.our_lead < 0.06 for d in found)
    assert len(found) <= 6


@pytest.mark.parametrize(("kind", "tolerance"), [("twin", 1e-5), ("stored", 5e-3)])
def test_perplexity_is_that_of_llamacpp(
    decoder: Decoder, recorded: dict[str, Any], kind: str, tolerance: float
) -> None:
    ours = log_probabilities(decoder, recorded["passage_tokens"])

    theirs = perplexity(recorded[kind]["log_probabilities"])
    assert perplexity(list(ours)) == pytest.approx(theirs, rel=tolerance)


def test_log_probabilities_are_those_of_llamacpp_with_float_weights(
    decoder: Decoder, recorded: dict[str, Any]
) -> None:
    ours = log_probabilities(decoder, recorded["passage_tokens"])

    np.testing.assert_allclose(ours, recorded["twin"]["log_probabilities"], atol=5e-5)


def test_the_tokenizer_rebuilt_from_keys_gives_the_recorded_tokens(
    recorded: dict[str, Any],
) -> None:
    tokenizer = load_tokenizer(GgufTextFile(DEMO))

    assert tokenizer.encode(PASSAGE) == recorded["passage_tokens"]
    for prompt, run in zip(PROMPTS, recorded["stored"]["greedy"], strict=True):
        assert tokenizer.encode(prompt) == run["prompt_tokens"]


def test_text_comes_out_in_pieces(decoder: Decoder, recorded: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(GgufTextFile(DEMO))
    run = recorded["twin"]["greedy"][0]
    decoder.kv_cache.truncate(0)

    pieces = list(
        generate(decoder, tokenizer, run["prompt_tokens"], Sampler(SamplingSpec()), max_tokens=12)
    )

    assert [piece.token for piece in pieces] == run["tokens"][:12]
    assert pieces[-1].stop is StopReason.MAX_TOKENS
    assert PROMPTS[0] + "".join(piece.text for piece in pieces) == tokenizer.decode(
        run["prompt_tokens"] + run["tokens"][:12]
    )
