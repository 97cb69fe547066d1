from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import colibri_format
from colibri_format import DTYPES, ColibriError, DType, interleave
from colibri_repack import cmd_inspect, cmd_repack, repack, row_groups
from colibri_repack._native import Native
from colibri_repack.kernel_layout import FASTER_INTERLEAVED, MAX_GROUP_ELEMENTS, obstacle
from colibri_repack.row_groups import deinterleave_rows, interleave_rows
from helpers.gguf_models import gguf_model
from helpers.native_library import native_library
from helpers.quant_models import quant_model

WITH_UNITS = [dtype for dtype in DTYPES.values() if dtype.units]
Capture = pytest.CaptureFixture[str]


def packed(tmp_path: Path, dtype: str, layout: str, **options: object) -> Path:
    source = quant_model(DTYPES[dtype], **options).write(tmp_path / "in.gguf")  # type: ignore[arg-type]
    output = tmp_path / f"{layout}.colibri"
    repack(source, output, layout=layout)
    return output


@pytest.mark.parametrize("dtype", WITH_UNITS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(16, 256), (48, 768), (0, 256)])
def test_c_interleaves_as_the_specification_says(dtype: DType, shape: tuple[int, int]) -> None:
    native_library()
    rows = np.random.default_rng(1).integers(0, 256, dtype.size_bytes(shape), np.uint8)

    found = interleave_rows(rows, dtype, shape[1])

    assert found.tobytes() == interleave(rows, dtype, shape).tobytes()
    assert deinterleave_rows(found, dtype, shape[1]).tobytes() == rows.tobytes()


def test_without_c_numpy_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, shape = DTYPES["q6_k"], (32, 512)
    rows = np.random.default_rng(1).integers(0, 256, dtype.size_bytes(shape), np.uint8)
    monkeypatch.setattr(row_groups, "native", lambda: Native(None, "for this test"))

    found = interleave_rows(rows, dtype, shape[1])

    assert found.tobytes() == interleave(rows, dtype, shape).tobytes()
    assert deinterleave_rows(found, dtype, shape[1]).tobytes() == rows.tobytes()


def test_c_refuses_what_is_no_whole_group() -> None:
    library = native_library()
    rows = np.zeros(34 * 15, np.uint8)

    with pytest.raises(ValueError, match="510 bytes"):
        library.interleave(rows, np.empty_like(rows), DTYPES["q8_0"], 1)
    with pytest.raises(ValueError, match="f32"):
        library.interleave(rows[:512], rows[:512].copy(), DTYPES["f32"], 8)
    with pytest.raises(ValueError, match="contiguous"):
        library.interleave(rows[:128:2], rows[:64], DTYPES["f32"], 1)


@pytest.mark.parametrize("dtype", WITH_UNITS, ids=lambda dtype: dtype.name)
def test_x16_interleaves_matrices_and_gives_their_plain_bytes_back(
    tmp_path: Path, dtype: DType
) -> None:
    plain, x16 = (packed(tmp_path, dtype.name, layout) for layout in ("plain", "x16"))

    with colibri_format.open(plain) as a, colibri_format.open(x16) as b:
        assert b.verify() == []
        for name, fact in b.tensors.items():
            is_matrix = name == "output.weight" or name.split(".")[2:3] in (
                ["attn_q"], ["attn_k"], ["attn_v"], ["attn_output"])  # fmt: skip
            assert fact.row_interleave == (16 if is_matrix else 0), name
            assert b.tensor(name).read_plain().tobytes() == a.tensor(name).read().tobytes(), name
        for layer, expert in np.argwhere(b.index["size"]).tolist():
            block, before = b.expert(layer, expert), a.expert(layer, expert)
            data, stored = block.read(), before.read()
            assert [s.row_interleave for s in block.segments] == [16, 16, 16]
            for ours, theirs in zip(block.segments, before.segments, strict=True):
                assert (ours.offset, ours.size) == (theirs.offset, theirs.size)
                expected = before.plain(theirs, stored).tobytes()
                assert block.plain(ours, data).tobytes() == expected
        assert (a.metadata["layout"], b.metadata["layout"]) == ("plain", "x16")


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k", "q4_1", "iq4_nl", "q2_k"])
def test_auto_interleaves_what_kernels_read_faster(tmp_path: Path, dtype: str) -> None:
    output = packed(tmp_path, dtype, "auto")

    expected = 16 if dtype in FASTER_INTERLEAVED else 0
    with colibri_format.open(output) as file:
        layout = file.layout(0)
        assert layout is not None
        assert {s.row_interleave for s in layout.segments} == {expected}
        assert file.tensors["output.weight"].row_interleave == expected


