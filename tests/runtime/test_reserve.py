"""What is set aside for positions and batches is lent to the pool until they come."""

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from colibri_runtime._native import native
from colibri_runtime.config import RunConfig
from colibri_runtime.kv_cache import KvCache, kv_cache_bytes, kv_used_bytes
from colibri_runtime.pool import can_give_back
from colibri_runtime.pool_plan import SLOT_OVERHEAD
from colibri_runtime.reserve import Reserve
from colibri_runtime.runtime import Runtime
from helpers.random_colibri import make_model, write_random_colibri

MIB = 2**20
MODEL = make_model(n_layers=3, hidden=96, width=256, n_experts=24, top_k=2, head_dim=64)
needs_giving_back = pytest.mark.skipif(
    not can_give_back(), reason="this system takes no memory back"
)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reserve") / "moe.colibri"
    write_random_colibri(path, MODEL)
    return path


def tight(path: Path, n_slots: int, **options: object) -> RunConfig:
    """A budget with which the plan has `n_slots` slots."""
    config = RunConfig(memory_bytes=64 * MIB, context=512, batch_size=32, **options)
    with Runtime.open(path, config) as runtime:
        plan = runtime.plan
    n_bytes = plan.total_bytes - (plan.n_slots - n_slots) * (plan.slot_bytes + SLOT_OVERHEAD)
    # What stands for slots that are lent is counted as well.
    return replace(config, memory_bytes=n_bytes + (plan.n_slots - n_slots) * SLOT_OVERHEAD)


# What is idle


def test_nothing_is_idle_once_every_position_was_reached() -> None:
    reserve = Reserve(MODEL, 512, "float16", batch_bytes=10**6)
    assert reserve.kv_bytes == kv_cache_bytes(MODEL, 512, "float16")

    assert reserve.idle_bytes(512, 32) == 0
    assert reserve.idle_bytes(512, 1) == 10**6
    assert reserve.idle_bytes(0, 32) == reserve.kv_bytes
    idle = [reserve.idle_bytes(n, 2) for n in range(513)]
    assert idle == sorted(idle, reverse=True)


def test_positions_take_whole_pages_of_each_row() -> None:
    rows = 2 * MODEL.n_layers * MODEL.n_kv_heads
    # 512 positions of 128 bytes: a row is 16 pages, and begins at one.
    assert kv_used_bytes(MODEL, 512, 1, "float16", page_bytes=4096) == rows * 4096
    assert kv_used_bytes(MODEL, 512, 32, "float16", page_bytes=4096) == rows * 4096
    assert kv_used_bytes(MODEL, 512, 33, "float16", page_bytes=4096) == rows * 8192
    # 100 positions: rows begin anywhere in a page.
    assert kv_used_bytes(MODEL, 100, 1, "float16", page_bytes=4096) == rows * 8192
    assert kv_used_bytes(MODEL, 100, 100, "float16", page_bytes=4096) == rows * 12800
    assert kv_used_bytes(MODEL, 100, 0, "float16", page_bytes=4096) == 0


