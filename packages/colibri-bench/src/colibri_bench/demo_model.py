"""The embedded model: a real Mixture-of-Experts model of 21 M parameters (see data/README.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

DEMO_NAME: Final = "hummingbird-21m-moe"


@contextmanager
def demo_gguf() -> Iterator[Path]:
    """The path of the model's GGUF, valid inside the context."""
    with as_file(files("colibri_bench") / "data" / f"{DEMO_NAME}.q8_0.gguf") as path:
        yield path


@contextmanager
def demo_trace() -> Iterator[Path]:
    """The path of a routing trace recorded from the model, valid inside the context."""
    with as_file(files("colibri_bench") / "data" / f"{DEMO_NAME}.route.csv") as path:
        yield path
