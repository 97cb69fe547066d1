"""`colibri` finds verbs by entry point and loads only the one that is called."""

from __future__ import annotations

import subprocess
import sys

import pytest

from colibri_toolkit import cli


def test_help_lists_every_verb_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0

    text = capsys.readouterr().out
    for verb in ("repack", "inspect", "verify", "run", "demo"):
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [verb]]
        assert len(line.split()) > 3
    assert "cannot be loaded" not in text


def test_no_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: colibri" in captured.err


def test_unknown_verb_is_refused_with_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspcet", "x"]) == 2
    assert "did you mean 'inspect'" in capsys.readouterr().err
    assert cli.main(["zzzz"]) == 2
    assert "error[unknown-verb]" in capsys.readouterr().err


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("colibri 0.")


def test_arguments_reach_the_verb_and_its_status_comes_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["inspect", "/nonexistent.colibri"]) == 1
    assert "error[file-not-found]" in capsys.readouterr().err


def test_only_the_called_verb_is_loaded() -> None:
    code = (
        "import sys; from colibri_toolkit.cli import main; main(['inspect', '/none']);"
        "sys.exit('colibri_runtime' in sys.modules or 'colibri_bench' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 0
