"""A token in one call to C: the same results and the same reads as step by step, and its errors."""

import gc
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format
from colibri_format import FormatError, StorageError, UsageError
from colibri_runtime._native import native
from colibri_runtime.backend import load_backend
from colibri_runtime.blocks import BlockTable
from colibri_runtime.config import RunConfig
from colibri_runtime.decoder import Decoder
from colibri_runtime.kv_cache import KvCache
from colibri_runtime.opening import open_pool
from colibri_runtime.pool_plan import plan_pool
from colibri_runtime.runtime import Runtime, read_model
from colibri_runtime.timeline import Timeline
from colibri_runtime.weights import load_weights
from helpers.random_colibri import make_model, write_random_colibri

pytestmark = pytest.mark.skipif(native().library is None, reason="no C library")

MIB = 2**20
MODEL = make_model(n_layers=4, hidden=96, width=128, n_experts=12, top_k=3)
TIMES = ("stall_ns", "compute_ns", "read_ns", "checksum_ns", "n_waits", "queue_depth")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pass") / "moe.colibri"
    write_random_colibri(path, MODEL, is_mixed=True)
    return path


def tight(path: Path, **options: Any) -> RunConfig:
    """Room for a third of the blocks."""
    config = RunConfig(memory_bytes=64 * MIB, context=128, backend="native", **options)
    with Runtime.open(path, config) as runtime:
        plan = runtime.plan
    n_bytes = plan.total_bytes - 2 * plan.n_blocks // 3 * (plan.slot_bytes + 1280)
    return RunConfig(memory_bytes=n_bytes, context=128, backend="native", **options)


def tokens_of(n: int) -> list[int]:
    return np.random.default_rng(4).integers(0, 250, n).tolist()


