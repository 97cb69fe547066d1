"""The thread team of the C library: who computes, how it ends, and what a fork leaves."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from colibri_format import DTYPES
from colibri_runtime.native_kernels import KernelError, NativeKernels
from helpers.kernel_calls import matmul, runtime_library, stored
from helpers.quant_bytes import random_rows

ROWS, COLUMNS = 4096, 256
TASKS = Path("/proc/self/task")


@pytest.fixture(scope="module")
def library():
    return runtime_library()


@pytest.fixture(scope="module")
def data():
    return stored(random_rows(DTYPES["q8_0"], ROWS, COLUMNS, seed=1), DTYPES["q8_0"], COLUMNS, 0)


X = np.random.default_rng(2).standard_normal((1, COLUMNS)).astype(np.float32)


def product(kernels, data, x=X):
    return matmul(kernels, x, data, DTYPES["q8_0"], ROWS)


def n_threads_now():
    return len(list(TASKS.iterdir()))


@pytest.mark.parametrize("n_threads", [0, -1, 257])
def test_impossible_numbers_of_threads_are_refused(library, n_threads):
    with pytest.raises(KernelError) as raised:
        NativeKernels(library, n_threads=n_threads)

    assert raised.value.code == "no-team"


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are counted in /proc")
def test_a_team_of_one_has_no_thread_and_others_end_theirs(library, data):
    before = n_threads_now()
    with NativeKernels(library) as alone:
        product(alone, data)
        assert n_threads_now() == before
    team = NativeKernels(library, n_threads=4)
    assert n_threads_now() == before + 3
    team.close()
    team.close()

    assert n_threads_now() == before
    assert team.team_address == 0


@pytest.mark.parametrize("spin_ns", [0, 1_000_000])
def test_sleeping_and_spinning_threads_give_the_same(library, data, spin_ns):
    with (
        NativeKernels(library) as alone,
        NativeKernels(library, n_threads=3, spin_ns=spin_ns) as team,
    ):
        expected = product(alone, data)
        for _ in range(200):
            assert (product(team, data) == expected).all()


def test_teams_of_several_callers_do_not_mix(library, data):
    with NativeKernels(library) as alone:
        expected = product(alone, data)
    wrong = []

    def compute():
        with NativeKernels(library, n_threads=2) as team:
            wrong.extend(1 for _ in range(50) if (product(team, data) != expected).any())

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_second_caller_of_a_busy_team_is_refused_or_served(library, data):
    # Which, depends on the moment; wrong results and lost wake-ups are what must not be.
    many = np.repeat(X, 64, axis=0)
    with NativeKernels(library, n_threads=2) as team:
        expected = product(team, data, many)
        outcomes = []

        def compute():
            for _ in range(30):
                try:
                    outcomes.append(bool((product(team, data, many) == expected).all()))
                except KernelError as error:
                    outcomes.append("EBUSY" in str(error))

        threads = [threading.Thread(target=compute) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert all(outcomes) and len(outcomes) == 90


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_alone_and_may_close(library, data):
    with NativeKernels(library, n_threads=3) as team:
        expected = product(team, data)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                same = (product(team, data) == expected).all()
                team.close()
                status = 0 if same else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert (product(team, data) == expected).all()
