"""`colibri demo` shows the whole way and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri_bench import cmd_demo, demo_gguf


def test_demo_shows_every_step_and_keeps_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cmd_demo.main(["--keep", str(tmp_path / "kept"), "--max-tokens", "4"]) == 0

    text = capfd.readouterr().out
    for verb in ("repack", "inspect", "verify", "run"):
        assert f"$ colibri {verb} " in text
    assert "The texts are the same" in text
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["hummingbird-21m-moe.colibri"]


def test_demo_works_with_one_token_and_says_what_budget_is_too_small(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cmd_demo.main(["--keep", str(tmp_path), "--max-tokens", "1"]) == 0
    assert cmd_demo.main(["--keep", str(tmp_path), "--memory", "1M"]) == 2
    assert "error[budget-too-small]" in capfd.readouterr().err


def test_demo_names_a_folder_that_cannot_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")

    assert cmd_demo.main(["--keep", str(tmp_path / "file")]) == 1
    assert "error[file-exists]" in capfd.readouterr().err


def test_model_is_part_of_the_package() -> None:
    with demo_gguf() as path:
        assert path.read_bytes()[:4] == b"GGUF"