def resident(array: np.ndarray) -> int:
    """Bytes of the array's memory that were written to (proc_pid_pagemap(5): bit 63)."""
    start = int(array.__array_interface__["data"][0])
    page = mmap.PAGESIZE
    n_pages = -(-array.nbytes // page)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(start // page * 8)
        entries = np.frombuffer(pagemap.read(8 * n_pages), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc/self/pagemap")
@pytest.mark.parametrize("capacity", [100, 512, 700])
def test_a_cache_takes_no_more_than_it_says(capacity: int) -> None:
    cache = KvCache(MODEL, capacity, "float16")
    rng = np.random.default_rng(1)
    arrays = [memory.array for memory in cache._memory]
    assert sum(map(resident, arrays)) == 0

    for n in (1, 3, 40, 56):
        cache.reach(n)
        keys = rng.random((n, MODEL.n_kv_heads, MODEL.head_dim), np.float32)
        for layer in range(MODEL.n_layers):
            cache.store(layer, keys, keys)
        cache.advance(n)
        used = kv_used_bytes(MODEL, capacity, cache.length, "float16", page_bytes=mmap.PAGESIZE)
        # Each array ends somewhere in a page.
        assert 0 < sum(map(resident, arrays)) <= used + 2 * mmap.PAGESIZE

    cache.truncate(50)
    assert cache.reach(1) == 100
    cache.truncate(0)
    assert cache.reach(1) == 1
    if can_give_back():
        assert sum(map(resident, arrays)) == 0


# What is lent


@needs_giving_back
def test_the_pool_has_more_slots_until_positions_come(model_file: Path) -> None:
    with Runtime.open(model_file, tight(model_file, 10)) as runtime:
        plan, store, decoder = runtime.plan, runtime.store, runtime.decoder
        assert plan.n_slots == 10 and plan.n_lent > 0
        assert store.n_open == 10
        n_open = []
        for token in range(300):
            decoder.forward([token % 200])
            n_open.append(store.n_open)
            assert store.cache.n_resident <= store.n_open
        kv_bytes = kv_used_bytes(
            MODEL, 512, 300, str(runtime.kv_cache.dtype), page_bytes=mmap.PAGESIZE
        )
        lent_bytes = (n_open[-1] - 10) * plan.slot_bytes
        assert kv_bytes + lent_bytes <= plan.kv_bytes + plan.working_bytes

        decoder.forward(list(range(32)))
        assert 10 <= store.n_open <= n_open[-1]
        decoder.forward([5])
        after_batch = store.n_open
        runtime.kv_cache.truncate(0)
        decoder.forward([5])

        assert n_open[0] == 10 + plan.n_lent
        assert n_open == sorted(n_open, reverse=True)
        assert n_open[-1] < n_open[0]
        assert after_batch <= n_open[-1]
        assert store.n_open == n_open[0]


@needs_giving_back
@pytest.mark.skipif(native().library is None, reason="no C library")
def test_a_batch_calls_in_what_its_buffers_take(model_file: Path) -> None:
    with Runtime.open(model_file, tight(model_file, 10, backend="native")) as runtime:
        store = runtime.store
        runtime.decoder.forward([1])
        single = store.n_open
        runtime.decoder.forward(list(range(32)))
        batch = store.n_open
        buffers = runtime.decoder._steps._buffers._memory.array
        taken = resident(buffers)
        runtime.decoder.forward([1])

        assert batch < single
        assert resident(buffers) < taken / 2
        assert store.n_open > batch


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_logits_are_the_same_bits_whatever_is_lent(model_file: Path, backend: str) -> None:
    if backend == "native" and native().library is None:
        pytest.skip("no C library")
    chunks = [[7], [3] * 40, [9], [2], list(range(33)), *([n] for n in range(60))]
    found = []
    for n_slots in (72, 10, 3):
        with Runtime.open(model_file, tight(model_file, n_slots, backend=backend)) as runtime:
            assert (runtime.plan.n_lent > 0) == (n_slots < 72 and can_give_back())
            found.append([runtime.decoder.forward(chunk) for chunk in chunks])

    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_the_plan_tells_what_is_lent(model_file: Path) -> None:
    from colibri_runtime.run_report import plan_rows

    with Runtime.open(model_file, tight(model_file, 10)) as runtime:
        plan = runtime.plan
    rows = dict(plan_rows(plan))
    assert plan.total_bytes <= plan.budget_bytes
    if can_give_back():
        assert rows["lent to it"].startswith(f"{plan.n_lent} experts more")
        assert plan.as_dict()["n_lent"] == plan.n_lent


def test_a_limit_of_the_cache_holds_for_what_is_lent_too(model_file: Path) -> None:
    config = tight(model_file, 40)
    with Runtime.open(model_file, replace(config, cache_bytes=2 * MIB)) as runtime:
        plan, store = runtime.plan, runtime.store
        for token in range(20):
            runtime.decoder.forward([token])
        n_bytes = sum(store.pool.sizes[: store.n_open])
        assert 20 * plan.slot_bytes < n_bytes <= 2 * MIB
        assert plan.n_lent <= 1


@needs_giving_back
def test_memory_that_is_locked_is_neither_lent_nor_given_back(model_file: Path) -> None:
    script = (
        "import ctypes, sys\n"
        "from colibri_runtime import RunConfig, Runtime\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.mlockall(2): sys.exit(77)\n"  # MCL_FUTURE
        "config = RunConfig(memory_bytes=int(sys.argv[2]), context=512)\n"
        "with Runtime.open(sys.argv[1], config) as runtime:\n"
        "    assert runtime.plan.n_lent == 0 < runtime.plan.n_slots\n"
        "    for tokens in ([1, 2, 3], [4], [5, 6], [7]):\n"
        "        runtime.decoder.forward(tokens)\n"
        "    runtime.kv_cache.truncate(0)\n"
        "    runtime.decoder.forward([1])\n"
    )
    resource = pytest.importorskip("resource")
    if os.geteuid() and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        pytest.skip("memory cannot be locked here")
    n_bytes = str(tight(model_file, 10).memory_bytes)
    done = subprocess.run(
        [sys.executable, "-c", script, str(model_file), n_bytes],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("memory cannot be locked here")
    assert done.returncode == 0, done.stderr
