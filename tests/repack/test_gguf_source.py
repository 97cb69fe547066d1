from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from colibri_repack import SourceError, open_source
from colibri_repack.sources import gguf_cursor
from helpers import gguf_builder as g
from helpers.gguf_builder import GgufBuilder, string

Q8_0, F32 = 8, 0


def plain() -> GgufBuilder:
    return GgufBuilder().add("general.architecture", g.STRING, "qwen3moe")


def code_of(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(path)
    assert str(path) in str(caught.value)
    return caught.value.code


def test_every_value_type_comes_back_and_goes_into_gguf_json(tmp_path: Path) -> None:
    builder = GgufBuilder()
    items = [
        ("a.u8", g.U8, 200), ("a.i8", g.I8, -5), ("a.u16", g.U16, 60000), ("a.i16", g.I16, -3),
        ("a.u32", g.U32, 2**32 - 1), ("a.i32", g.I32, -7), ("a.f32", g.F32, 1e-6),
        ("a.bool", g.BOOL, True), ("a.str", g.STRING, "größe"), ("a.u64", g.U64, 2**64 - 1),
        ("a.i64", g.I64, -(2**63)), ("a.f64", g.F64, 0.1),
        ("a.nan", g.F32, float("nan")),
        ("a.words", g.ARRAY, (g.STRING, ["x", "", "ß"])),
        ("a.scores", g.ARRAY, (g.F32, [0.1, -1e-5])),
        ("a.flags", g.ARRAY, (g.BOOL, [True, False])),
        ("a.none", g.ARRAY, (g.I32, [])),
    ]  # fmt: skip
    for key, kind, item in items:
        builder.add(key, kind, item)
    path = builder.write(tmp_path / "a.gguf")

    source = open_source(path)
    record = json.loads(source.embedded[0].read())

    assert source.embedded[0].name == "gguf.json"
    assert (record["version"], record["alignment"]) == (3, 32)
    got = {key: (kind, value) for key, kind, value in record["kv"]}
    assert list(got) == [key for key, _, _ in items]
    assert got["a.u64"] == ("u64", 2**64 - 1)
    assert got["a.i64"] == ("i64", -(2**63))
    assert got["a.f32"] == ("f32", 1e-6)
    assert got["a.bool"] == ("bool", True)
    assert got["a.str"] == ("str", "größe")
    assert np.isnan(got["a.nan"][1])
    assert got["a.words"] == ("arr:str", ["x", "", "ß"])
    assert got["a.scores"] == ("arr:f32", [0.1, -1e-5])
    assert got["a.flags"] == ("arr:bool", [True, False])
    assert got["a.none"] == ("arr:i32", [])


def test_bytes_that_are_no_utf8_survive(tmp_path: Path) -> None:
    builder = plain().add("token", g.STRING, b"\xff\xfeok")
    source = open_source(builder.write(tmp_path / "a.gguf"))

    value = {k: v for k, _, v in json.loads(source.embedded[0].read())["kv"]}["token"]

    assert value.encode("utf-8", "surrogateescape") == b"\xff\xfeok"


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int) -> None:
    builder = plain().tensor("t", (2, 3), F32, np.arange(6, dtype="<f4").tobytes())
    builder.version = version
    source = open_source(builder.write(tmp_path / "a.gguf"))
    buffer = bytearray(8)

    source.read_into("t", 4, memoryview(buffer))

    assert source.tensors["t"].shape == (2, 3)
    assert np.frombuffer(buffer, "<f4").tolist() == [1, 2]


def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    builder = GgufBuilder(alignment=256).add("general.alignment", g.U32, 256)
    builder.tensor("a", (3,), F32, b"\1" * 12).tensor("b", (1,), F32, b"\2" * 4)
    source = open_source(builder.write(tmp_path / "a.gguf"))
    buffer = bytearray(4)

    source.read_into("b", 0, memoryview(buffer))

    assert buffer == b"\2" * 4
    assert source.tensors["b"].offset % 256 == 0


def test_vocabulary_over_several_chunks_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cursor, "_CHUNK", 64)
    words = [f"word {n}" * (n % 5) for n in range(400)]
    builder = plain().add("tokens", g.ARRAY, (g.STRING, words)).add("last", g.U8, 7)

    source = open_source(builder.write(tmp_path / "a.gguf"))

    assert source.config["tokens"] == words
    assert source.config["last"] == 7


def test_trailing_bytes_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(plain().tensor("t", (8,), F32, bytes(32)).build() + bytes(10))

    assert "10 bytes" in open_source(path).notes[0]


def tensor_case(**changes: object) -> bytes:
    facts: dict[str, object] = {"name": "t", "shape": (8,), "ggml_type": F32, "data": bytes(32)}
    return plain().tensor(**(facts | changes)).build()  # type: ignore[arg-type]


def two_tensors(name: str, offset: int) -> bytes:
    builder = plain().tensor("a", (16,), F32, bytes(64))
    return builder.tensor(name, (16,), F32, bytes(64), offset=offset).build()


def with_counts(n_rows: int | None, n_pairs: int | None) -> bytes:
    builder = plain()
    builder.n_rows, builder.n_pairs = n_rows, n_pairs
    return builder.build()


def with_version(number: int) -> bytes:
    builder = plain()
    builder.version = number
    return builder.build()


def raw_pair(body: bytes) -> bytes:
    return GgufBuilder().add_raw(string("k") + body).build()


def aligned(kind: int, item: object) -> bytes:
    return plain().add("general.alignment", kind, item).build()


