"""Exit statuses and what is told, alike for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from colibri_format import ColibriError, FormatError, StorageError, UsageError
from colibri_format.command import run_command


def raising(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (FormatError("truncated", "a", "b", "c"), 1, "error[truncated]: a: b; c"),
        (UsageError("bad-size", "a", "b", "c"), 2, "error[bad-size]"),
        (StorageError("disk-full", "a", "b", "c"), 1, "error[disk-full]"),
        (ColibriError("special", "a", "b", "c"), 2, "error[special]"),
        (KeyboardInterrupt(), 130, "stopped"),
        (BrokenPipeError(), 1, ""),
        (MemoryError(), 1, "error[out-of-memory]"),
        (OSError(12, "Cannot allocate memory"), 1, "error[out-of-memory]"),
        (OSError(5, "Input/output error"), 1, "error[os-error]: standard output: Input/output"),
        (OSError(5, "Input/output error", "a.txt"), 1, "error[os-error]: a.txt"),
    ],
)
def test_error_becomes_status_and_one_line(
    error: BaseException, status: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run_command(raising(error), usage_codes={"special"}, on_interrupt="stopped")

    assert found == status
    err = capfd.readouterr().err
    assert told in err
    assert err.count("\n") == bool(told)


def test_notes_stand_under_want_of_memory(capfd: pytest.CaptureFixture[str]) -> None:
    error = MemoryError("8 bytes for a buffer")
    error.add_note("3 of 4 items are kept")

    assert run_command(raising(error)) == 1
    assert capfd.readouterr().err == (
        "error[out-of-memory]: the system gave no memory (8 bytes for a buffer)\n"
        "3 of 4 items are kept\n"
    )


def test_status_of_the_body_is_kept() -> None:
    assert run_command(lambda: 7) == 7


@pytest.mark.parametrize("verb", ["--help", "--version"])
@pytest.mark.parametrize(
    ("redirection", "status", "told"),
    [(">/dev/full", 1, "error[os-error]: standard output: No space left"), (">&-", 0, "")],
)
def test_stdout_that_cannot_be_written_is_told(
    verb: str, redirection: str, status: int, told: str
) -> None:
    command = f"'{sys.executable}' -m colibri_toolkit {verb} {redirection}"

    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)

    assert done.returncode == status
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_the_terminal_cannot_show_are_escaped() -> None:
    command = [sys.executable, "-m", "colibri_toolkit", "inspect", "/n\u00fcll.colibri"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}

    done = subprocess.run(command, capture_output=True, env=environment, check=False)

    assert done.returncode == 1
    assert b"error[file-not-found]: /n\\xfcll.colibri" in done.stderr
