"""A model planned, loaded and run in its budget."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import colibri_format
from colibri_format import FormatError, UsageError
from colibri_runtime.backend import load_backend
from colibri_runtime.budget import total_bytes
from colibri_runtime.config import RunConfig
from colibri_runtime.disk_files import IoMode
from colibri_runtime.errors import BudgetError
from colibri_runtime.runtime import Runtime, describe_needs, open_store, plan_run, read_model
from helpers.random_colibri import make_model, write_random_colibri

MIB = 2**20


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runtime") / "moe.colibri"
    write_random_colibri(path, make_model(n_layers=3, hidden=96, width=64, n_experts=7, top_k=2))
    return path


def needs_of(path, config):
    with colibri_format.open(path) as reader:
        return describe_needs(reader, read_model(reader), load_backend(config.backend), config)


def test_logits_are_the_same_bits_however_small_the_pool(model_file):
    config = RunConfig(memory_bytes=64 * MIB, context=40, batch_size=32)
    needs = needs_of(model_file, config)
    tokens = list(range(20, 52))
    with Runtime.open(model_file, config) as runtime:
        assert runtime.plan.n_slots == 21
        expected = runtime.decoder.forward(tokens, all_logits=True)

    for n_slots in (1, 2, 5):
        for depth in (0, 1, 2):
            tight = RunConfig(
                memory_bytes=total_bytes(needs, n_slots, io_threads=2),
                context=40,
                prefetch_depth=depth,
            )
            with Runtime.open(model_file, tight) as runtime:
                assert runtime.plan.n_slots == n_slots
                logits = runtime.decoder.forward(tokens, all_logits=True)
            assert np.array_equal(logits, expected)


def test_a_mixed_model_striped_over_volumes_runs_in_any_pool(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    path = tmp_path / "moe.colibri"
    model = make_model(n_layers=3, hidden=96, width=64, n_experts=7, top_k=2)
    write_random_colibri(path, model, is_mixed=True, volume_folders=folders)
    tokens = list(range(20, 32))
    config = RunConfig(memory_bytes=64 * MIB, context=40)

    with pytest.raises(FormatError) as caught:
        Runtime.open(path, config)
    assert caught.value.code == "volume-missing"
    with Runtime.open(path, config, volumes=folders, progress=lambda *_: None) as runtime:
        roomy = runtime.plan
        expected = runtime.decoder.forward(tokens, all_logits=True)
    tight = replace(config, memory_bytes=roomy.smallest_bytes + 5 * roomy.slot_bytes)
    with Runtime.open(path, tight, volumes=folders) as runtime:
        assert runtime.plan.n_slots < roomy.n_slots == roomy.n_blocks
        logits = runtime.decoder.forward(tokens, all_logits=True)

    assert np.isfinite(expected).all()
    assert np.array_equal(logits, expected)


def test_history_is_kept_and_begun_with(tmp_path, model_file):
    config = RunConfig(memory_bytes=64 * MIB, context=40, history=tmp_path / "a.history")
    with Runtime.open(model_file, config) as runtime:
        assert runtime.plan.slots.expected_hit_share is None
        runtime.decoder.forward(list(range(20, 32)))
        runtime.save_history()
        n_asks = runtime.store.stats.total().n_asks

    with Runtime.open(model_file, config) as runtime:
        assert runtime.plan.slots.expected_hit_share == 1
        assert runtime.history.counts().sum() == n_asks
        assert runtime.store.stats.total().n_asks == 0

    (tmp_path / "a.history").write_bytes(b"nonsense")
    with pytest.raises(FormatError) as caught:
        Runtime.open(model_file, config)
    assert caught.value.code == "history-magic"


def test_what_is_allocated_is_what_was_planned(model_file):
    with Runtime.open(model_file, RunConfig(memory_bytes=64 * MIB, context=40)) as runtime:
        assert runtime.weights.size_bytes == runtime.plan.dense_bytes
        assert runtime.kv_cache.size_bytes == runtime.plan.kv_bytes
        assert runtime.store.pool.mapped_bytes == runtime.plan.pool_bytes


def test_a_small_budget_is_refused_before_anything_is_loaded(model_file):
    with pytest.raises(BudgetError) as caught:
        Runtime.open(model_file, RunConfig(memory_bytes=MIB))

    assert caught.value.code == "budget-too-small"


def test_loading_tells_how_far_it_is(model_file):
    told = []

    with Runtime.open(
        model_file,
        RunConfig(memory_bytes=64 * MIB, context=40),
        progress=lambda done, total: told.append((done, total)),
    ) as runtime:
        total = runtime.plan.dense_bytes

    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {whole for _, whole in told} == {total}
    assert told[-1][0] > total / 2


def test_the_default_context_is_short_and_the_models_own_is_the_limit(model_file):
    assert needs_of(model_file, RunConfig()) == needs_of(model_file, RunConfig(context=512))
    with pytest.raises(UsageError) as caught:
        needs_of(model_file, RunConfig(context=513))

    assert caught.value.code == "bad-context"


def test_a_budget_above_what_is_available_is_noted(model_file):
    config = RunConfig(memory_bytes=64 * MIB, context=40)
    needs = needs_of(model_file, config)

    assert "may end the run" in plan_run(needs, config, lambda: MIB).notes[-1]
    assert plan_run(needs, config, lambda: None).notes == ()


def test_without_a_budget_what_is_available_decides(model_file):
    config = RunConfig(context=40)
    needs = needs_of(model_file, config)
    room = total_bytes(needs, 9, io_threads=2)

    assert plan_run(needs, config, lambda: int(room / 0.8) + 2).n_slots == 9
    assert plan_run(needs, config, lambda: 2**40).n_slots == 21


def test_a_file_without_a_model_is_refused(tmp_path):
    path = tmp_path / "a.colibri"
    model = make_model(n_layers=1, hidden=64, width=32, n_experts=2)
    write_random_colibri(path, model, files={"model.json": None})

    with pytest.raises(FormatError) as caught:
        Runtime.open(path)

    assert caught.value.code == "bad-model"


def test_buffered_reads_can_be_asked_for(model_file):
    config = RunConfig(memory_bytes=64 * MIB, context=40, is_direct=False)
    with Runtime.open(model_file, config) as runtime:
        report = runtime.store.io_report

    assert (report.mode, report.reason) == (IoMode.BUFFERED, "not asked for")


def test_a_file_replaced_after_it_was_opened_is_refused(tmp_path, model_file):
    path = tmp_path / "a.colibri"
    path.write_bytes(model_file.read_bytes())
    config = RunConfig(memory_bytes=64 * MIB, context=40)
    with colibri_format.open(path) as reader:
        plan = plan_run(needs_of(path, config), config)
        path.unlink()
        path.write_bytes(bytes(4096))

        with pytest.raises(colibri_format.StorageError) as caught:
            open_store(reader, plan, config)

    assert caught.value.code == "file-changed"


@pytest.mark.parametrize(
    "option",
    [
        {"memory_bytes": 0},
        {"context": 0},
        {"prefetch_depth": 3},
        {"io_threads": 65},
        {"batch_size": 0},
        {"threads": 0},
        {"threads": 257},
        {"kv_dtype": "f8"},
    ],
)
def test_knobs_out_of_range_are_refused(option):
    with pytest.raises(UsageError) as caught:
        RunConfig(**option)

    assert caught.value.code == "bad-option"
