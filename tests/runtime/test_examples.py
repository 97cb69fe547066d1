"""The examples run, and two engines that share nothing but the store agree."""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import colibri_format
from colibri_format import Role
from colibri_runtime.dequant import dequantise
from helpers.random_colibri import make_model, write_random_colibri

EXAMPLES = Path(__file__).parents[2] / "packages/colibri-runtime/examples"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "moe.colibri"
    write_random_colibri(path, make_model(n_layers=3, hidden=64, width=96, n_experts=8))
    return path


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in ("foreign_numpy", "foreign_c"):
        sys.modules.pop(name, None)


def expected_state(path, n_tokens, route):
    """The same without any store: blocks read one by one."""
    with colibri_format.open(path) as reader:
        routers = [
            reader.tensor(f"blk.{layer}.ffn_gate_inp.weight").read().view(np.float32).reshape(8, 64)
            for layer in range(3)
        ]
        rng = np.random.default_rng(0)
        for _ in range(n_tokens):
            state = rng.standard_normal(64, np.float32)
            for layer, router in enumerate(routers):
                out = np.zeros(64, np.float32)
                for expert, share in zip(*route(router, state), strict=True):
                    block = reader.expert(layer, int(expert))
                    data = block.read()
                    matrices = {}
                    for segment in block.layout.segments:
                        matrix = np.empty(segment.shape, np.float32)
                        rows = data[segment.offset : segment.offset + segment.size]
                        dequantise(rows.reshape(len(matrix), -1), segment.dtype, matrix)
                        matrices[segment.role] = matrix
                    gate = matrices[Role.GATE] @ state
                    silu = gate / (1 + np.exp(-gate))
                    out += share * (matrices[Role.DOWN] @ (silu * (matrices[Role.UP] @ state)))
                state = state + out
                state /= np.sqrt(np.mean(state * state))
    return state


@pytest.mark.parametrize("memory", [2**20, 60_000])
def test_a_numpy_engine_of_its_own(model_file, example, memory):
    module = example("foreign_numpy")

    state = module.run(model_file, memory, 5)

    assert np.allclose(state, expected_state(model_file, 5, module.route), atol=1e-4)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("memory", [2**20, 60_000])
def test_a_c_kernel_that_is_given_pointers(model_file, example, memory):
    numpy_engine, c_engine = example("foreign_numpy"), example("foreign_c")

    state = c_engine.run(model_file, memory, 5)

    assert np.allclose(state, numpy_engine.run(model_file, 2**20, 5), atol=1e-4)


def test_the_commands_tell_what_the_store_did(model_file, example, capsys):
    assert example("foreign_numpy").main([str(model_file), "--memory", "1M", "--tokens", "2"]) == 0

    assert "2 tokens" in capsys.readouterr().out
