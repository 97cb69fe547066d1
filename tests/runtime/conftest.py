"""The C library for aarch64 under qemu-user, started once for all tests that want it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.arm_emulator import ArmLibrary, build_server


@pytest.fixture(scope="session")
def arm_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_server(tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="session")
def arm_library(arm_server: Path) -> Iterator[ArmLibrary]:
    with ArmLibrary(arm_server) as library:
        yield library
