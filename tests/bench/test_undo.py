"""What a process that is killed leaves of its changes to the machine: nothing."""

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from colibri_bench import undo_watcher
from colibri_bench.cgroup import MemoryGroup
from colibri_bench.io_files import synthetic_file
from colibri_bench.undo import Undo, remove_files, remove_group, set_back, undone_if_killed
from colibri_bench.undo import watcher_command as command_of
from colibri_format import StorageError

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or not Path("/proc/self/task").exists(), reason="needs Linux"
)

FILE = """
from colibri_bench.io_files import synthetic_file
context = synthetic_file(folder, 4096)
"""
COPY = """
from colibri_bench.io_files import copies_in_memory
from colibri_bench.io_plan import Extent
context = copies_in_memory([folder / "kept"], [Extent(0, 4)], folder)
"""
READ_AHEAD = """
from colibri_bench.read_ahead import read_ahead
context = read_ahead(folder / "kept", 128, folder)
"""
GROUP = """
from colibri_bench.cgroup import MemoryGroup
context = MemoryGroup("test", None, folder)
"""


def kill_within(script, folder):
    """Kills a process that is within `context`, and waits until those that watched it end."""
    text = f"from pathlib import Path\nfolder = Path({str(folder)!r})\n{script}"
    text += "\nwith context:\n    print(flush=True)\n    input()\n"
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.name != "kept")
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        watchers = [os.pidfd_open(int(pid)) for pid in children]
        child.kill()
    for watcher in watchers:
        assert select.select([watcher], [], [], 20)[0]
        os.close(watcher)
    assert watchers
    return found


@pytest.mark.parametrize("script", [FILE, COPY])
def test_files_of_a_killed_process_are_removed(script, tmp_path):
    (tmp_path / "kept").write_text("kept")

    assert len(kill_within(script, tmp_path)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_read_ahead_of_a_killed_process_is_set_back(tmp_path):
    file = tmp_path / "kept"
    file.write_text("")
    number = file.stat().st_dev
    knob = tmp_path / f"sys/dev/block/{os.major(number)}:{os.minor(number)}/queue/read_ahead_kb"
    knob.parent.mkdir(parents=True)
    knob.write_text("8192\n")

    kill_within(READ_AHEAD, tmp_path)

    assert knob.read_text() == "8192"


def test_group_of_a_killed_process_is_removed(tmp_path):
    parent = tmp_path / "sys/fs/cgroup/memory"
    parent.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n")

    assert any("colibri-test" in name for name in kill_within(GROUP, tmp_path))
    assert not list(parent.iterdir())


def test_whoever_is_left_in_a_group_is_killed():
    with ExitStack() as stack:
        try:
            group = stack.enter_context(MemoryGroup("undo", None))
        except StorageError as error:
            pytest.skip(str(error))
        folder = Path(group.command([])[3])
        command = group.command(["/bin/sh", "-c", "echo; read line"])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()

            assert end(remove_group(folder), b"") == 0
            assert child.wait() == -signal.SIGKILL
        assert not folder.exists()


def end(undo, said):
    """The watcher's exit status when that is what it heard."""
    done = subprocess.run(command_of(undo), input=said, timeout=20, check=False)
    return done.returncode


def test_what_was_tidied_up_is_left(tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    assert end(remove_files([file]), b"tidy") == 0
    assert file.exists()


def test_a_value_that_someone_else_set_is_left(tmp_path):
    knob = tmp_path / "read_ahead_kb"
    knob.write_text("256\n")

    assert end(set_back(knob, "128", "8192"), b"") == 0
    assert knob.read_text() == "256\n"


def test_what_is_gone_is_none_the_worse(tmp_path):
    assert end(remove_files([tmp_path / "absent"]), b"") == 0
    assert end(remove_group(tmp_path / "absent"), b"") == 0


def test_what_cannot_be_undone_is_an_exit_status(tmp_path, monkeypatch):
    assert end(set_back(tmp_path / "absent", "128", "8192"), b"") == 1
    monkeypatch.setattr(undo_watcher, "_GROUP_S", 0)
    monkeypatch.setattr(os, "read", lambda *arguments: b"")
    assert undo_watcher.main(["remove-group", str(tmp_path)]) == 1


def test_no_change_is_made_without_a_watcher(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(StorageError) as caught, undone_if_killed(Undo("remove-files", ())):
        pass

    assert caught.value.code == "file-not-found"
    with pytest.raises(StorageError), synthetic_file(tmp_path, 4096):
        pass
    assert not list(tmp_path.iterdir())


WITH_PARENT = """
import os
from colibri_bench._native import die_with
die_with({parent})
print(flush=True)
input()
"""
PARENT = """
import os, subprocess, sys
text = {text!r}.format(parent=os.getpid())
subprocess.run([sys.executable, "-c", text])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux's")
def test_child_dies_with_its_parent():
    command = [sys.executable, "-c", PARENT.format(text=WITH_PARENT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        (pid,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        child = os.pidfd_open(int(pid))
        parent.kill()

        # Its standard input stays open: nothing else ends it.
        assert select.select([child], [], [], 20)[0]
    os.close(child)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux's")
def test_child_whose_parent_has_gone_ends_at_once():
    command = [sys.executable, "-c", WITH_PARENT.format(parent=1)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, capture_output=True)

    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_group_is_removed_when_entering_it_is_interrupted(tmp_path, monkeypatch):
    parent = tmp_path / "sys/fs/cgroup/memory"
    parent.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryGroup, "_limit", interrupt)
    with pytest.raises(KeyboardInterrupt), MemoryGroup("test", 1, tmp_path):
        pass

    assert not list(parent.iterdir())
