"""From the demo GGUF through a `.colibri` file to the text llama.cpp gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format
from colibri_repack import repack
from colibri_runtime.config import RunConfig
from colibri_runtime.generate import generate
from colibri_runtime.runtime import Runtime
from colibri_runtime.sampler import Sampler, SamplingSpec
from colibri_runtime.tokenizer import load_tokenizer
from helpers.gguf_model import gguf_model
from helpers.kernel_calls import runtime_library
from helpers.llamacpp import perplexity
from helpers.llamacpp_compare import (
    greedy_disagreements,
    log_probabilities,
    long_text_perplexities,
)
from helpers.memory_model import memory_decoder
from helpers.oracle_texts import PROMPTS

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.q8_0.gguf"
# llama.cpp computing in float32 throughout, with the float twin, is what NumPy does with stored
# weights; the native backend rounds activations as llama.cpp does where weights are stored.
CONFIG = RunConfig(memory_bytes=14 * 2**20, context=160, backend="numpy")
NATIVE = RunConfig(memory_bytes=14 * 2**20, context=160, backend="auto", kv_dtype="f32")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.colibri"
    repack(DEMO, path)
    return path


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "tests/fixtures/llamacpp.json").read_text())
    return record["demo"]


def test_text_is_that_of_llamacpp_under_a_small_budget(
    packed: Path, recorded: dict[str, Any]
) -> None:
    with Runtime.open(packed, CONFIG) as runtime:
        tokenizer = load_tokenizer(runtime.reader)
        assert runtime.plan.n_slots < runtime.plan.n_blocks / 2
        for prompt, run in zip(PROMPTS, recorded["twin"]["greedy"], strict=True):
            runtime.kv_cache.truncate(0)
            sampler = Sampler(SamplingSpec())
            tokens = tokenizer.encode(prompt)
            pieces = list(generate(runtime.decoder, tokenizer, tokens, sampler, max_tokens=48))

            assert [piece.token for piece in pieces] == run["tokens"]
            assert "".join(p.text for p in pieces) == tokenizer.decode(run["tokens"])


def test_interleaved_rows_give_the_same_text(tmp_path: Path, recorded: dict[str, Any]) -> None:
    repack(DEMO, tmp_path / "x16.colibri", layout="x16")
    run = recorded["twin"]["greedy"][0]

    with Runtime.open(tmp_path / "x16.colibri", CONFIG) as runtime:
        assert runtime.reader.tensors["blk.0.attn_q.weight"].row_interleave == 16
        tokenizer = load_tokenizer(runtime.reader)
        tokens = tokenizer.encode(PROMPTS[0])
        made = generate(runtime.decoder, tokenizer, tokens, Sampler(SamplingSpec()), max_tokens=8)

        assert [piece.token for piece in made] == run["tokens"][:8]


@pytest.mark.parametrize(
    ("config", "kind", "margin"),
    [
        (CONFIG, "twin", 0.0),
        (CONFIG, "stored", 0.06),
        (NATIVE, "stored", 0.06),
        (replace(NATIVE, kv_dtype="f16"), "stored", 0.1),
    ],
)
def test_choices_differ_at_near_ties_alone(
    packed: Path, recorded: dict[str, Any], config: RunConfig, kind: str, margin: float
) -> None:
    with Runtime.open(packed, config) as runtime:
        found = greedy_disagreements(runtime.decoder, recorded[kind]["greedy"])

    assert all(d.their_lead < margin and d.our_lead < margin for d in found)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (CONFIG, "twin"),
        (CONFIG, "stored"),
        (NATIVE, "stored"),
        (replace(NATIVE, kv_dtype="f16"), "stored"),
    ],
)
def test_perplexity_is_within_half_a_percent(
    packed: Path, recorded: dict[str, Any], config: RunConfig, kind: str
) -> None:
    with Runtime.open(packed, config) as runtime:
        ours = log_probabilities(runtime.decoder, recorded["passage_tokens"])

    theirs = perplexity(recorded[kind]["log_probabilities"])
    assert perplexity(list(ours)) == pytest.approx(theirs, rel=5e-3)


def test_repacking_changes_no_bit_of_the_logits(packed: Path, recorded: dict[str, Any]) -> None:
    tokens = recorded["passage_tokens"][:40]
    with Runtime.open(packed, CONFIG) as runtime:
        logits = runtime.decoder.forward(tokens)

    np.testing.assert_array_equal(logits, memory_decoder(gguf_model(DEMO)).forward(tokens))


def test_the_embedded_keys_give_the_tokenizer_of_the_gguf(
    packed: Path, recorded: dict[str, Any]
) -> None:
    with colibri_format.open(packed) as reader:
        tokenizer = load_tokenizer(reader)

    assert tokenizer.encode(PROMPTS[0]) == recorded["twin"]["greedy"][0]["prompt_tokens"]


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_native_perplexity_of_a_longer_text_is_that_of_llamacpp(
    packed: Path, kv_dtype: str
) -> None:
    """Over some thousand tokens what single roundings move averages out."""
    runtime_library()
    record = json.loads((ROOT / "tests/fixtures/llamacpp_long.json").read_text())["demo"]
    config = RunConfig(context=256, backend="auto", kv_dtype=kv_dtype)
    with Runtime.open(packed, config) as runtime:
        ours, theirs = long_text_perplexities(runtime.decoder, record)
    print(f"demo, {kv_dtype}: perplexity {ours:.4f}, llama.cpp {theirs:.4f}")
    assert ours == pytest.approx(theirs, rel=5e-3)
