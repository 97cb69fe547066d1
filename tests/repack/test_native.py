from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_repack import _native
from colibri_repack._native import BUILD_ID, load
from helpers.native_library import native_library

PACKAGE = Path(__file__).parent.parent.parent / "packages" / "colibri-repack"


def copied(tmp_path: Path) -> Path:
    """The package's sources without anything built."""
    target = tmp_path / "package"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info"))
    return target


def build(package: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"],
        cwd=package,
        env={**os.environ, "COLIBRI_REQUIRE_NATIVE": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_build_id_is_that_of_the_sources() -> None:
    digest = hashlib.sha256()
    for path in sorted((PACKAGE / "csrc").glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")

    assert digest.hexdigest()[:16] == BUILD_ID, "set BUILD_ID in _native.py to this"


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    native_library()
    path = Path(_native.__file__).with_name(_native._NAME)
    monkeypatch.setattr(_native, "BUILD_ID", "0" * 16)

    loaded = load(path)

    assert loaded.library is None
    assert "other sources" in loaded.reason


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libcolibri_repack.so"
    path.write_bytes(b"\x7fELF")

    loaded = load(path)

    assert loaded.library is None
    assert "reinstall" in loaded.reason


def test_another_library_is_refused() -> None:
    import xxhash

    loaded = load(next(Path(xxhash.__file__).parent.glob("*.so")))

    assert loaded.library is None
    assert "another library" in loaded.reason


def test_a_missing_library_is_told(tmp_path: Path) -> None:
    loaded = load(tmp_path / "libcolibri_repack.so")

    assert loaded.library is None
    assert "was not built" in loaded.reason


def test_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLIBRI_NO_NATIVE", "1")

    assert load(tmp_path / "any").reason == "COLIBRI_NO_NATIVE=1"


def test_a_build_without_compiler_goes_on_and_says_so(tmp_path: Path) -> None:
    package = copied(tmp_path)
    stale = package / "src" / "colibri_repack" / "libcolibri_repack.so"
    stale.write_bytes(b"of yesterday")

    done = build(package, CC="false")

    assert done.returncode == 0, done.stderr
    assert "could not be built" in done.stderr
    assert load(stale).library is None


def test_a_build_that_must_be_native_fails_without_compiler(tmp_path: Path) -> None:
    done = build(copied(tmp_path), CC="false", COLIBRI_REQUIRE_NATIVE="1")

    assert done.returncode != 0
    assert "COLIBRI_REQUIRE_NATIVE=1" in done.stderr


def test_a_build_of_changed_sources_says_which_id_to_set(tmp_path: Path) -> None:
    package = copied(tmp_path)
    with (package / "csrc" / "convert.c").open("a") as file:
        file.write("\n")

    done = build(package)

    assert done.returncode != 0
    assert "BUILD_ID" in done.stderr
