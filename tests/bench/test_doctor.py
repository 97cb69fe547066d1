"""What the doctor makes of a machine, and the speed it foretells."""

import json
from dataclasses import replace

import pytest

from colibri_bench.cmd_doctor import main
from colibri_bench.doctor_plan import (
    Grade,
    ModelCost,
    Probe,
    advise,
    expect,
    judge,
    typical_hits,
)
from colibri_bench.leftovers import find_leftovers

GB = 10**9
GOOD = Probe(
    kernel="6.8", engines={"uring": "", "aio": "", "threads": ""}, file_system="ext4",
    is_rotational=False, disk_bytes_per_s=2.5 * GB, memory_bytes_per_s=20.0 * GB,
    available_bytes=8 * GB, huge_pages="madvise", memlock_bytes=None, n_cpus=8, cpu="x",
    native="", isa="AVX512",
)  # fmt: skip
COST = ModelCost(
    file_bytes=5 * GB, n_blocks=1000, block_bytes=4 * 10**6, dense_bytes=4 * 10**8,
    expert_bytes=6 * 10**8, smallest_budget=6 * 10**8, largest_budget=5 * GB,
)  # fmt: skip


def found(subject, **changes):
    return next(f for f in judge(replace(GOOD, **changes)) if f.subject == subject)


def test_good_machine_needs_no_advice():
    assert {finding.grade for finding in judge(GOOD)} == {Grade.GOOD}
    assert not any(finding.advice for finding in judge(GOOD))


def test_one_engine_that_reads_directly_is_enough():
    engines = {"uring": "io_uring_setup: Operation not permitted (EPERM)", "threads": ""}
    assert found("uring", engines=engines).grade is Grade.FAIR
    engines["threads"] = "tmpfs"
    assert found("uring", engines=engines).grade is Grade.BAD


@pytest.mark.parametrize(
    ("changes", "grade"),
    [
        ({"disk_bytes_per_s": 0.2 * GB, "is_rotational": True}, Grade.BAD),
        ({"disk_bytes_per_s": 2.0 * GB, "is_rotational": True}, Grade.GOOD),
        ({"disk_bytes_per_s": 0.4 * GB}, Grade.BAD),
        ({"disk_bytes_per_s": 1.0 * GB}, Grade.FAIR),
        ({"disk_bytes_per_s": None}, Grade.FAIR),
    ],
)
def test_disk_is_judged_by_its_rate(changes, grade):
    assert found("disk", **changes).grade is grade


def test_what_can_be_changed_is_said():
    assert "transparent_hugepage" in found("huge pages", huge_pages="never").advice
    assert "ulimit -l" in found("memlock", memlock_bytes=8 * 2**20).advice
    assert found("compute", native="was not built").grade is Grade.BAD
    assert found("memory", available_bytes=None).grade is Grade.FAIR


def test_what_killed_commands_left_is_named(tmp_path):
    groups = tmp_path / "sys/fs/cgroup/memory/session"
    for name in ("colibri-decode-7", "colibri-decode-8", "other-7"):
        (groups / name).mkdir(parents=True)
    memory = tmp_path / "dev/shm"
    memory.mkdir(parents=True)
    for name in ("colibri-io-7-0", "colibri-io-8-0", "colibri-io-x"):
        (memory / name).touch()
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "colibri-io-7.bin").touch()
    (tmp_path / "proc/8").mkdir(parents=True)

    found = find_leftovers(folder, tmp_path / "absent", root=tmp_path)

    expected = [folder / "colibri-io-7.bin", memory / "colibri-io-7-0", groups / "colibri-decode-7"]
    assert found == sorted(expected)
    finding = judge(replace(GOOD, leftovers=tuple(map(str, found))))[-1]
    assert (finding.subject, finding.grade) == ("left over", Grade.FAIR)
    assert "colibri-decode-7" in finding.found


def test_speed_is_bound_by_the_slower_of_disk_and_memory():
    rows = expect(COST, GOOD)

    assert [row.budget_bytes for row in rows] == sorted(row.budget_bytes for row in rows)
    assert rows[-1].typical == rows[-1].uniform == pytest.approx(20.0)  # 1 GB at 20 GB/s
    assert rows[-1].expected == rows[-1].typical
    assert rows[-1].bound == "memory and processor"
    assert all(row.uniform <= row.expected <= row.typical for row in rows)
    slow = expect(COST, replace(GOOD, disk_bytes_per_s=0.1 * GB))
    assert slow[0].bound == "the disk"
    assert slow[0].typical < rows[0].typical


def test_half_of_the_shorter_hides_behind_the_longer():
    all_missed = replace(COST, n_blocks=10**9)
    row = expect(all_missed, replace(GOOD, disk_bytes_per_s=6.0 * GB))[0]

    # 0.05 s of computing and 0.1 s of reading.
    assert row.uniform == pytest.approx(1 / 0.125, rel=1e-3)


def test_unknown_disk_makes_nothing_of_what_is_not_in_memory():
    assert expect(COST, replace(GOOD, disk_bytes_per_s=None))[0].expected == 0.0


def test_hits_rise_with_room():
    values = [typical_hits(share / 20) for share in range(21)]

    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("available", "words"),
    [
        (8 * GB, "all of it fits: --memory 4769M"),
        (2 * GB, "give it what you can spare: --memory 1526M"),
        (10**8, "does not run here"),
        (None, "the smallest budget that works"),
    ],
)
def test_budget_is_advised(available, words):
    assert words in " ".join(advise(COST, expect(COST, GOOD), available))


def short(monkeypatch):
    monkeypatch.setattr("colibri_bench.doctor_probe.drop_caches", lambda *files: None)
    monkeypatch.setattr("colibri_bench.doctor_probe._MADE_BYTES", 2**21)
    monkeypatch.setattr("colibri_bench.memory_rate._BYTES", 2**20)


def test_command_looks_at_a_model(demo_file, capsys, monkeypatch):
    short(monkeypatch)

    assert main([str(demo_file)]) == 0

    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "the smallest budget that works is" in out


def test_command_needs_no_model(tmp_path, capsys, monkeypatch):
    short(monkeypatch)

    assert main(["--folder", str(tmp_path), "--json"]) == 0

    record = json.loads(capsys.readouterr().out)
    assert {"uring", "disk", "memory", "compute"} <= {f["subject"] for f in record["findings"]}
    assert not list(tmp_path.iterdir())
