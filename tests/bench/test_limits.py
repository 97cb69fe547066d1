"""Control groups, page cache and read-ahead, on a made-up root."""

import errno
import os
from pathlib import Path

import pytest

from colibri_bench.cgroup import MemoryGroup
from colibri_bench.page_cache import drop_caches, resident_share
from colibri_bench.read_ahead import read_ahead
from colibri_bench.work import count_work, mapped_files, memory_group
from colibri_format import StorageError


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_version_1_limits_and_counts(tmp_path):
    write(tmp_path / "proc/self/cgroup", "4:memory:/mine\n0::/\n")
    parent = tmp_path / "sys/fs/cgroup/memory/mine"
    parent.mkdir(parents=True)

    with MemoryGroup("test", 4096, tmp_path) as group:
        folder = next(parent.iterdir())
        limit = (folder / "memory.limit_in_bytes").read_text()
        write(folder / "memory.max_usage_in_bytes", "123\n")
        write(folder / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")

        assert (limit, group.peak_bytes, group.n_killed) == ("4096", 123, 2)
        assert (group.applied_bytes, group.name) == (4096, folder.name)
        assert group.command(["true"])[-2:] == [str(folder), "true"]
        for file in folder.iterdir():
            file.unlink()

    assert not folder.exists()


def test_version_2_makes_its_group_beside_the_process(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/user/session\n")
    write(tmp_path / "sys/fs/cgroup/cgroup.controllers", "memory")
    (tmp_path / "sys/fs/cgroup/user/session").mkdir(parents=True)

    with MemoryGroup("test", 4096, tmp_path) as group:
        made = [p for p in (tmp_path / "sys/fs/cgroup/user").iterdir() if p.name != "session"]
        write(made[0] / "memory.events", "low 0\noom_kill 1\n")

        assert (made[0] / "memory.max").read_text() == "4096"
        assert (group.n_killed, group.peak_bytes) == (1, None)
        for file in made[0].iterdir():
            file.unlink()


def test_swap_is_bounded_where_it_is_counted(tmp_path, monkeypatch):
    write(tmp_path / "proc/self/cgroup", "4:memory:/\n")
    parent = tmp_path / "sys/fs/cgroup/memory"
    parent.mkdir(parents=True)
    made = Path.mkdir

    def with_swap_file(self, *arguments, **options):
        made(self, *arguments, **options)
        if self.parent == parent:
            (self / "memory.memsw.limit_in_bytes").write_text("")

    monkeypatch.setattr(Path, "mkdir", with_swap_file)
    with MemoryGroup("test", 4096, tmp_path):
        folder = next(parent.iterdir())

        assert (folder / "memory.memsw.limit_in_bytes").read_text() == "4096"
        for file in folder.iterdir():
            file.unlink()


@pytest.mark.parametrize("text", [None, "", "0::/\n"])
def test_system_without_memory_groups_is_told(tmp_path, text):
    if text is not None:
        write(tmp_path / "proc/self/cgroup", text)

    with pytest.raises(StorageError) as caught, MemoryGroup("test", 4096, tmp_path):
        pass

    assert caught.value.code == "no-cgroup"


def test_group_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    write(tmp_path / "proc/self/cgroup", "4:memory:/\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)

    def refuse(*arguments, **options):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError) as caught, MemoryGroup("test", 4096, tmp_path):
        pass

    assert caught.value.code == "no-cgroup"
    assert "Permission denied" in str(caught.value)


def test_caches_are_dropped_as_root(tmp_path):
    knob = write(tmp_path / "proc/sys/vm/drop_caches")

    state = drop_caches(root=tmp_path)

    assert state.is_cold
    assert knob.read_text() == "3"


def test_without_that_right_only_the_file_is_asked_for(tmp_path):
    file = write(tmp_path / "model", "bytes")

    state = drop_caches(file, root=tmp_path / "absent")

    assert not state.is_cold
    assert "fadvise" in state.how


def test_what_the_page_cache_holds_is_asked(tmp_path):
    file = tmp_path / "model"
    file.write_bytes(bytes(3 * 2**20))

    assert resident_share(file) == 1.0
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident_share(file) in (0.0, 1.0)  # 1 where tmp_path is memory


@pytest.mark.parametrize("content", [None, b""])
def test_files_without_pages_have_no_share(tmp_path, content):
    file = tmp_path / "model"
    if content is not None:
        file.write_bytes(content)

    assert resident_share(file) is None


def test_files_of_others_have_no_share(tmp_path, monkeypatch):
    file = write(tmp_path / "model", "bytes")
    monkeypatch.setattr(os, "access", lambda *arguments: False)

    assert resident_share(file) is None


@pytest.mark.parametrize(
    ("text", "group"),
    [("4:memory:/a/b\n0::/c\n", "/a/b"), ("0::/c\n", "/c"), ("", None), (None, None)],
)
def test_group_of_a_process_is_told(tmp_path, text, group):
    if text is not None:
        write(tmp_path / "proc/self/cgroup", text)

    assert memory_group(tmp_path) == group


def test_mapped_files_are_told_without_libraries(tmp_path):
    maps = """7f00-7f10 r--p 00000000 fe:00 12 /data/a model.gguf
7f20-7f30 r-xp 00000000 fe:00 13 /usr/lib/libc.so.6
7f40-7f50 rw-p 00000000 00:00 0 [heap]
"""
    write(tmp_path / "proc/self/maps", maps)

    assert mapped_files(tmp_path) == {"/data/a model.gguf": 12}
    assert mapped_files(tmp_path / "absent") == {}


def test_read_ahead_is_set_and_set_back(tmp_path):
    file = write(tmp_path / "model", "bytes")
    number = file.stat().st_dev
    queue = tmp_path / f"sys/dev/block/{os.major(number)}:{os.minor(number)}/queue"
    knob = write(queue / "read_ahead_kb", "8192\n")

    with read_ahead(file, 128, tmp_path) as told:
        assert knob.read_text() == "128"
        assert "8192 KiB before" in told
    assert knob.read_text() == "8192"


def test_read_ahead_of_two_runs_at_once_ends_as_it_was(tmp_path):
    file = write(tmp_path / "model", "bytes")
    number = file.stat().st_dev
    queue = tmp_path / f"sys/dev/block/{os.major(number)}:{os.minor(number)}/queue"
    knob = write(queue / "read_ahead_kb", "8192\n")
    first, second = read_ahead(file, 128, tmp_path), read_ahead(file, 128, tmp_path)

    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)

    assert knob.read_text() == "8192"


def test_read_ahead_of_no_disk_is_left(tmp_path):
    file = write(tmp_path / "model", "bytes")

    with read_ahead(file, 128, tmp_path) as told:
        assert "not known" in told


def test_bytes_read_are_counted_where_the_kernel_tells(tmp_path):
    write(tmp_path / "proc/self/io", "rchar: 9\nread_bytes: 4096\n")

    assert count_work(tmp_path).read_bytes == 4096
    assert count_work(tmp_path / "absent").read_bytes == 0
