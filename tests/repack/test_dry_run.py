"""What a dry run tells, and that the run then lands on it to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colibri_format import DTYPES, Layout, Role, SegmentSpec
from colibri_repack import RepackOptions, cmd_repack, plan
from colibri_repack.plan_advice import (
    MAX_GOOD_INDEX,
    index_advice,
    padding_advice,
    padding_share,
    padding_shares,
)
from helpers import family_states as f
from helpers.family_gguf import gguf_of
from helpers.gguf_models import gguf_model
from helpers.quant_models import quant_model
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import write_folder

Capture = pytest.CaptureFixture[str]
TIMES = ("uuid", "seconds", "seconds_estimate", "seconds_estimate_from", "bytes_per_second")


def layout_of(rows: int, columns: int, dtype: str = "q8_0") -> Layout:
    specs = [SegmentSpec(role, DTYPES[dtype], (rows, columns)) for role in (Role.GATE, Role.UP)]
    return Layout.of((*specs, SegmentSpec(Role.DOWN, DTYPES[dtype], (rows, columns))))


def both(source: Path, output: Path, capsys: Capture, *options: str) -> list[dict[str, Any]]:
    """The records of a dry run and of the run."""
    records = []
    for more in (["--dry-run"], []):
        assert cmd_repack.main([str(source), str(output), "--json", *options, *more]) == 0
        records.append(json.loads(capsys.readouterr().out))
        assert output.exists() == (not more)
    return records


def sources(tmp_path: Path) -> dict[str, Path]:
    return {
        "moe": gguf_model("qwen3moe").write(tmp_path / "moe.gguf"),
        "dense": write_folder(tmp_path / "hf", dict(random_state("llama")), CONFIGS["llama"]),
        "quantised": quant_model(DTYPES["q4_k"]).write(tmp_path / "q.gguf"),
        "repacked only": gguf_of("deepseek_v3", "stacked").write(tmp_path / "ds.gguf"),
        "half": write_folder(tmp_path / "fam", dict(f.hf_state("gpt_oss")), f.config("gpt_oss")),
    }


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--block-size", "64K"],
        ["--quant", "q8_0", "--layout", "x16"],
        ["--quant", "q4_k_m", "--dense-quant", "q8_0", "--layout", "auto", "--block-size", "16K"],
    ],
)
@pytest.mark.parametrize("name", ["moe", "dense", "quantised", "repacked only", "half"])
def test_the_run_lands_on_what_the_dry_run_said(
    tmp_path: Path, capsys: Capture, name: str, options: list[str]
) -> None:
    if name == "quantised":
        options = [*options, "--allow-requantize"]
    output = tmp_path / "m.colibri"

    planned, written = both(sources(tmp_path)[name], output, capsys, *options)

    assert planned["file_size"] == output.stat().st_size
    assert planned["seconds_estimate"] > 0
    assert {k: v for k, v in planned.items() if k not in TIMES} == {
        k: written[k] for k in planned if k not in TIMES
    }


def test_layers_of_other_types_are_told_apart(tmp_path: Path, capsys: Capture) -> None:
    source = gguf_model("qwen3moe-tied-dense-layer").write(tmp_path / "in.gguf")

    planned, _ = both(source, tmp_path / "m.colibri", capsys, "--quant", "q8_0")
    kinds = {tuple(group["layers"]): group for group in planned["layer_types"]}

    dense = next(group for group in kinds.values() if not group["segments"])
    routed = next(group for group in kinds.values() if group["segments"])
    assert set(routed["segments"]) == {"gate", "up", "down"}
    assert sum(map(len, kinds)) == planned["n_layers"]
    assert sum(dense["dense"].values()) != sum(routed["dense"].values())


def test_a_dry_run_prints_shares_layers_and_time(tmp_path: Path, capsys: Capture) -> None:
    source = quant_model(DTYPES["q8_0"]).write(tmp_path / "in.gguf")

    assert cmd_repack.main([str(source), "--dry-run", "--layout", "x16"]) == 0
    out = capsys.readouterr().out

    for text in (
        "at 4K",
        "at 16K",
        "at 64K",
        "layers 0-1",
        "gate q8_0 x16",
        "time  ",
        "interleaved",
    ):
        assert text in out


def test_padding_shares_are_those_of_files_of_that_alignment(tmp_path: Path) -> None:
    source = gguf_model("mixtral").write(tmp_path / "in.gguf")
    planned = plan(source).file
    uses = tuple((layout, planned.n_blocks) for layout in planned.layouts)

    for alignment, share in padding_shares(uses).items():
        options = RepackOptions(alignment=alignment)
        assert share == pytest.approx(plan(source, options).file.padding_share)


def test_good_padding_needs_no_advice() -> None:
    assert padding_advice(((layout_of(512, 4096), 10),), 4096) == ""


def test_a_smaller_block_size_that_is_good_is_named_with_its_share() -> None:
    uses = ((layout_of(64, 1024), 10),)

    text = padding_advice(uses, 2**20)

    assert padding_share(uses, 2**20) > 0.05
    assert "--block-size 16K gives" in text or "--block-size 32K gives" in text
    assert "experts in one block" not in text


def test_experts_too_small_for_any_block_size_are_told_what_grouping_gives() -> None:
    uses = ((layout_of(32, 32), 64),)

    text = padding_advice(uses, 65_536)

    # 3 segments of 1088 bytes: 3264 of 4096.
    assert "--block-size 4K gives 20.3%" in text
    n_grouped = int(text.split(" experts in one block")[0].rsplit(" ", 1)[1])
    assert padding_share(uses, 4096, n_grouped) <= 0.05
    assert padding_share(uses, 4096, n_grouped - 1) > 0.05
    assert f"{padding_share(uses, 4096, n_grouped):.1%}" in text
    assert "smallest block size" in padding_advice(uses, 4096)


def test_segments_of_odd_sizes_may_leave_padding_that_nothing_cures() -> None:
    tiny = Layout.of((SegmentSpec(Role.UP, DTYPES["f32"], (1, 1)),))

    assert "a type of more bits" in padding_advice(((tiny, 2),), 4096)


def test_an_index_above_100_mib_says_what_is_cut_too_fine() -> None:
    n_layers, n_experts = 16, 2**20
    size = 24 * n_layers * n_experts

    text = index_advice(size, n_layers, n_experts, 2**36)

    assert "1048576 experts" in text
    assert "4096 bytes each" in text
    assert f"4 of them in one make the index {size // 4} bytes" in text
    assert index_advice(MAX_GOOD_INDEX, 1, 1, 1) == ""
