"""From a checkpoint's folder through a `.colibri` file to logits, whatever memory there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_repack import repack
from colibri_runtime._native import native
from colibri_runtime.config import RunConfig
from colibri_runtime.pool_plan import SLOT_OVERHEAD
from colibri_runtime.runtime import Runtime
from helpers.random_models import CONFIGS, prompt_tokens, write_checkpoint

FIXTURES = Path(__file__).parent.parent / "fixtures"
CONTEXT = 64


@pytest.fixture(params=["numpy", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native().library is None:
        pytest.skip(native().reason)
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def recorded() -> dict[str, NDArray[np.float32]]:
    with np.load(FIXTURES / "transformers_logits.npz") as file:
        return dict(file)


@pytest.fixture(scope="module", params=CONFIGS)
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The name of a random model, and its file repacked with `keep`."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder / "checkpoint", request.param)
    repack(folder / "checkpoint", folder / "model.colibri")
    return request.param, folder / "model.colibri"


def configured(path: Path, share: float, **options: Any) -> RunConfig:
    """A budget with slots for that share of the blocks."""
    with Runtime.open(path, RunConfig(memory_bytes=2**40, context=CONTEXT, **options)) as runtime:
        plan = runtime.plan
    spared = plan.n_blocks - max(1, int(plan.n_blocks * share))
    budget = plan.total_bytes - spared * (plan.slot_bytes + SLOT_OVERHEAD)
    return RunConfig(memory_bytes=budget, context=CONTEXT, **options)


def test_logits_of_a_repacked_checkpoint_are_those_of_transformers(
    packed: tuple[str, Path], recorded: dict[str, NDArray[np.float32]], backend: str
) -> None:
    name, path = packed
    config = RunConfig(memory_bytes=2**30, context=CONTEXT, backend=backend, kv_dtype="f32")
    with Runtime.open(path, config) as runtime:
        logits = runtime.decoder.forward(prompt_tokens(name), all_logits=True)

    difference = np.abs(logits - recorded[name]).max() / np.abs(recorded[name]).max()
    print(f"{name}, {backend}: logits differ by {difference:.1e} relative")  # for docs/testing.md
    assert len(logits) >= 32
    assert difference < 1e-4


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("prefetch_depth", [0, 2])
def test_a_quarter_of_the_experts_in_memory_gives_the_same_bits(
    packed: tuple[str, Path], batch_size: int, prefetch_depth: int, backend: str
) -> None:
    name, path = packed
    tokens = prompt_tokens(name)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "prefetch_depth": prefetch_depth,
        "backend": backend,
    }
    with Runtime.open(path, RunConfig(memory_bytes=2**30, context=CONTEXT, **options)) as runtime:
        assert runtime.plan.n_slots == runtime.plan.n_blocks
        expected = runtime.decoder.forward(tokens, all_logits=True)

    with Runtime.open(path, configured(path, 0.25, **options)) as runtime:
        assert runtime.plan.n_slots <= max(1, runtime.plan.n_blocks // 4)
        logits = runtime.decoder.forward(tokens, all_logits=True)

    np.testing.assert_array_equal(logits, expected)


def test_one_call_a_token_gives_the_same_bits_as_one_a_step(packed: tuple[str, Path]) -> None:
    if native().library is None:
        pytest.skip(native().reason)
    name, path = packed
    tokens = prompt_tokens(name)
    found = []
    for is_joined in (True, False):
        with Runtime.open(path, configured(path, 0.4, backend="native")) as runtime:
            decoder = runtime.decoder
            assert decoder._joined is not None
            if not is_joined:
                decoder._joined = None
            found.append([decoder.forward([token]) for token in tokens])

    np.testing.assert_array_equal(found[0], found[1])
