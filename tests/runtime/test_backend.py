"""The NumPy backend computes with stored bytes, in bounded memory, the same bits every time."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import DTYPES, UsageError
from colibri_format.interleave import interleave
from colibri_runtime.backend import Backend, FeedForward, Matrix, backend_names, load_backend
from colibri_runtime.decoder_errors import ModelError
from colibri_runtime.dequant import dequantise
from colibri_runtime.numpy_backend import TILE_BYTES, NumpyBackend
from helpers.quant_bytes import random_rows

NAMES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k", "q5_k", "iq4_nl")


def stored(name: str, rows: int, columns: int, row_interleave: int = 0) -> Matrix:
    data = random_rows(DTYPES[name], rows, columns, seed=rows + columns).reshape(-1)
    if row_interleave:
        data = interleave(data, DTYPES[name], (rows, columns))
    return Matrix("w", DTYPES[name], (rows, columns), data, row_interleave)


def decoded(name: str, rows: int, columns: int) -> NDArray[np.float32]:
    out = np.empty((rows, columns), np.float32)
    dequantise(random_rows(DTYPES[name], rows, columns, seed=rows + columns), DTYPES[name], out)
    return out


def activations(n_tokens: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal((n_tokens, columns)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_tokens", [1, 2, 9])
def test_matmul_multiplies_with_decoded_weights(name: str, n_tokens: int) -> None:
    # Rows enough for several tiles, the last of them short.
    weight, x = stored(name, 700, 512), activations(n_tokens, 512)

    found = NumpyBackend().matmul(x, weight)

    expected = x.astype(np.float64) @ decoded(name, 700, 512).T.astype(np.float64)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-6


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q6_k", "q4_1"])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_interleaved_rows_give_the_bits_of_plain_rows(name: str, n_tokens: int) -> None:
    x, backend = activations(n_tokens, 512), NumpyBackend()
    ids = np.array([0, 17, 799])

    plain, packed = stored(name, 800, 512), stored(name, 800, 512, 16)

    np.testing.assert_array_equal(backend.matmul(x, packed), backend.matmul(x, plain))
    np.testing.assert_array_equal(backend.rows(packed, ids), backend.rows(plain, ids))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_gathered_in_order_and_repeated(name: str) -> None:
    found = NumpyBackend().rows(stored(name, 40, 512), np.array([39, 0, 39]))

    np.testing.assert_array_equal(found, decoded(name, 40, 512)[[39, 0, 39]])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_the_same_call_gives_the_same_bits_wherever_the_bytes_lie(name: str, n_tokens: int) -> None:
    weight, x = stored(name, 300, 512), activations(n_tokens, 512)
    backend = NumpyBackend()
    expected = backend.matmul(x, weight)
    backend.matmul(activations(3, 1024), stored("q8_0", 64, 1024))

    for shift in (64, 128, 4096):
        memory = np.zeros(weight.data.size + shift, np.uint8)
        memory[shift:] = weight.data
        moved = Matrix("w", weight.dtype, weight.shape, memory[shift:])

        np.testing.assert_array_equal(backend.matmul(x.copy(), moved), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_tokens", [1, 8])
def test_workspace_stays_within_what_is_stated(name: str, n_tokens: int) -> None:
    weight, x = stored(name, 4096, 1024), activations(n_tokens, 1024)
    backend = NumpyBackend()
    backend.matmul(x, stored(name, 16, 1024))
    own = TILE_BYTES

    tracemalloc.start()
    backend.matmul(x, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    result = 4 * n_tokens * 4096
    assert peak + own - result <= backend.workspace_bytes


def test_rows_longer_than_a_tile_are_taken_one_by_one() -> None:
    columns = TILE_BYTES // 4 + 256
    weight, x = stored("q8_0", 3, columns), activations(2, columns)

    found = NumpyBackend().matmul(x, weight)

    expected = x @ decoded("q8_0", 3, columns).T
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("with_biases", [False, True])
def test_feed_forward_is_gated_by_silu(with_biases: bool) -> None:
    x = 40 * activations(3, 512)
    gate, up, down = stored("q8_0", 96, 512), stored("q8_0", 96, 512), stored("f32", 512, 96)
    biases = [activations(1, n)[0] if with_biases else None for n in (96, 96, 512)]

    found = NumpyBackend().feed_forward(x, FeedForward(gate, up, down, *biases))

    wide = x.astype(np.float64)
    matrix = decoded("q8_0", 96, 512).T.astype(np.float64)
    added = [0 if bias is None else bias for bias in biases]
    g, u = wide @ matrix + added[0], wide @ matrix + added[1]
    hidden = g * (0.5 * (1 + np.tanh(g / 2))) * u
    expected = hidden @ decoded("f32", 512, 96).T.astype(np.float64) + added[2]
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-5


def test_activations_of_great_size_do_not_overflow_the_gate() -> None:
    ones = np.full((1, 4), -1000, np.float32)
    eye = Matrix("w", DTYPES["f32"], (4, 4), np.eye(4, dtype=np.float32).view(np.uint8).reshape(-1))

    found = NumpyBackend().feed_forward(ones, FeedForward(eye, eye, eye))

    np.testing.assert_array_equal(found, np.zeros((1, 4)))


def test_check_refuses_a_dtype_without_decoder() -> None:
    NumpyBackend().check("w", DTYPES["q5_k"], "x.colibri")

    with pytest.raises(ModelError) as caught:
        NumpyBackend().check("w", DTYPES["f8_e4m3"], "x.colibri")

    assert caught.value.code == "unsupported-dtype"


def test_the_numpy_backend_is_registered() -> None:
    assert "numpy" in backend_names()
    assert isinstance(load_backend("numpy"), Backend)


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="numpy") as caught:
        load_backend("cuda")

    assert caught.value.code == "unknown-backend"


@dataclass
class FakeEntry:
    made: object
    name: str = "odd"
    value: str = "odd:Backend"

    def load(self) -> object:
        if self.made is None:
            raise ImportError("no module named 'odd'")
        return lambda: self.made


@pytest.mark.parametrize("made", [None, object()])
def test_a_registered_backend_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, made: object
) -> None:
    monkeypatch.setattr("colibri_runtime.backend.entry_points", lambda group: [FakeEntry(made)])

    with pytest.raises(UsageError) as caught:
        load_backend("odd")

    assert caught.value.code == "bad-backend"