def test_a_tied_embedding_is_interleaved_as_the_head_that_it_is(tmp_path: Path) -> None:
    output = packed(tmp_path, "q8_0", "x16", tied=True)

    with colibri_format.open(output) as file:
        assert file.tensors["token_embd.weight"].row_interleave == 16


def test_rows_that_are_no_multiple_of_16_stay_plain_and_are_reported(tmp_path: Path) -> None:
    source = quant_model(DTYPES["q8_0"], vocab=63).write(tmp_path / "in.gguf")

    report = repack(source, tmp_path / "m.colibri", layout="x16")

    with colibri_format.open(tmp_path / "m.colibri") as file:
        assert file.tensors["output.weight"].row_interleave == 0
        assert file.tensors["blk.0.attn_q.weight"].row_interleave == 16
    assert [note for note in report.notes if "stay plain" in note] == [
        "rows stay plain, rows are no multiple of 16: output.weight"
    ]


def test_types_without_an_interleaved_form_stay_plain_and_are_reported(tmp_path: Path) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")

    report = repack(source, tmp_path / "m.colibri", layout="x16")

    assert any(note.startswith("rows stay plain, f32 has no") for note in report.notes)
    quiet = repack(source, tmp_path / "auto.colibri", layout="auto")
    assert not any("stay plain" in note for note in quiet.notes)


def test_rows_too_long_to_hold_sixteen_of_them_stay_plain() -> None:
    columns = MAX_GROUP_ELEMENTS // 16
    assert obstacle(DTYPES["q8_0"], (16, columns)) == ""
    assert "more than 65536" in obstacle(DTYPES["q8_0"], (16, columns + 32))
    assert "rank 2" in obstacle(DTYPES["q8_0"], (2, 16, 32))


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q4_k_m"])
def test_layout_combines_with_quantising(tmp_path: Path, quant: str) -> None:
    source = quant_model(DTYPES["f32"]).write(tmp_path / "in.gguf")
    for layout in ("plain", "x16"):
        repack(source, tmp_path / f"{layout}.colibri", quant=quant, layout=layout)

    with (
        colibri_format.open(tmp_path / "plain.colibri") as a,
        colibri_format.open(tmp_path / "x16.colibri") as b,
    ):
        for layer, expert in np.argwhere(b.index["size"]).tolist():
            block, before = b.expert(layer, expert), a.expert(layer, expert)
            data, stored = block.read(), before.read()
            for ours, theirs in zip(block.segments, before.segments, strict=True):
                assert ours.row_interleave == 16
                expected = before.plain(theirs, stored).tobytes()
                assert block.plain(ours, data).tobytes() == expected


def test_tiles_smaller_than_a_matrix_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = quant_model(DTYPES["q4_k"]).write(tmp_path / "in.gguf")
    repack(source, tmp_path / "whole.colibri", layout="x16")
    monkeypatch.setattr("colibri_repack.memory_plan._TILES", (5000,))

    repack(source, tmp_path / "tiles.colibri", layout="x16")

    whole, tiles = ((tmp_path / f"{n}.colibri").read_bytes() for n in ("whole", "tiles"))
    assert whole == tiles


def test_unknown_layout_is_refused(tmp_path: Path) -> None:
    source = quant_model(DTYPES["q8_0"]).write(tmp_path / "in.gguf")

    with pytest.raises(ColibriError) as caught:
        repack(source, tmp_path / "out", layout="x8")
    assert caught.value.code == "bad-layout"


def test_inspect_tells_the_layout(tmp_path: Path, capsys: Capture) -> None:
    source = quant_model(DTYPES["q8_0"]).write(tmp_path / "in.gguf")
    output = tmp_path / "m.colibri"
    assert cmd_repack.main([str(source), str(output), "--layout", "x16"]) == 0
    capsys.readouterr()

    assert cmd_inspect.main([str(output), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert cmd_inspect.main([str(output), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)

    assert "q8_0 x16" in out
    assert record["layouts"][0]["segments"][0]["row_interleave"] == 16
    assert record["metadata"]["layout"] == "x16"
