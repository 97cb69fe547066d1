"""Figures of memory as kernels give them."""

import pytest

from colibri_runtime.machine import available_bytes, peak_rss_bytes, rss_bytes

KIB = 1024


@pytest.fixture
def root(tmp_path):
    """Writes files below a root that stands for `/`."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    write(proc__meminfo="MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    return write


def put(root, path, text):
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_without_cgroups_it_is_what_the_kernel_calls_available(root):
    assert available_bytes(root()) == 5000 * KIB


def test_a_v1_limit_counts_less_what_is_used_but_for_idle_cache(root):
    top = root()
    put(top, "proc/self/cgroup", "4:memory:/a/b\n2:cpu:/a\n0::/\n")
    group = "sys/fs/cgroup/memory/a/b/"
    put(top, group + "memory.limit_in_bytes", "3000000\n")
    put(top, group + "memory.usage_in_bytes", "1000000\n")
    put(top, group + "memory.stat", "inactive_file 7\ntotal_inactive_file 400000\n")
    put(top, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")

    assert available_bytes(top) == 3000000 - 600000


def test_a_v2_limit_of_a_parent_counts(root):
    top = root()
    put(top, "proc/self/cgroup", "0::/a/b\n")
    put(top, "sys/fs/cgroup/a/b/memory.max", "max\n")
    put(top, "sys/fs/cgroup/a/memory.max", "2000000\n")
    put(top, "sys/fs/cgroup/a/memory.current", "500000\n")

    assert available_bytes(top) == 1500000


def test_in_a_container_the_mount_itself_is_the_group(root):
    top = root()
    put(top, "proc/self/cgroup", "0::/not/visible\n")
    put(top, "sys/fs/cgroup/memory.max", "1000000\n")

    assert available_bytes(top) == 1000000


def test_what_is_used_up_leaves_nothing(root):
    top = root()
    put(top, "proc/self/cgroup", "0::/\n")
    put(top, "sys/fs/cgroup/memory.max", "1000\n")
    put(top, "sys/fs/cgroup/memory.current", "5000\n")

    assert available_bytes(top) == 0


def test_a_system_that_does_not_tell_gives_none(tmp_path):
    assert available_bytes(tmp_path) is None
    assert rss_bytes(tmp_path) is None
    assert peak_rss_bytes(tmp_path) is None


def test_this_process_is_measured(root):
    top = root(proc__self__status="VmHWM:\t  300 kB\nVmRSS:\t  200 kB\n")

    assert rss_bytes(top) == 200 * KIB
    assert peak_rss_bytes(top) == 300 * KIB
