"""What a configuration leaves open is chosen to suit backend, model and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import colibri_format
from colibri_format import UsageError
from colibri_runtime.backend import Backend
from colibri_runtime.choices import make_backend, settle
from colibri_runtime.config import RunConfig
from colibri_runtime.native_backend import NativeBackend, default_threads
from colibri_runtime.numpy_backend import NumpyBackend
from colibri_runtime.runtime import Runtime, read_model
from helpers.kernel_calls import runtime_library
from helpers.random_colibri import make_model, write_random_colibri

GIB = 2**30


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("choices") / "moe.colibri"
    model = make_model(n_layers=1, hidden=96, width=64, n_experts=4, top_k=2, context_length=4096)
    write_random_colibri(path, model)
    return path


def settled(path: Path, config: RunConfig, backend: Backend, available: int | None) -> RunConfig:
    with colibri_format.open(path) as reader:
        return settle(reader, read_model(reader), backend, config, lambda: available)


def test_numpy_takes_small_batches_and_whole_numbers(model_file: Path) -> None:
    found = settled(model_file, RunConfig(), NumpyBackend(), 64 * GIB)

    assert (found.context, found.batch_size, found.kv_dtype) == (2048, 32, "f32")


def test_a_native_batch_is_large_where_there_is_room_for_it(model_file: Path) -> None:
    runtime_library()
    backend = NativeBackend(n_threads=1)
    sizes = [
        settled(model_file, RunConfig(), backend, available).batch_size
        for available in (64 * GIB, 40 * 2**20, 6 * 2**20, None)
    ]
    given = settled(model_file, RunConfig(memory_bytes=64 * GIB), backend, 2**20)
    backend.close()

    assert sizes[0] == given.batch_size == 512
    assert sizes[1] is not None and 32 < sizes[1] < 512
    assert sizes[2:] == [32, 32]
    assert given.kv_dtype == "f16"


def test_what_was_given_is_kept_and_a_batch_is_no_longer_than_the_context(
    model_file: Path,
) -> None:
    config = RunConfig(context=40, batch_size=64, kv_dtype="f16")

    found = settled(model_file, config, NumpyBackend(), None)

    assert (found.context, found.batch_size, found.kv_dtype) == (40, 40, "f16")


def test_without_a_library_numpy_computes_and_says_why(
    monkeypatch: pytest.MonkeyPatch, model_file: Path
) -> None:
    monkeypatch.setattr("colibri_runtime.backend.native", _Absent)

    with Runtime.open(model_file, RunConfig(memory_bytes=64 * 2**20, context=40)) as runtime:
        assert runtime.backend.name == "numpy"
        assert "many times slower: no compiler" in runtime.backend.notes[0]  # type: ignore[attr-defined]
        assert runtime.config.kv_dtype == "f32"


class _Absent:
    library = None
    reason = "no compiler"


def test_the_native_backend_is_refused_without_its_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("colibri_runtime.native_backend.native", _Absent)

    with pytest.raises(UsageError, match="no compiler") as caught:
        NativeBackend()

    assert caught.value.code == "no-native"


def test_threads_are_taken_by_the_native_backend_and_refused_by_others() -> None:
    runtime_library()
    backend = make_backend(RunConfig(threads=3))

    assert isinstance(backend, NativeBackend)
    assert backend.n_threads == 3
    assert "3 threads" in backend.summary
    backend.close()
    with pytest.raises(UsageError) as caught:
        make_backend(RunConfig(threads=3, backend="numpy"))
    assert caught.value.code == "bad-backend"


def test_threads_by_default_are_no_more_than_processors() -> None:
    assert 1 <= default_threads() <= 2
