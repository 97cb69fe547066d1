"""Live: random models of every family beside transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.memory_model import memory_decoder, memory_file
from helpers.random_models import CONFIGS, prompt_tokens
from helpers.transformers_logits import checkpoint_names, saved_names, transformers_logits

pytestmark = [
    pytest.mark.oracle,
    # Warnings of torch and transformers about themselves say nothing about this project.
    pytest.mark.filterwarnings("default"),
]
FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str) -> None:
    expected = transformers_logits(name)

    logits = memory_decoder(memory_file(name), seed=0).forward(prompt_tokens(name), True)

    assert len(logits) >= 32
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_logits_still_hold(name: str) -> None:
    with np.load(FIXTURES / "transformers_logits.npz") as file:
        recorded = file[name]

    np.testing.assert_allclose(transformers_logits(name), recorded, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_tensor_names_are_those_transformers_saves(name: str) -> None:
    assert saved_names(name) == checkpoint_names(name)
