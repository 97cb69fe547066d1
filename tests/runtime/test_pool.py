"""The pool's memory."""

import numpy as np
import pytest

from colibri_format import StorageError, UsageError
from colibri_runtime.pool import HUGE_PAGE, Pool, huge_bytes, pool_bytes


def test_slots_are_aligned_apart_and_of_the_size_asked_for():
    pool = Pool(2000, 12288)

    addresses = [pool.slot(i).__array_interface__["data"][0] for i in range(5)]
    assert addresses[0] % HUGE_PAGE == 0
    assert np.diff(addresses).tolist() == [12288] * 4
    assert all(pool.slot(i).nbytes == 12288 for i in range(5))
    pool.close()


def test_a_view_shows_its_slot_and_cannot_write():
    pool = Pool(2, 4096)
    pool.slot(1)[:] = 7

    assert pool.view(1).sum() == 7 * 4096
    assert pool.view(0).sum() == 0
    with pytest.raises(ValueError, match="read-only"):
        pool.view(1)[0] = 1
    pool.close()


def test_a_view_outlives_the_pool():
    pool = Pool(1, 4096)
    pool.slot(0)[:] = 3
    view = pool.view(0)

    pool.close()

    assert view.sum() == 3 * 4096


def test_the_report_says_what_was_got():
    pool = Pool(16, 2**20)

    report = pool.report()

    assert (report.n_slots, report.slot_bytes, report.arena_bytes) == (16, 2**20, 16 * 2**20)
    assert report.huge_bytes == 16 * 2**20 or report.huge_bytes is None or report.notes
    assert pool.mapped_bytes == pool_bytes(16, 2**20) == 16 * 2**20 + HUGE_PAGE
    pool.close()


def test_a_small_pool_loses_nothing_to_alignment():
    pool = Pool(3, 4096)

    assert pool.mapped_bytes == pool_bytes(3, 4096) == 3 * 4096
    assert pool.slot(0).__array_interface__["data"][0] % 4096 == 0
    assert pool.report().notes == ()
    pool.close()


def test_refused_advice_is_reported_and_the_pool_works(monkeypatch):
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999, raising=False)
    monkeypatch.delattr("mmap.MADV_DONTFORK", raising=False)

    pool = Pool(4096, 4096)

    notes = " ".join(pool.report().notes)
    assert "MADV_HUGEPAGE refused" in notes
    assert "MADV_DONTFORK: this platform" in notes
    pool.slot(0)[:] = 1
    pool.close()


@pytest.mark.parametrize(("n_slots", "slot_bytes"), [(1, 5000), (-1, 4096), (1, 0)])
def test_odd_slots_are_refused(n_slots, slot_bytes):
    with pytest.raises(UsageError) as caught:
        Pool(n_slots, slot_bytes)

    assert caught.value.code == "bad-slots"


def test_a_pool_that_no_address_space_holds_is_refused():
    with pytest.raises(StorageError) as caught:
        Pool(2**31, 2**18)

    assert caught.value.code == "out-of-memory"
    assert caught.value.errno is not None


def test_a_pool_may_be_empty():
    pool = Pool(0, 0)

    assert pool.mapped_bytes == 0
    assert pool.report().huge_bytes == 0


def test_huge_pages_are_counted_only_where_the_arena_is(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-2000 rw-p 00000000 00:00 0\nAnonHugePages:      4096 kB\n"
        "2000-9000 rw-p 00000000 00:00 0\nRss: 8 kB\nAnonHugePages:      2048 kB\n"
    )

    assert huge_bytes(0x3000, 0x1000, smaps) == 2048 * 1024
    assert huge_bytes(0x3000, 0x1000, tmp_path / "none") is None
