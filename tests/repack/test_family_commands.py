from __future__ import annotations

import json
from pathlib import Path

import pytest

from colibri_repack import cmd_inspect, cmd_repack
from colibri_runtime.config import RunConfig
from colibri_runtime.runtime import Runtime
from helpers import family_states as f
from helpers.safetensors_builder import write_folder


def folder_of(tmp_path: Path, family: str, **config: object) -> str:
    return str(write_folder(tmp_path / "in", dict(f.hf_state(family)), f.config(family) | config))


def test_inspect_says_that_engines_cannot_run_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.colibri")
    assert cmd_repack.main([folder_of(tmp_path, "gpt_oss"), out]) == 0
    assert "gpt-oss: repacked only" in capsys.readouterr().out

    assert cmd_inspect.main([out]) == 0
    assert "not described (no model.json)" in capsys.readouterr().out
    assert cmd_inspect.main([out, "--json"]) == 0

    record = json.loads(capsys.readouterr().out)
    assert record["has_model"] is False
    assert record["top_k"] == f.TOP_K
    assert record["token_bytes"] > 0


def test_engine_refuses_a_file_that_describes_no_model(tmp_path: Path) -> None:
    out = tmp_path / "out.colibri"
    assert cmd_repack.main([folder_of(tmp_path, "gpt_oss"), str(out)]) == 0

    with pytest.raises(Exception, match=r"model\.json") as caught:
        Runtime.open(out, RunConfig(context=16))

    assert getattr(caught.value, "code", None)


def test_mapping_of_an_unknown_family_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder_of(tmp_path, "phimoe", architectures=["New"], model_type="new")
    assert cmd_repack.main([source, str(tmp_path / "out.colibri")]) == 1
    assert "--family auto" in capsys.readouterr().err

    assert cmd_repack.main([source, "--dry-run", "--family", "auto"]) == 0

    text = capsys.readouterr().out
    assert "block_sparse_moe.experts.{}.w1.weight -> blk.{}.ffn_gate.{}.weight" in text


def test_options_that_there_are_not_are_usage_errors(tmp_path: Path) -> None:
    for option in (["--family", "x"], ["--fp8", "x"]):
        with pytest.raises(SystemExit) as caught:
            cmd_repack.main([str(tmp_path), "out", *option])
        assert caught.value.code == 2
