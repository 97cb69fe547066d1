"""Buffers and threads follow from the budget, and what is planned never goes over it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_format import ColibriError
from colibri_repack import (
    Quant,
    RepackOptions,
    cmd_repack,
    open_source,
    plan,
    read_checkpoint,
    repack,
)
from colibri_repack.memory_plan import MemoryNeeds, check_metadata, plan_memory
from colibri_repack.pieces import cut, gather
from helpers.gguf_models import gguf_model
from helpers.random_models import CONFIGS

MIB = 2**20
Capture = pytest.CaptureFixture[str]


@given(
    st.integers(0, 2**31),
    st.integers(1, 64),
    st.builds(
        MemoryNeeds,
        fixed_bytes=st.integers(0, 500 * MIB),
        n_files=st.integers(1, 9),
        is_recoding=st.booleans(),
        is_decoding=st.booleans(),
        is_interleaving=st.booleans(),
        least_tile_bytes=st.integers(0, 8 * MIB),
        worker_bytes=st.integers(0, 30 * MIB),
    ),
)
def test_plan_is_within_the_budget_or_names_one_that_works(
    budget: int, n_cores: int, needs: MemoryNeeds
) -> None:
    try:
        found = plan_memory(budget, needs, n_cores)
    except ColibriError as error:
        assert error.code == "budget-too-small"
        assert isinstance(error, MemoryError)
        least = int(error.message.split("--memory ")[1].split("M")[0]) * MIB
        assert least > budget
        found = plan_memory(least, needs, n_cores)
        budget = least
    assert found.total_bytes <= budget
    assert found.tile_bytes >= needs.least_tile_bytes
    assert found.n_tiles > found.n_workers >= 1
    assert found.write_buffer_bytes >= 4096


def test_more_memory_brings_larger_tiles_and_more_threads() -> None:
    needs = MemoryNeeds(fixed_bytes=64 * MIB, is_recoding=True)

    plans = [plan_memory(mib * MIB, needs, 8) for mib in (72, 90, 130, 512)]

    assert [p.tile_bytes for p in plans] == sorted(p.tile_bytes for p in plans)
    assert [p.n_workers for p in plans] == sorted(p.n_workers for p in plans)
    assert plans[-1].n_workers == 9


@pytest.mark.parametrize("tile_bytes", [1000, 5000, 2**16, 2**22])
@pytest.mark.parametrize("quant", ["keep", "q8_0"])
def test_pieces_make_up_every_part(tmp_path: Path, quant: str, tile_bytes: int) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")
    parts = list(plan(source, RepackOptions(quant=Quant.of(quant))).parts)

    for part in parts:
        pieces = list(cut(part, tile_bytes))
        assert sum(piece.size for piece in pieces) == part.source.size
        assert sum(piece.out_bytes for piece in pieces) == part.size
        assert [piece.start for piece in pieces[1:]] == [
            piece.start + piece.size for piece in pieces[:-1]
        ]
    tiles = list(gather(parts, tile_bytes))
    assert [piece for tile in tiles for piece in tile] == [
        piece for part in parts for piece in cut(part, tile_bytes)
    ]
    for tile in tiles:
        assert len(tile) == 1 or sum(piece.tile_bytes for piece in tile) <= tile_bytes


def test_budget_that_cannot_do_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: Capture
) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")
    arguments = [str(source), str(tmp_path / "m.colibri"), "--memory"]

    assert cmd_repack.main([*arguments, "16M"]) == 2
    error = capsys.readouterr().err
    assert "error[budget-too-small]" in error
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]
    least = error.split("--memory ")[1].split()[0]
    assert cmd_repack.main([*arguments, least]) == 0


def test_dry_run_tells_memory_and_time_and_what_they_rest_on(
    tmp_path: Path, capsys: Capture
) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")

    assert cmd_repack.main([str(source), "--dry-run", "--quant", "q8_0"]) == 0
    out = capsys.readouterr().out

    assert "peak memory" in out
    assert "given a disk that reads and writes 1 GB/s, conversions as timed now" in out


def test_report_says_how_files_were_read_and_written(tmp_path: Path) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")

    record = repack(source, tmp_path / "m.colibri").to_record()

    assert record["resumed_bytes"] == 0
    for name in ("read_mode", "write_mode"):
        assert record[name]["mode"] in ("direct", "buffered")
        assert record[name]["reason"]
    assert record["peak_memory_estimate_bytes"] <= 512 * MIB


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GraniteMoeForCausalLM"])
def test_experts_beyond_the_budget_are_refused_before_they_are_cut(
    tmp_path: Path, architecture: str
) -> None:
    config = CONFIGS["qwen3moe"] | {"architectures": [architecture]}
    config |= {"num_hidden_layers": 1, "num_experts": 2**20, "num_local_experts": 2**20}
    is_granite = architecture.startswith("Granite")
    stem = "model.layers.0." + ("block_sparse_moe." if is_granite else "mlp.experts.")
    names = ("input_linear.weight", "output_linear.weight") if is_granite else (
        "gate_up_proj", "down_proj")  # fmt: skip
    hidden = config["hidden_size"]
    header, end = {}, 0
    for name, shape in zip(names, ((2**20, 2, hidden), (2**20, hidden, 1)), strict=True):
        start, end = end, end + 2 * 2**20 * hidden * shape[1 if shape[2] == hidden else 2]
        header[stem + name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

    with pytest.raises(ColibriError) as caught:
        plan(tmp_path, RepackOptions(memory_bytes=2**30))

    assert caught.value.code == "budget-too-small"
    assert "1 layers of 1048576 experts" in str(caught.value)


def test_an_index_that_is_too_large_is_why_a_plan_is_refused() -> None:
    check_metadata(512 * 2**20, 94, 128)
    with pytest.raises(ColibriError) as caught:
        check_metadata(512 * 2**20, 6, 10**6)

    assert caught.value.code == "budget-too-small"
    assert "cut too fine" in str(caught.value)


def test_described_families_ask_first_too(tmp_path: Path) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "m.gguf")
    asked: list[tuple[int, int]] = []

    opened = open_source(source)
    checkpoint = read_checkpoint(opened, admit=lambda *counts: asked.append(counts))
    opened.close()

    routed = [table for table in checkpoint.experts if table is not None]
    assert asked == [(len(routed), checkpoint.n_experts)]
