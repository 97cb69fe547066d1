from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import colibri_format
from colibri_repack import SourceError, open_source, repack
from helpers import gguf_builder as g
from helpers.gguf_builder import GgufBuilder
from helpers.gguf_models import describe, gguf_model, stacked_state

NAME = "qwen3moe"
Change = Callable[[list[GgufBuilder]], None]


def split_builders(n_parts: int, *, is_first_empty: bool = False) -> list[GgufBuilder]:
    """The model in so many parts, as gguf-split writes them: description in the first one only."""
    tensors = list(stacked_state(NAME).items())
    parts = []
    first_with_tensors = 1 if is_first_empty else 0
    for number in range(n_parts):
        builder = describe(GgufBuilder(), NAME) if number == 0 else GgufBuilder()
        builder.add("split.no", g.U16, number).add("split.count", g.U16, n_parts)
        builder.add("split.tensors.count", g.I32, len(tensors))
        if number >= first_with_tensors:
            step = n_parts - first_with_tensors
            for key, tensor in tensors[number - first_with_tensors :: step]:
                builder.tensor(key, tensor.shape, 0, tensor.tobytes())
        parts.append(builder)
    return parts


def write_parts(folder: Path, parts: list[GgufBuilder]) -> list[Path]:
    return [
        part.write(folder / f"m-{number:05}-of-{len(parts):05}.gguf")
        for number, part in enumerate(parts, 1)
    ]


def code_of(path: Path) -> tuple[str, str]:
    with pytest.raises(SourceError) as caught:
        open_source(path)
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize("named", [0, 1, 2])
@pytest.mark.parametrize("is_first_empty", [False, True])
def test_any_part_opens_the_whole_model(tmp_path: Path, named: int, is_first_empty: bool) -> None:
    paths = write_parts(tmp_path, split_builders(3, is_first_empty=is_first_empty))

    source = open_source(paths[named])

    assert sorted(source.tensors) == sorted(stacked_state(NAME))
    assert set(source.inputs) == set(paths)
    keys = [key for key, _, _ in json.loads(source.embedded[0].read())["kv"]]
    assert "general.architecture" in keys
    assert not [key for key in keys if key.startswith("split.")]


def test_split_and_whole_model_repack_to_the_same_blocks(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_builders(3))
    whole = gguf_model(NAME).write(tmp_path / "whole.gguf")

    repack(paths[1], tmp_path / "a.colibri")
    repack(whole, tmp_path / "b.colibri")

    with (
        colibri_format.open(tmp_path / "a.colibri") as a,
        colibri_format.open(tmp_path / "b.colibri") as b,
    ):
        np.testing.assert_array_equal(a.checksums, b.checksums)
        for name, tensor in b.tensors.items():
            assert a.tensors[name].dtype == tensor.dtype
            np.testing.assert_array_equal(a.tensor(name).read(), b.tensor(name).read())
        assert a.tensors.keys() == b.tensors.keys()
        assert a.read_file("model.json") == b.read_file("model.json")


def test_each_part_has_an_alignment_of_its_own(tmp_path: Path) -> None:
    parts = split_builders(2)
    parts[1].alignment = 256
    parts[1].add("general.alignment", g.U32, 256)
    paths = write_parts(tmp_path, parts)

    source = open_source(paths[0])

    state = stacked_state(NAME)
    for name, tensor in source.tensors.items():
        buffer = bytearray(tensor.size)
        source.read_into(name, 0, memoryview(buffer))
        assert buffer == state[name].tobytes()


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    paths = write_parts(tmp_path, split_builders(3))
    paths[missing].unlink()

    code, message = code_of(paths[1])

    assert code == "missing-shard"
    assert paths[missing].name in message


def test_part_cut_short_is_named_before_anything_is_written(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_builders(3))
    paths[2].write_bytes(paths[2].read_bytes()[:-64])

    with pytest.raises(SourceError, match=paths[2].name) as caught:
        repack(paths[0], tmp_path / "out.colibri")

    assert caught.value.code == "gguf-truncated"
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def of_another_number(parts: list[GgufBuilder]) -> None:
    parts[1].pairs[0] = g.string("split.no") + parts[2].pairs[0][len(g.string("split.no")) :]


def of_another_count(parts: list[GgufBuilder]) -> None:
    parts[2].pairs[1] = GgufBuilder().add("split.count", g.U16, 4).pairs[0]


def of_another_total(parts: list[GgufBuilder]) -> None:
    parts[1].pairs[2] = GgufBuilder().add("split.tensors.count", g.I32, 3).pairs[0]


def without_a_total(parts: list[GgufBuilder]) -> None:
    del parts[2].pairs[2]


def without_a_tensor(parts: list[GgufBuilder]) -> None:
    parts[1].rows.pop()


def without_keys(parts: list[GgufBuilder]) -> None:
    parts[1].pairs.clear()


def with_a_tensor_twice(parts: list[GgufBuilder]) -> None:
    parts[2].rows.append(parts[1].rows[0])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (of_another_number, "gguf-split"),
        (of_another_count, "gguf-split"),
        (of_another_total, "gguf-split"),
        (without_a_total, "gguf-split"),
        (without_a_tensor, "gguf-split"),
        (without_keys, "gguf-split"),
        (with_a_tensor_twice, "duplicate-tensor"),
    ],
)
def test_parts_that_disagree_are_refused(tmp_path: Path, change: Change, code: str) -> None:
    parts = split_builders(3)
    change(parts)
    paths = write_parts(tmp_path, parts)

    assert code_of(paths[0])[0] == code


def test_part_under_another_name_is_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_builders(3))
    renamed = paths[0].rename(tmp_path / "model.gguf")

    assert code_of(renamed)[0] == "gguf-split"


def test_split_in_one_part_is_a_whole_model(tmp_path: Path) -> None:
    builder = gguf_model(NAME).add("split.count", g.U16, 1).add("split.no", g.U16, 0)

    assert len(open_source(builder.write(tmp_path / "m.gguf")).tensors) == len(stacked_state(NAME))


def test_parts_written_by_gguf_py_are_read(tmp_path: Path) -> None:
    state = stacked_state(NAME)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe", split_max_tensors=7)
    for key, tensor in state.items():
        writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("*.gguf"))

    source = open_source(paths[2])

    assert len(paths) == -(-len(state) // 7)
    assert source.tensors.keys() == state.keys()
    for name, tensor in state.items():
        buffer = bytearray(source.tensors[name].size)
        source.read_into(name, 0, memoryview(buffer))
        assert buffer == tensor.tobytes()