HOSTILE = {
    "only the magic": (b"GGUF", "gguf-truncated"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "gguf-big-endian"),
    "version 1": (with_version(1), "gguf-version"),
    "version 4": (with_version(4), "gguf-version"),
    "tensor count near 2^63": (with_counts(2**63 - 1, None), "gguf-count"),
    "tensor count 2^64 - 1": (with_counts(2**64 - 1, None), "gguf-count"),
    "more keys than any model has": (with_counts(None, 400_001), "gguf-count"),
    "more numbers than any model has": (
        raw_pair(struct.pack("<IIQ", 9, 0, 12_000_001)),
        "gguf-array-length",
    ),
    "more strings than any model has": (
        raw_pair(struct.pack("<IIQ", 9, 8, 1_200_001)),
        "gguf-array-length",
    ),
    "key count near 2^63": (with_counts(None, 2**63), "gguf-count"),
    "more keys than there are": (with_counts(None, 2), "gguf-name"),
    "key length past the end": (
        GgufBuilder().add_raw(struct.pack("<Q", 2**40) + bytes(64)).build(),
        "gguf-string",
    ),
    "key length 2^64 - 1": (
        GgufBuilder().add_raw(struct.pack("<Q", 2**64 - 1) + bytes(64)).build(),
        "gguf-string",
    ),
    "empty key": (GgufBuilder().add("", g.U8, 1).build(), "gguf-name"),
    "unknown value type": (raw_pair(struct.pack("<I", 13) + bytes(8)), "gguf-value-type"),
    "unknown element type": (raw_pair(struct.pack("<IIQ", 9, 99, 1)), "gguf-value-type"),
    "array of arrays": (raw_pair(struct.pack("<IIQ", 9, 9, 1) + bytes(32)), "gguf-nested-array"),
    "array length near 2^63": (raw_pair(struct.pack("<IIQ", 9, 10, 2**63)), "gguf-array-length"),
    "array whose bytes wrap": (raw_pair(struct.pack("<IIQ", 9, 10, 2**61)), "gguf-array-length"),
    "strings past the end": (raw_pair(struct.pack("<IIQ", 9, 8, 2**32)), "gguf-array-length"),
    "string element past the end": (
        raw_pair(struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**50) + bytes(32)),
        "gguf-string",
    ),
    "duplicate key": (
        plain().add("general.architecture", g.STRING, "x").build(),
        "gguf-duplicate-key",
    ),
    "a part by its keys alone": (plain().add("split.count", g.U16, 2).build(), "gguf-split"),
    "alignment 0": (aligned(g.U32, 0), "gguf-alignment"),
    "alignment 48": (aligned(g.U32, 48), "gguf-alignment"),
    "alignment as text": (aligned(g.STRING, "32"), "gguf-alignment"),
    "empty tensor name": (tensor_case(name=""), "gguf-name"),
    "rank 0": (tensor_case(shape=(), data=bytes(4)), "gguf-rank"),
    "rank 5": (tensor_case(shape=(1, 1, 1, 1, 8)), "gguf-rank"),
    "rank 2^32 - 1": (tensor_case(rank=2**32 - 1), "gguf-rank"),
    "length near 2^63": (tensor_case(shape=(2**63,)), "gguf-shape"),
    "shape whose product wraps": (tensor_case(shape=(2**33, 2**33)), "gguf-shape"),
    "shape whose product wraps to 0": (tensor_case(shape=(2**32, 2**32)), "gguf-shape"),
    "zero hides a huge length": (tensor_case(shape=(0, 2**63), data=b""), "gguf-shape"),
    "bytes that wrap": (tensor_case(shape=(2**61,)), "gguf-bounds"),
    "retired type Q4_2": (tensor_case(ggml_type=4), "gguf-dtype"),
    "type of computing only": (tensor_case(ggml_type=9), "gguf-dtype"),
    "negative type": (tensor_case(ggml_type=2**32 - 1), "gguf-dtype"),
    "row of half a quant block": (tensor_case(shape=(48,), ggml_type=Q8_0), "gguf-row"),
    "offset misaligned": (tensor_case(offset=8), "gguf-misaligned"),
    "offset past the end": (tensor_case(offset=2**40), "gguf-bounds"),
    "offset near 2^63": (tensor_case(offset=2**63), "gguf-bounds"),
    "duplicate tensor": (two_tensors("a", 64), "gguf-duplicate-tensor"),
    "tensors overlap": (two_tensors("b", 32), "gguf-overlap"),
    "tensors on each other": (two_tensors("b", 0), "gguf-overlap"),
    "data cut short": (tensor_case()[:-1], "gguf-truncated"),
    "data not there": (tensor_case()[:-32], "gguf-truncated"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_gguf_is_refused(tmp_path: Path, name: str) -> None:
    data, code = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)

    assert code_of(path) == code


def test_no_truncation_is_taken_for_whole(tmp_path: Path) -> None:
    data = plain().add("n", g.ARRAY, (g.STRING, ["a", "b"])).tensor("t", (8,), F32, bytes(32))
    whole = data.build()
    path = tmp_path / "cut.gguf"

    for size in range(4, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError) as caught:
            open_source(path)
        assert caught.value.code.startswith("gguf-"), size


def test_header_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_cursor, "MAX_HEADER_BYTES", 1000)
    builder = plain().add("words", g.ARRAY, (g.STRING, ["x" * 90] * 40))

    assert code_of(builder.write(tmp_path / "a.gguf")) == "gguf-header-size"


def test_read_outside_a_tensor_is_refused(tmp_path: Path) -> None:
    source = open_source(plain().tensor("t", (8,), F32, bytes(32)).write(tmp_path / "a.gguf"))

    with pytest.raises(SourceError) as caught:
        source.read_into("t", 30, memoryview(bytearray(4)))

    assert caught.value.code == "tensor-range"
