from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_format import ColibriError
from colibri_repack import open_source
from helpers.safetensors_builder import bf16, encode, raw, write_folder

A = np.arange(6, dtype="<f4").reshape(2, 3)
B = np.arange(4, dtype="<f2")


def code_of(path: Path) -> str:
    with pytest.raises(ColibriError) as caught:
        open_source(path)
    return caught.value.code


def folder_with(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(data)
    return tmp_path


def one(header: Any, data: bytes = b"") -> bytes:
    return raw(header if isinstance(header, bytes) else json.dumps(header).encode(), data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("n_shards", [1, 2, 3])
def test_tensors_of_all_shards_come_back(tmp_path: Path, n_shards: int) -> None:
    tensors = {"a": A, "b": B, "c": bf16(A), "empty": np.zeros((0, 3), "<f4")}
    source = open_source(write_folder(tmp_path, tensors, {"x": 1}, n_shards=n_shards))

    for name, item in (("a", A), ("b", B)):
        buffer = bytearray(item.nbytes)
        source.read_into(name, 0, memoryview(buffer))
        assert buffer == item.tobytes()
    assert source.tensors["c"].dtype.name == "bf16"
    assert source.tensors["empty"].size == 0
    assert source.config["x"] == 1


def test_single_file_finds_its_config_beside_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, encode({"a": A}, metadata={"format": "pt"}))

    assert list(open_source(folder / "model.safetensors").tensors) == ["a"]


def test_numbered_shards_without_index_are_one_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)
    (folder / "model.safetensors.index.json").unlink()

    assert set(open_source(folder).tensors) == {"a", "b"}


def test_lone_file_of_any_name_is_the_model(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, encode({"a": A}))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")

    assert list(open_source(folder).tensors) == ["a"]


def test_stray_file_beside_an_index_is_ignored_and_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)
    (folder / "adapter.safetensors").write_bytes(encode({"a": A}))

    source = open_source(folder)

    assert set(source.tensors) == {"a", "b"}
    assert "adapter.safetensors" in source.notes[0]


def test_companions_are_carried_verbatim(tmp_path: Path) -> None:
    files = {"tokenizer.json": '{"é": 1}', "chat_template.jinja": "{{ x }}", "README.md": "no"}
    source = open_source(write_folder(tmp_path, {"a": A}, {}, files=files))

    embedded = {file.name: file.read() for file in source.embedded}

    assert set(embedded) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert embedded["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()

    with pytest.raises(ColibriError, match=shard.name) as caught:
        open_source(folder)
    assert caught.value.code == "missing-shard"


def test_missing_shard_without_index_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()

    assert code_of(folder) == "missing-shard"


def test_cut_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])

    with pytest.raises(ColibriError, match=shard.name) as caught:
        open_source(folder)
    assert caught.value.code == "safetensors-truncated"


def edit_index(folder: Path, weight_map: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shard_that_lacks_its_tensor_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)
    one_, two = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))

    assert code_of(edit_index(folder, {"a": two, "b": one_})) == "shard-lacks-tensor"
    assert code_of(edit_index(folder, {"a": one_, "b": two, "c": two})) == "shard-lacks-tensor"


def test_index_that_leaves_tensors_out_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B, "c": A}, {}, n_shards=2)
    one_, two = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))

    assert code_of(edit_index(folder, {"a": one_, "b": two})) == "safetensors-index"


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, {"a": "../x.safetensors"}, {"a": "/etc/passwd"}, {"a": 3}]
)
def test_index_that_points_elsewhere_is_refused(tmp_path: Path, weight_map: Any) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)

    assert code_of(edit_index(folder, weight_map)) == "safetensors-index"


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A, "b": B}, {}, n_shards=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(encode({"a": A, "b": B}))

    assert code_of(folder) == "duplicate-tensor"


