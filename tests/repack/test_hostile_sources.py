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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "header"])
def test_more_values_than_any_checkpoint_has_are_refused_before_they_are_parsed(
    name: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, random_state("qwen3"), CONFIGS["qwen3"])
    bomb = b'{"a":[' + b"[]," * (3_000_001 if name == "header" else 700_000) + b"0]}"
    if name == "header":
        data = len(bomb).to_bytes(8, "little") + bomb
        (tmp_path / "model.safetensors").write_bytes(data)
    else:
        (tmp_path / name).write_bytes(bomb)

    with pytest.raises(ColibriError) as caught:
        plan(tmp_path)

    assert caught.value.code in ("bad-config", "safetensors-index", "safetensors-json")
    assert "values" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["general.architecture", "attention.clamp_kqv", "expert_gating_func", "rope.scaling.type",
     "rope.scale_linear", "attention.scale", "logit_scale"],
)  # fmt: skip
def test_gguf_array_where_a_single_value_is_due_is_refused(key: str, tmp_path: Path) -> None:
    builder = gguf_model("qwen3moe")
    name = key if key.startswith("general") else f"qwen3moe.{key}"
    builder.add(name, g.ARRAY, (g.F32, [1.0, 2.0]))
    path = tmp_path / "m.gguf"
    builder.write(path)

    with pytest.raises(ColibriError) as caught:
        plan(path)

    assert caught.value.code in ("bad-config", "unknown-family", "gguf-duplicate-key")
