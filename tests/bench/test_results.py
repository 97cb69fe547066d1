"""Results on disk, and what is said of the machine they come from."""

import json
import os

import pyarrow.parquet
import pytest

from colibri_bench.errors import BenchError
from colibri_bench.machine_facts import describe_disk, describe_machine
from colibri_bench.results import Results, load_results, save_results
from colibri_format import StorageError


def results(**changes):
    values = {
        "kind": "io", "command": ["colibri", "bench", "io"], "machine": {"cpu": "x"},
        "rows": [{"engine": "uring", "gb_s": 2.5}, {"engine": "mmap", "gb_s": None}],
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
     '{"colibri_bench": 1, "kind": "other", "rows": []}'],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(BenchError) as caught:
        load_results(path)

    assert caught.value.code == "bad-results"


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