def test_files_that_are_no_set_are_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("x.safetensors", "y.safetensors"):
        (tmp_path / name).write_bytes(encode({"a": A}))

    assert code_of(tmp_path) == "ambiguous-source"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    folder = folder_with(tmp_path, encode({"a": A}))
    (folder / "config.json").write_text(text)

    assert code_of(folder) == "bad-config"


HOSTILE = {
    "empty file": (b"", "safetensors-truncated"),
    "header length past the end": ((999).to_bytes(8, "little") + b"{}", "safetensors-truncated"),
    "header length 2^64 - 1": (b"\xff" * 8 + b"{}", "safetensors-header"),
    "header length 0": (bytes(8), "safetensors-header"),
    "white space first": (one(b' {"a": 1}'), "safetensors-json"),
    "no JSON": (one(b'{"a"'), "safetensors-json"),
    "deep JSON": (one(b'{"a":' + b"[" * 100_000), "safetensors-json"),
    "number of a million digits": (one(b'{"a":' + b"1" * 10**6 + b"}"), "safetensors-json"),
    "not UTF-8": (one(b'{"\xff": 1}'), "safetensors-json"),
    "duplicate tensor": (
        one(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "safetensors-json",
    ),
    "entry is no object": (one({"a": 1}), "safetensors-entry"),
    "entry lacks its shape": (one({"a": {"dtype": "F32"}}), "safetensors-entry"),
    "empty name": (one({"": entry()}, bytes(8)), "safetensors-entry"),
    "unknown dtype": (one({"a": entry("F7")}, bytes(8)), "safetensors-dtype"),
    "dtype is a number": (one({"a": entry(1)}, bytes(8)), "safetensors-dtype"),  # type: ignore[arg-type]
    "negative length": (one({"a": entry(shape=(-2,))}, bytes(8)), "safetensors-shape"),
    "length true": (one({"a": entry(shape=(True, 2))}, bytes(8)), "safetensors-shape"),
    "length 2^63": (one({"a": entry(shape=(2**63,))}, bytes(8)), "safetensors-shape"),
    "product wraps": (one({"a": entry(shape=(2**33, 2**33))}, bytes(8)), "safetensors-shape"),
    "rank 99": (one({"a": entry(shape=(1,) * 99)}, bytes(8)), "safetensors-shape"),
    "shape and bytes differ": (one({"a": entry(shape=(3,))}, bytes(8)), "safetensors-size"),
    "offsets backwards": (one({"a": entry(offsets=(8, 0))}, bytes(8)), "safetensors-size"),
    "offsets of three": (one({"a": entry(offsets=(0, 8, 9))}, bytes(8)), "safetensors-offsets"),
    "offset 2^63": (
        one({"a": entry(offsets=(2**63, 2**63 + 8))}, bytes(8)),
        "safetensors-offsets",
    ),
    "overlap": (
        one({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        "safetensors-offsets",
    ),
    "hole": (one({"a": entry(offsets=(4, 12))}, bytes(12)), "safetensors-offsets"),
    "bytes left over": (one({"a": entry()}, bytes(9)), "safetensors-offsets"),
    "cut short": (one({"a": entry()}, bytes(7)), "safetensors-truncated"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_is_refused(tmp_path: Path, name: str) -> None:
    data, code = HOSTILE[name]

    assert code_of(folder_with(tmp_path, data)) == code


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("kind", ["link to nothing", "folder", "pipe"])
def test_a_name_that_leads_to_no_file_is_not_taken_for_none(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = write_folder(tmp_path, {"a": A}, {})
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(folder / "nowhere")

    assert code_of(folder) == "not-a-file"


def test_shards_whose_numbers_have_other_widths_are_a_set(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": A}, {})
    (folder / "model.safetensors").rename(folder / "model-00001-of-000001.safetensors")

    assert list(open_source(folder).tensors) == ["a"]


def test_companion_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colibri_repack.sources.safetensors_source.MAX_JSON_BYTES", 50)
    folder = write_folder(tmp_path, {"a": A}, {}, files={"tokenizer.json": "x" * 51})

    assert code_of(folder) == "companion-size"
