"""The conformance vectors: each valid file gives its facts, each invalid one its code."""

from __future__ import annotations

import filecmp
import json
import tracemalloc
from pathlib import Path

import pytest

import colibri_format as cf
import generate
from helpers.forge import code_of

FOLDER = Path(generate.__file__).parent
MANIFEST = json.loads((FOLDER / "manifest.json").read_text(encoding="ascii"))


@pytest.mark.parametrize("name", MANIFEST["valid"])
def test_valid_file_gives_its_facts(name: str) -> None:
    entry = MANIFEST["valid"][name]

    assert json.loads(json.dumps(generate.facts(FOLDER / entry["path"]))) == entry["facts"]


@pytest.mark.parametrize("name", MANIFEST["invalid"])
def test_invalid_file_is_refused_with_its_code(name: str) -> None:
    entry = MANIFEST["invalid"][name]
    path = FOLDER / entry["path"]

    with pytest.raises(cf.FormatError) as caught:
        cf.open(path)

    assert caught.value.code.upper().replace("-", "_") == entry["code"], str(caught.value)
    assert str(path) in str(caught.value)


def test_every_code_of_opening_has_a_vector() -> None:
    reading = {"BLOCK_CHECKSUM", "TENSOR_CHECKSUM", "FILE_CHECKSUM", "PADDING_NOT_ZERO",
               "SHORT_READ", "BAD_MODEL"}  # fmt: skip

    covered = {entry["code"] for entry in MANIFEST["invalid"].values()}

    assert {code.name for code in cf.FormatCode} - covered == reading


def test_vectors_are_what_the_generator_makes(tmp_path: Path) -> None:
    assert generate.main([str(tmp_path)]) == 0

    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    here = {
        path.relative_to(FOLDER)
        for name in ("valid", "invalid")
        for path in (FOLDER / name).rglob("*")
        if path.is_file()
    } | {Path("manifest.json")}
    assert made == here
    for path in made:
        assert filecmp.cmp(tmp_path / path, FOLDER / path, shallow=False), path


def test_no_vector_makes_a_reader_allocate_more_than_a_few_times_its_size() -> None:
    # Bounds are checked before anything is allocated, so a file cannot ask for more than it has.
    for entry in MANIFEST["invalid"].values():
        path = FOLDER / entry["path"]
        tracemalloc.start()
        try:
            assert code_of(lambda path=path: cf.open(path))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2**20 + 8 * path.stat().st_size, path
