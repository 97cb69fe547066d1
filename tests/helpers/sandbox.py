"""Children that the kernel refuses things: system calls by seccomp, memory to pin by a limit."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import subprocess
import sys

import pytest

IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
IO_SETUP, IO_SUBMIT = 206, 209  # x86-64

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # <linux/bpf_common.h>
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # <linux/seccomp.h>


def forbid(calls: dict[int, int]) -> None:
    """From now on this process gets errno `calls[n]` for system call n (seccomp(2))."""
    program = [(_LOAD, 0, 0, 0)]  # the call's number, first in struct seccomp_data
    for number, error in calls.items():
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    found = Program(len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, 2, ctypes.byref(found), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def limit_pinned_memory() -> None:
    """From now on this process may pin 64 KiB, enough for a small ring, and has no CAP_IPC_LOCK."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    if libc.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


def run_child(function: str, *arguments: object, env: dict[str, str] | None = None) -> object:
    """What `module:function` of the tests' helpers returns in a child process, through JSON.

    A child whose sandbox this machine does not allow skips the test.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the sandbox is written for Linux on x86-64")
    module, name = function.split(":")
    code = (
        f"import json, sys, {module}; sys.path[:0] = {sys.path!r}; "
        f"print(json.dumps({module}.{name}(*json.loads(sys.argv[1]))))"
    )
    code = f"import sys; sys.path[:0] = {sys.path!r}; " + code
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        check=False,
    )
    if result.returncode == 77:
        pytest.skip(f"no such sandbox here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def or_skip(step, *arguments):
    """`step(*arguments)`; where the machine refuses it, the test that started us is skipped."""
    try:
        step(*arguments)
    except (OSError, AttributeError) as error:
        print(f"{step.__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(77)
