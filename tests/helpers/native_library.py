"""The C library of colibri_repack, or a skip that says why there is none."""

from __future__ import annotations

import os

import pytest

from colibri_repack._native import NativeLibrary, native


def native_library() -> NativeLibrary:
    """The library; where the build had to make it, its absence is a failure."""
    loaded = native()
    if loaded.library is not None:
        return loaded.library
    if os.environ.get("COLIBRI_REQUIRE_NATIVE") == "1":
        pytest.fail(f"no C library: {loaded.reason}")
    pytest.skip(f"no C library: {loaded.reason}")