def test_a_token_asks_the_store_for_the_same_and_gives_the_same(model_file: Path) -> None:
    config = tight(model_file, prefetch_depth=0)
    logits, counts, kept = [], [], []
    for is_joined in (True, False):
        with Runtime.open(model_file, config) as runtime:
            decoder, store = runtime.decoder, runtime.store
            assert decoder._joined is not None
            if not is_joined:
                decoder._joined = None
            logits.append([decoder.forward([token]) for token in tokens_of(90)])
            layers = [layer.as_dict() for layer in store.stats.layers]
            counts.append([{k: v for k, v in d.items() if k not in TIMES} for d in layers])
            kept.append(sorted(store.cache.owners().values()))
            passes = store.passes
            assert passes.n_ended == 89
            assert {done.n_asks_most for done in passes.recent} == {3}
            assert sum(done.counts.n_fetches for done in passes.recent) == 89 * 4

    np.testing.assert_array_equal(logits[0], logits[1])
    assert counts[0] == counts[1]
    assert counts[0][2]["n_misses"] > 0
    assert kept[0] == kept[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_foretold_is_read_ahead_and_changes_no_bit(model_file: Path, depth: int) -> None:
    with Runtime.open(model_file, tight(model_file, prefetch_depth=0)) as runtime:
        expected = [runtime.decoder.forward([token]) for token in tokens_of(60)]
    with Runtime.open(model_file, tight(model_file, prefetch_depth=depth)) as runtime:
        assert runtime.decoder._joined is not None
        found = [runtime.decoder.forward([token]) for token in tokens_of(60)]
        total = runtime.store.stats.total()

    np.testing.assert_array_equal(found, expected)
    assert total.n_prefetched > 0
    assert 0 < total.n_recalled <= total.n_predicted


def test_batches_and_single_tokens_take_turns(model_file: Path) -> None:
    chunks = [[5], [8, 9, 1], [7], [2], list(range(30)), [4]]
    found = []
    for is_joined in (True, False):
        with Runtime.open(model_file, tight(model_file)) as runtime:
            if not is_joined:
                runtime.decoder._joined = None
            found.append([runtime.decoder.forward(chunk) for chunk in chunks])
    np.testing.assert_array_equal(found[0], found[1])


def test_whoever_is_told_of_steps_has_them_one_by_one(model_file: Path, tmp_path: Path) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.layers: list[int] = []

        def routed(self, layer: int, *_: object) -> None:
            self.layers.append(layer)

    watcher, timeline = Watcher(), Timeline()
    with Runtime.open(model_file, tight(model_file), observer=watcher) as runtime:
        assert runtime.decoder._joined is None
        runtime.decoder.forward([1])
    assert watcher.layers == [0, 1, 2, 3]
    with Runtime.open(model_file, tight(model_file), timeline=timeline) as runtime:
        runtime.decoder.forward([1])
    assert len(timeline.passes) == 1
    for options in (
        {"history": tmp_path / "history"}, {"prefetch_from": "last"}, {"policy": "lfu"},
        {"io": "threads"},
    ):  # fmt: skip
        with Runtime.open(model_file, tight(model_file, **options)) as runtime:
            assert runtime.decoder._joined is None
            runtime.decoder.forward([1])
    with Runtime.open(model_file, tight(model_file)) as runtime:
        runtime.store.history = Counted()
        runtime.decoder.forward([1])
        assert runtime.store.history.layers == [0, 1, 2, 3]


class Counted:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def observe(self, layer: int, experts: object) -> None:
        self.layers.append(layer)


def test_a_pass_that_two_signals_broke_off_is_closed_by_the_next(model_file: Path) -> None:
    with Runtime.open(model_file, tight(model_file)) as runtime:
        expected = [runtime.decoder.forward([token]) for token in tokens_of(3)]
    with Runtime.open(model_file, tight(model_file)) as runtime:
        core = runtime.store._core
        core.begin_pass()
        core._arrays["experts"][:2] = [0, 1]
        assert core._fetch(core._at, 2, 2) == 2
        assert core.is_open

        found = [runtime.decoder.forward([token]) for token in tokens_of(3)]

        assert not core.is_open
        assert runtime.store.cache.n_pinned == 0
    np.testing.assert_array_equal(found, expected)


def test_what_is_to_be_preloaded_goes_on_layer_by_layer(model_file: Path) -> None:
    with Runtime.open(model_file, RunConfig(memory_bytes=64 * MIB, context=128)) as runtime:
        store = runtime.store
        store.preload((layer, expert) for layer in range(4) for expert in range(12))
        for token in tokens_of(60):
            runtime.decoder.forward([token])
        assert not store.is_preloading
        assert store.cache.n_resident == 48


def test_two_models_share_a_store(tmp_path: Path) -> None:
    models = [
        MODEL,
        make_model(n_layers=2, hidden=64, width=96, n_experts=0),
        make_model(n_layers=3, hidden=64, width=64, n_experts=20, top_k=4),
    ]
    paths = [tmp_path / f"{i}.colibri" for i in range(3)]
    for seed, (path, model) in enumerate(zip(paths, models, strict=True)):
        write_random_colibri(path, model, seed)
    expected = []
    for path in paths:
        with Runtime.open(path, RunConfig(memory_bytes=64 * MIB, context=64)) as runtime:
            expected.append([runtime.decoder.forward([token]) for token in tokens_of(12)])

    readers = [colibri_format.open(path) for path in paths]
    backend = load_backend("native")
    table = BlockTable(readers)
    plan = plan_pool(20 * 40_000, table.census(), top_k=4, prefetch_depth=1)
    with open_pool(readers, plan, RunConfig(prefetch_depth=1)) as store:
        decoders = []
        for number, reader in enumerate(readers):
            model = read_model(reader)
            weights = load_weights(reader, model, backend)
            cache = KvCache(model, 64, "float16")
            decoders.append(
                Decoder(model, weights, store.part(number), backend, cache, 1, batch_size=1)
            )
            assert decoders[-1]._joined is not None
        found = [[] for _ in decoders]
        for token in tokens_of(12):
            for decoder, rows in zip(decoders, found, strict=True):
                rows.append(decoder.forward([token]))
    for reader in readers:
        reader.close()
    backend.close()

    for rows, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(rows, right)


# Errors


def flip(path: Path, layer: int, expert: int) -> None:
    with colibri_format.open(path) as reader:
        at = int(reader.index[layer, expert]["offset"]) + 99
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1
        file.seek(at)
        file.write(bytes([byte]))


def test_a_damaged_block_ends_the_token_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "moe.colibri"
    write_random_colibri(path, MODEL)
    with Runtime.open(path, tight(path, prefetch_depth=0)) as runtime:
        expected = [runtime.decoder.forward([token]) for token in tokens_of(8)]
    for expert in range(12):
        flip(path, 2, expert)

    with Runtime.open(path, tight(path, prefetch_depth=0)) as runtime:
        for _ in range(3):
            with pytest.raises(FormatError) as caught:
                runtime.decoder.forward([tokens_of(1)[0]])
            assert caught.value.code == "block-checksum"
            assert runtime.kv_cache.length == 0
            assert runtime.store.cache.n_pinned == 0
            assert not runtime.store._core.is_open
        for expert in range(12):
            flip(path, 2, expert)
        found = [runtime.decoder.forward([token]) for token in tokens_of(8)]

    np.testing.assert_array_equal(found, expected)


def test_a_file_that_was_cut_is_told(tmp_path: Path) -> None:
    path = tmp_path / "moe.colibri"
    write_random_colibri(path, MODEL)
    with Runtime.open(path, tight(path, prefetch_depth=1)) as runtime:
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 4)
        with pytest.raises((StorageError, FormatError)):
            for token in tokens_of(20):
                runtime.decoder.forward([token])
        assert runtime.store.cache.n_pinned == 0


