"""Results on disk, and what is said of the machine they come from."""

import errno
import json
import os

import pyarrow.parquet
import pytest

from colibri_bench.errors import BenchError
from colibri_bench.machine_facts import describe_disk, describe_machine
from colibri_bench.results import ResultKeeper, Results, load_results, save_results
from colibri_format import StorageError


def results(**changes):
    values = {
        "kind": "io", "command": ["colibri", "bench", "io"], "machine": {"cpu": "x"},
        "rows": [
            {"engine": e, "block_bytes": 4096, "depth": d, "gb_per_s": 2.5, "slowest": 2.0,
             "fastest": 3.0}
            for e, d in (("uring", 4), ("mmap", None))
        ],
        "notes": ["cold"], "is_complete": False,
    }  # fmt: skip
    return Results(**(values | changes))


def test_results_come_back_as_they_were(tmp_path):
    json_path, table_path = save_results(results(), tmp_path / "new")
    found = load_results(json_path)

    assert found.rows == results().rows
    assert (found.kind, found.notes, found.is_complete) == ("io", ["cold"], False)
    assert found.made_at
    table = pyarrow.parquet.read_table(table_path)
    assert table.to_pylist() == results().rows
    about = json.loads(table.schema.metadata[b"colibri_bench"])
    assert (about["command"], about["machine"]) == (["colibri", "bench", "io"], {"cpu": "x"})


def test_later_results_replace_earlier_ones(tmp_path):
    save_results(results(), tmp_path)
    save_results(results(rows=[]), tmp_path)

    assert load_results(tmp_path / "io.json").rows == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["io.json", "io.parquet"]


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError) as caught:
        save_results(results(), tmp_path / "file")

    assert caught.value.code == "file-exists" or caught.value.errno


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"colibri_bench": 2}', '{"colibri_bench": 1, "kind": "io", "rows": [1]}',
     '{"colibri_bench": 1, "kind": "other", "rows": []}', "[" * 100_000,
     '{"colibri_bench": 1, "kind": "io", "rows": [], "machine": []}',
     '{"colibri_bench": 1, "kind": "io", "rows": [], "notes": "none"}',
     '{"colibri_bench": 1, "kind": "io", "rows": [], "extra": 3}',
     '{"colibri_bench": 1, "kind": "timeline", "rows": [], "extra": {"tokens": [{}]}}',
     '{"colibri_bench": 1, "kind": "cache", "rows": [{"policy": "a", "share": NaN}]}'],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(BenchError) as caught:
        load_results(path)

    assert caught.value.code == "bad-results"


def test_results_of_another_version_are_named(tmp_path):
    path = tmp_path / "io.json"
    path.write_text('{"colibri_bench": 7, "kind": "io", "rows": []}')

    with pytest.raises(BenchError, match="is of version 7; this program knows 1"):
        load_results(path)


@pytest.mark.parametrize("value", ["9", float("nan"), float("inf"), 1e300, True, [], None])
@pytest.mark.parametrize("name", ["gb_per_s", "block_bytes", "fastest"])
def test_rows_that_no_picture_can_be_made_of_are_refused(name, value, tmp_path):
    rows = [{**results().rows[0], name: value}]
    save_results(results(rows=rows), tmp_path)

    with pytest.raises(BenchError) as caught:
        load_results(tmp_path / "io.json")
    assert caught.value.code == "bad-results"
    assert f"as {name}" in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.9, 3.1])
def test_median_outside_its_spread_is_refused(value, tmp_path):
    save_results(results(rows=[{**results().rows[0], "gb_per_s": value}]), tmp_path)

    with pytest.raises(BenchError, match="outside its spread"):
        load_results(tmp_path / "io.json")


def test_only_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "io.json")

    with pytest.raises(StorageError) as caught:
        load_results(tmp_path / "io.json")
    assert caught.value.code == "is-a-directory"


def test_keeper_tells_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError):
        ResultKeeper(tmp_path / "file", print)


def test_a_save_that_fails_ends_no_measurement(tmp_path, monkeypatch):
    told = []
    keeper = ResultKeeper(tmp_path / "out", told.append)

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("colibri_bench.results._replace", refuse)
        keeper.save(results())
        with pytest.raises(StorageError) as caught:
            keeper.finish()
    assert caught.value.errno == errno.ENOSPC
    assert "No space left" in told[0]

    keeper.save(results())
    keeper.finish()
    assert (tmp_path / "out/io.json").exists()


def test_missing_results_are_told(tmp_path):
    with pytest.raises(StorageError) as caught:
        load_results(tmp_path / "absent.json")

    assert caught.value.code == "file-not-found"


def test_machine_is_described(tmp_path):
    facts = describe_machine(tmp_path)

    assert facts.n_cpus >= 1
    assert facts.packages["colibri-format"]
    assert json.dumps(facts.as_dict())


def test_disk_is_found_below_the_file(tmp_path):
    file = tmp_path / "model"
    file.write_text("x")
    number = file.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    queue = tmp_path / "sys/dev/block" / name / "queue"
    queue.mkdir(parents=True)
    (queue / "rotational").write_text("1\n")
    (queue / "scheduler").write_text("none [mq-deadline] kyber\n")
    info = tmp_path / "proc/self/mountinfo"
    info.parent.mkdir(parents=True)
    info.write_text(f"1 2 {name} / / rw,relatime - ext4 /dev/vda rw\n")

    facts = describe_disk(file, tmp_path)

    assert (facts.is_rotational, facts.scheduler, facts.file_system) == (
        True, "mq-deadline", "ext4",
    )  # fmt: skip


def test_disk_that_the_system_does_not_tell_of(tmp_path):
    (tmp_path / "model").write_text("x")

    assert describe_disk(tmp_path / "model", tmp_path).is_rotational is None
