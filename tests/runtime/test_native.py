"""The C library: that it is the right one, and what is said when it is not there."""

import os
import shutil

import pytest

from colibri_runtime import _native
from colibri_runtime._native import Isa, load, native, sources_id


@pytest.fixture
def library():
    found = native().library
    if found is None:
        pytest.skip(f"no C library: {native().reason}")
    return found


def test_base_kernels_are_always_there(library):
    assert Isa.BASE in library.isas
    assert library.best in library.isas


@pytest.mark.skipif(
    os.environ.get("COLIBRI_SANITIZED") != "1", reason="make test-sanitize was not what ran this"
)
def test_library_under_sanitizers_is_the_one_that_runs(library):
    assert "sanitize" in library.path.parts
    assert b"__asan_init" in library.path.read_bytes()


def test_environment_forbids_the_library(monkeypatch):
    monkeypatch.setenv("COLIBRI_NO_NATIVE", "1")

    assert load(_native.Path("libcolibri_runtime.so")).reason == "COLIBRI_NO_NATIVE=1"


def test_missing_library_says_what_to_do(tmp_path):
    found = load(tmp_path / "libcolibri_runtime.so")

    assert found.library is None
    assert "install gcc or clang" in found.reason


def test_library_of_older_sources_is_refused(library, tmp_path):
    (tmp_path / "newer.c").write_text("int newer;\n")

    found = load(library.path, tmp_path)

    assert found.library is None
    assert "of other sources" in found.reason


def test_library_without_sources_beside_it_is_taken(library, tmp_path):
    assert load(library.path, tmp_path / "absent").library is not None


def test_something_else_under_the_librarys_name_is_refused(tmp_path):
    path = tmp_path / "libcolibri_runtime.so"
    path.write_bytes(b"no library")

    assert load(path).library is None


def test_sources_are_known_by_names_and_bytes(tmp_path):
    (tmp_path / "isa").mkdir()
    (tmp_path / "isa" / "a.c").write_text("int a;\n")
    first = sources_id(tmp_path)
    shutil.move(tmp_path / "isa" / "a.c", tmp_path / "a.c")

    assert sources_id(tmp_path) != first
    assert sources_id(tmp_path / "isa") is None