def test_a_fetch_of_somebody_elses_is_not_closed(model_file: Path) -> None:
    with Runtime.open(model_file, tight(model_file)) as runtime:
        fetch = runtime.store.fetch(1, [0, 1])
        with pytest.raises(UsageError) as caught:
            runtime.decoder.forward([1])
        assert caught.value.code == "fetch-open"
        assert len(list(fetch)) == 2
        runtime.decoder.forward([1])
        # A handle of before does nothing any more.
        fetch.close()
        decoder = runtime.decoder
    with pytest.raises(UsageError) as caught:
        decoder.forward([1])
    assert caught.value.code == "store-closed"


def test_an_error_of_a_step_is_told(model_file: Path) -> None:
    with Runtime.open(model_file, tight(model_file)) as runtime:
        decoder = runtime.decoder
        record = decoder._steps._decoder
        before = int(record["workspace_bytes"][0])
        record["workspace_bytes"] = 0
        with pytest.raises(Exception) as caught:
            decoder.forward([1])
        assert caught.value.code == "native-call"
        assert not runtime.store._core.is_open
        record["workspace_bytes"] = before
        decoder.forward([1])


def test_ctrl_c_ends_a_token_and_the_next_is_right(model_file: Path) -> None:
    with Runtime.open(model_file, tight(model_file)) as runtime:
        expected = [runtime.decoder.forward([token]) for token in tokens_of(6)]

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    rng = np.random.default_rng(2)
    # An interrupt in a callback of the collector would be nobody's.
    gc.collect()
    gc.disable()
    before = signal.signal(signal.SIGALRM, interrupt)
    n_interrupted = 0
    try:
        with Runtime.open(model_file, tight(model_file)) as runtime:
            for _ in range(150):
                runtime.kv_cache.truncate(0)
                found = []
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(2e-5, 4e-3)))
                    found = [runtime.decoder.forward([token]) for token in tokens_of(6)]
                except KeyboardInterrupt:
                    n_interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert not runtime.store._core.is_open
                assert runtime.store.cache.n_pinned == 0
                np.testing.assert_array_equal(found, expected[: len(found)])
            runtime.kv_cache.truncate(0)
            found = [runtime.decoder.forward([token]) for token in tokens_of(6)]
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.enable()

    np.testing.assert_array_equal(found, expected)
    assert n_interrupted > 20
