"""Files that are refused, beyond the conformance vectors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import colibri_format as cf
from colibri_format.header import Region
from helpers.forge import Forge, sample_plan, write_sample


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sample") / "sample.colibri"
    write_sample(path)
    return path.read_bytes()


def test_reader_ignores_unknown_compat_features_and_later_minor(
    sample: bytes, tmp_path: Path
) -> None:
    forge = Forge(sample)
    block = dataclasses.replace(forge.superblock, compat=1 << 40, ro_compat=2, minor=3)

    with cf.open(forge.set_superblock(block).write(tmp_path / "later.colibri")) as file:
        assert file.superblock.compat == 1 << 40
        assert file.verify() == []


@pytest.mark.parametrize("n_bytes", [1, 4096, 20_000])
def test_reader_refuses_truncated_and_extended_files(
    n_bytes: int, sample: bytes, tmp_path: Path
) -> None:
    short, long = tmp_path / "short.colibri", tmp_path / "long.colibri"
    short.write_bytes(sample[:-n_bytes])
    long.write_bytes(sample + bytes(n_bytes))

    for path, code in ((short, "truncated"), (long, "trailing-bytes")):
        with pytest.raises(cf.FormatError) as caught:
            cf.open(path)
        assert caught.value.code == code


def test_reader_refuses_folder_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(cf.StorageError) as caught:
        cf.open(tmp_path)
    assert caught.value.code == "not-a-file"

    with pytest.raises(cf.StorageError) as caught:
        cf.open(tmp_path / "missing.colibri")
    assert caught.value.code == "file-not-found"
    assert caught.value.errno == 2
    assert caught.value.filename == str(tmp_path / "missing.colibri")


def test_mislabelled_block_fails_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "swapped.colibri"
    write_sample(path, sample_plan())
    forge = Forge(path.read_bytes())
    content = bytes(forge.region(Region.INDEX))
    swapped = content[16:32] + content[:16]
    forge.patch_region(Region.INDEX, 0, swapped)
    forge.write(path)

    with cf.open(path) as file, pytest.raises(cf.FormatError) as caught:
        file.expert(0, 0).read()

    assert caught.value.code == "block-checksum"
    assert "L0/E0" in str(caught.value)
