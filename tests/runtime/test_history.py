"""The frequency history: what it tells, and files that are refused."""

import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_format import FormatError, StorageError, UsageError, checksum
from colibri_runtime import history as history_module
from colibri_runtime.history import (
    MAX_EVENTS,
    History,
    history_bytes,
    history_path,
    read_history,
    write_history,
)

MODEL = UUID("12345678-1234-5678-1234-567812345678")
OTHER = UUID(int=7)


def sample():
    history = History(MODEL, 2, 4)
    for layer, experts in ((0, [1, 2]), (1, [3]), (0, [1]), (1, [3, 0]), (0, [1, 2])):
        history.observe(layer, experts)
    return history


def read(path, uuid=MODEL, n_layers=2, n_experts=4):
    return read_history(path, uuid=uuid, n_layers=n_layers, n_experts=n_experts)


def test_shares_and_the_hottest_blocks():
    history = sample()

    assert history.shares() == {(0, 1): 1.0, (0, 2): 2 / 3, (1, 3): 1.0, (1, 0): 0.5}
    assert history.hottest(3) == [(0, 1), (1, 3), (0, 2)]
    assert history.hottest(-1) == []
    assert history.n_events == 5


def test_expected_hits_of_slots_that_are_shared_or_divided():
    history = sample()
    total = 1 + 2 / 3 + 1 + 0.5

    assert history.hit_share(2) == pytest.approx(2 / total)
    assert history.hit_share(8) == pytest.approx(1.0)
    assert history.hit_share_of((2, 0)) == pytest.approx((1 + 2 / 3) / total)
    assert History(MODEL, 2, 4).hit_share(2) is None
    assert History(MODEL, 2, 4).hit_share_of((1, 1)) is None
    with pytest.raises(UsageError) as error:
        history.hit_share_of((1,))
    assert error.value.code == "bad-quotas"


def test_what_is_written_is_read(tmp_path):
    path = history_path(tmp_path / "m.colibri")
    write_history(path, sample())

    assert path.name == "m.colibri.history"
    assert path.stat().st_size == history_bytes(2, 4)
    assert read(path).shares() == sample().shares()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_an_older_history_is_replaced(tmp_path):
    path = tmp_path / "h"
    write_history(path, History(MODEL, 2, 4))
    write_history(path, sample())

    assert read(path).n_events == 5


def test_many_events_halve_what_was_before():
    history = History(MODEL, 1, 2)
    for _ in range(int(MAX_EVENTS)):
        history.observe(0, [0])
    for _ in range(10):
        history.observe(0, [1])

    assert history.n_events == MAX_EVENTS / 2 + 10
    assert history.shares()[0, 0] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("n_layers", "n_experts"), [(0, 4), (4, 0), (1 << 12, 1 << 13)])
def test_models_without_blocks_or_with_too_many_have_no_history(n_layers, n_experts):
    with pytest.raises(UsageError) as error:
        History(MODEL, n_layers, n_experts)

    assert error.value.code == "bad-history"


def forged(data, at, value):
    """The file with bytes replaced and the checksum made to fit."""
    body = bytearray(data[:-8])
    body[at : at + len(value)] = value
    return bytes(body) + struct.pack("<Q", checksum(bytes(body)))


EVENTS, COUNTS = 40, 40 + 16


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: b"", "history-magic"),
        (lambda data: b"x" + data[1:], "history-magic"),
        (lambda data: data[:20], "history-size"),
        (lambda data: data[:-1], "history-size"),
        (lambda data: data + b"\0", "history-size"),
        (lambda data: forged(data, 8, b"\2"), "history-version"),
        (lambda data: forged(data, 12, b"\1"), "history-version"),
        (lambda data: forged(data, 16, OTHER.bytes), "history-uuid"),
        (lambda data: forged(data, 32, b"\3"), "history-geometry"),
        (lambda data: forged(data, 36, b"\xff\xff\xff\xff"), "history-geometry"),
        (lambda data: data[:COUNTS] + b"\1" + data[COUNTS + 1 :], "history-checksum"),
        (lambda data: forged(data, EVENTS, struct.pack("<d", float("nan"))), "history-value"),
        (lambda data: forged(data, EVENTS, struct.pack("<d", -1.0)), "history-value"),
        (lambda data: forged(data, EVENTS, struct.pack("<d", 1e300)), "history-value"),
        (lambda data: forged(data, COUNTS, struct.pack("<f", float("inf"))), "history-value"),
        (lambda data: forged(data, COUNTS, struct.pack("<f", -1.0)), "history-value"),
        (lambda data: forged(data, COUNTS, struct.pack("<f", 9.0)), "history-value"),
    ],
)
def test_foreign_and_damaged_files_are_refused_by_code(tmp_path, change, code):
    path = tmp_path / "h"
    write_history(path, sample())
    path.write_bytes(change(path.read_bytes()))

    with pytest.raises(FormatError) as error:
        read(path)

    assert error.value.code == code
    assert "remove the file" in str(error.value)


@given(place=st.integers(0, history_bytes(2, 4) - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("flip") / "h"
    write_history(path, sample())
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(bytes(data))

    with pytest.raises(FormatError):
        read(path)


def test_a_file_that_is_not_there_is_the_kernels_error(tmp_path):
    with pytest.raises(StorageError) as error:
        read(tmp_path / "none")
    assert error.value.code == "file-not-found"

    with pytest.raises(StorageError) as error:
        write_history(tmp_path / "no" / "h", sample())
    assert error.value.code == "file-not-found"


def test_a_failed_write_leaves_the_older_history(tmp_path, monkeypatch):
    path = tmp_path / "h"
    write_history(path, sample())

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history_module.os, "fsync", full)
    with pytest.raises(StorageError) as error:
        write_history(path, History(MODEL, 2, 4))
    monkeypatch.undo()

    assert error.value.code == "disk-full"
    assert [entry.name for entry in tmp_path.iterdir()] == ["h"]
    assert read(path).n_events == 5
