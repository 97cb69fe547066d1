from __future__ import annotations

from pathlib import Path

import pytest

from colibri_format import ColibriError
from colibri_repack import open_source
from helpers import gguf_builder as g
from helpers.safetensors_builder import encode


def code_of(path: Path) -> str:
    with pytest.raises(ColibriError) as caught:
        open_source(path)
    return caught.value.code


def test_kind_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = g.GgufBuilder().add("a", g.U8, 1).write(tmp_path / "model.safetensors")

    assert open_source(path).format == "gguf"


@pytest.mark.parametrize(
    "head", [b"", b"\x00", b"PK\x03\x04....", b"\x89CLB\r\n\x1a\n" + bytes(64), b"hello world"]
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(head)

    assert code_of(path) == "unknown-source"


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")

    assert code_of(tmp_path) == "unknown-source"


def test_folder_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    g.GgufBuilder().write(tmp_path / "a.gguf")

    with pytest.raises(ColibriError, match="name the GGUF file"):
        open_source(tmp_path)


def test_nothing_there_is_file_not_found(tmp_path: Path) -> None:
    assert code_of(tmp_path / "missing") == "file-not-found"


def test_safetensors_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(encode({}))

    assert code_of(tmp_path) == "missing-config"


def test_device_is_no_file() -> None:
    assert code_of(Path("/dev/null")) == "not-a-file"
