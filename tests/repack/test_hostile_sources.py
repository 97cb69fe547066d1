"""Any change of bytes in a checkpoint's description is harmless or refused with a code."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_format import ColibriError
from colibri_repack import plan
from helpers import gguf_builder as g
from helpers.gguf_models import gguf_model
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import write_folder

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)),
                   min_size=1, max_size=3)  # fmt: skip


def mutate(data: bytes, size: int, changes: list[tuple[float, bytes]]) -> bytes:
    """`data` with some of its first `size` bytes overwritten."""
    out = bytearray(data)
    for share, patch in changes:
        place = int(share * size)
        out[place : place + len(patch)] = patch[: size - place]
    return bytes(out)


def is_refused_or_planned(path: Path) -> None:
    try:
        plan(path)
    except ColibriError as error:
        assert error.code
        str(error).encode()


@pytest.fixture(scope="module")
def whole_gguf() -> tuple[bytes, int]:
    builder = gguf_model("qwen3moe-tied-dense-layer").add("words", g.ARRAY, (g.STRING, ["a", "b"]))
    return builder.build(), len(builder.head())


@FUZZ
@given(changes=CHANGES)
def test_changed_gguf_header(
    tmp_path: Path, whole_gguf: tuple[bytes, int], changes: list[tuple[float, bytes]]
) -> None:
    data, size = whole_gguf
    path = tmp_path / "m.gguf"
    path.write_bytes(mutate(data, size, changes))

    is_refused_or_planned(path)


@pytest.mark.parametrize("target", ["config.json", "model.safetensors"])
@FUZZ
@given(changes=CHANGES)
def test_changed_hugging_face_folder(
    tmp_path: Path, target: str, changes: list[tuple[float, bytes]]
) -> None:
    folder = tmp_path / "hf"
    original = tmp_path / f"original {target}"
    if not folder.exists():
        write_folder(folder, dict(random_state("qwen3")), CONFIGS["qwen3"])
        original.write_bytes((folder / target).read_bytes())
    data = original.read_bytes()
    is_json = target == "config.json"
    size = len(data) if is_json else 8 + int.from_bytes(data[:8], "little")
    (folder / target).write_bytes(mutate(data, size, changes))

    is_refused_or_planned(folder)
