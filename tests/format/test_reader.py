"""What an open file gives, and what damage does to it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import colibri_format as cf
from helpers.forge import Forge, layout_of, region_extents, sample_plan, write_sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sample.colibri"


def damage(path: Path, offset: int, n_bytes: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for place in range(offset, offset + n_bytes):
        data[place] ^= 0x55
    path.write_bytes(data)


def test_index_is_the_files_own_bytes_read_only(path: Path) -> None:
    write_sample(path)

    with cf.open(path) as file:
        assert file.index.dtype == cf.INDEX_DTYPE
        assert file.index.dtype.itemsize == 16
        assert file.index.shape == file.checksums.shape == (3, 5)
        assert file.index.flags.c_contiguous
        assert not file.index.flags.writeable
        assert not file.index.flags.owndata
        assert file.index.tobytes() == path.read_bytes()[4096 : 4096 + 16 * 15]


def test_reader_gives_back_everything_that_was_written(path: Path) -> None:
    written = write_sample(path)

    with cf.open(path) as file:
        for layer, expert in np.argwhere(file.index["size"] != 0).tolist():
            handle = file.expert(layer, expert)
            block = handle.read()
            payload = b"".join(
                block[s.offset : s.offset + s.size].tobytes() for s in handle.segments
            )
            assert payload == written[f"L{layer}/E{expert}"]
            assert handle.offset % file.geometry.alignment == 0
        for name in file.tensors:
            assert file.tensor(name).read().tobytes() == written[f"tensor {name}"]
        for name in file.files:
            assert file.read_file(name) == written[f"file {name}"]
        assert file.metadata == {"source": ["é", 1, True, None], "tool": "vectors"}
        assert file.warnings == ()
        assert file.verify() == []


def test_layer_without_experts_has_no_layout(path: Path) -> None:
    write_sample(path)

    with cf.open(path) as file:
        assert file.layout(1) is None
        assert file.layout(0) != file.layout(2)
        assert {tuple(entry) for entry in file.index[1].tolist()} == {(0, 0)}


@pytest.mark.parametrize(("layer", "expert"), [(1, 0), (2, 3), (0, 5), (0, -1)])
def test_absent_expert_is_named(layer: int, expert: int, path: Path) -> None:
    write_sample(path)

    with cf.open(path) as file, pytest.raises(cf.UsageError) as caught:
        file.expert(layer, expert)

    assert caught.value.code == "no-such-expert"
    assert f"L{layer}/E{expert}" in str(caught.value)


def test_unknown_names_are_refused(path: Path) -> None:
    write_sample(path)

    with cf.open(path) as file:
        for call, code in (
            (lambda: file.tensor("nothing"), "no-such-tensor"),
            (lambda: file.read_file("nothing"), "no-such-file"),
            (lambda: file.layout(3), "no-such-layer"),
            (lambda: file.layer_pack(-1), "no-such-layer"),
            (lambda: file.verify(layer=9), "no-such-layer"),
            (lambda: file.expert(0, 0).read_into(bytearray(5)), "bad-buffer"),
            (lambda: file.tensor("output_norm.weight").read_into(bytearray(5)), "bad-buffer"),
        ):
            with pytest.raises(cf.UsageError) as caught:
                call()
            assert caught.value.code == code


def test_one_read_of_a_pack_brings_a_layers_tensors(path: Path) -> None:
    written = write_sample(path)

    with cf.open(path) as file:
        pack = file.layer_pack(1)
        tensor = file.tensors["blk.1.norm"]
        data = file.read_at(pack.offset, pack.size)
        start = tensor.offset - pack.offset
        assert data[start : start + tensor.size] == written["tensor blk.1.norm"]
        assert file.layer_pack(2) == cf.Extent(0, 0)
        assert file.global_pack.size


def test_any_damage_to_one_copy_opens_with_a_warning_and_verify_names_it(path: Path) -> None:
    write_sample(path)
    sound = path.read_bytes()
    with cf.open(path) as file:
        places = [(0, 4096), (len(sound) - 4096, 4096)]
        places += [(offset, length) for _, offset, length in region_extents(file.superblock)]
        expected = (file.uuid, file.index.tobytes(), file.metadata)

    for offset, length in places:
        damage(path, offset + length // 2)
        with cf.open(path) as file:
            assert (file.uuid, file.index.tobytes(), file.metadata) == expected
            found = file.verify()
            assert [item.offset for item in found] == [offset]
            end = "start" if offset < len(sound) // 2 else "end"
            (warning,) = file.warnings
            assert f"at the {end} is damaged" in warning
        path.write_bytes(sound)


def test_streams_give_the_same_bytes_and_find_the_same_damage(path: Path) -> None:
    write_sample(path)

    with cf.open(path) as file:
        tensor = next(t for t in map(file.tensor, file.tensors) if t.size > 8)
        for item in (file.expert(0, 2), tensor):
            stream = item.stream()
            pieces = [np.empty(n, np.uint8) for n in (0, 1, 5, item.size - 6)]
            for piece in pieces:
                stream.read_into(piece)
            stream.finish()
            assert np.concatenate(pieces).tobytes() == item.read().tobytes()
            with pytest.raises(cf.UsageError, match="0 are left"):
                stream.read_into(bytearray(1))
            with pytest.raises(cf.UsageError, match="not read"):
                item.stream().finish()
        places = {"block-checksum": file.expert(0, 2).offset, "tensor-checksum": tensor.offset}
        names = {"block-checksum": file.expert(0, 2), "tensor-checksum": tensor}
        for code, item in names.items():
            damage(path, places[code] + item.size - 1)
            stream = item.stream()
            stream.read_into(bytearray(item.size))
            with pytest.raises(cf.FormatError) as caught:
                stream.finish()
            assert caught.value.code == code


def test_both_copies_damaged_is_refused(path: Path) -> None:
    write_sample(path)
    with cf.open(path) as file:
        extents = list(region_extents(file.superblock))
    for _, offset, length in extents[:2]:
        damage(path, offset + length - 1)

    with pytest.raises(cf.FormatError) as caught:
        cf.open(path)

    assert caught.value.code == "region-checksum"
    assert "index" in str(caught.value)


def test_both_superblocks_damaged_is_refused(path: Path) -> None:
    write_sample(path)
    damage(path, 100)
    damage(path, path.stat().st_size - 100)

    with pytest.raises(cf.FormatError) as caught:
        cf.open(path)

    assert caught.value.code == "superblock-checksum"


def test_damaged_block_costs_that_expert_alone(path: Path) -> None:
    write_sample(path)
    with cf.open(path) as file:
        place = file.expert(2, 1).offset + 500
    damage(path, place)

    with cf.open(path) as file:
        with pytest.raises(cf.FormatError) as caught:
            file.expert(2, 1).read()
        assert caught.value.code == "block-checksum"
        assert f"L2/E1 at {file.expert(2, 1).offset:#x}" in str(caught.value)
        file.expert(2, 0).read()
        (found,) = file.verify()
        assert (found.code, found.layer, found.expert) == ("block-checksum", 2, 1)
        assert file.verify(layer=0) == []
        assert len(file.verify(layer=2)) == 1
    with cf.open(path, verify=False) as file:
        file.expert(2, 1).read()


def test_damaged_tensor_file_and_padding_are_named(path: Path) -> None:
    write_sample(path)
    with cf.open(path) as file:
        tensor, entry = file.tensors["blk.1.norm"], file.files["config.json"]
        block = file.expert(0, 4)
    damage(path, tensor.offset)
    damage(path, entry.offset + 9)
    damage(path, block.offset + block.size + 3)
    damage(path, tensor.offset + tensor.size)

    with cf.open(path) as file:
        with pytest.raises(cf.FormatError) as caught:
            file.tensor("blk.1.norm").read()
        assert caught.value.code == "tensor-checksum"
        with pytest.raises(cf.FormatError) as caught:
            file.read_file("config.json")
        assert caught.value.code == "file-checksum"
        codes = sorted(item.code for item in file.verify())
        assert codes == ["file-checksum", *["padding-not-zero"] * 2, "tensor-checksum"]


def test_file_cut_short_while_open_is_a_short_read(path: Path) -> None:
    write_sample(path)

    with cf.open(path) as file:
        os.truncate(path, file.expert(2, 4).offset + 10)
        with pytest.raises(cf.StorageError) as caught:
            file.expert(2, 4).read()

    assert caught.value.code == "short-read"
    assert isinstance(caught.value, OSError)


def test_verify_reports_every_byte_once(path: Path) -> None:
    write_sample(path)
    calls: list[tuple[int, int]] = []

    with cf.open(path) as file:
        file.verify(lambda done, total: calls.append((done, total)))

    assert calls[-1] == (path.stat().st_size, path.stat().st_size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_threads_share_one_reader(path: Path) -> None:
    written = write_sample(path)

    with cf.open(path) as file, ThreadPoolExecutor(8) as threads:
        blocks = list(threads.map(lambda n: file.expert(0, n % 5).read().tobytes(), range(200)))

    assert all(block == blocks[n % 5] for n, block in enumerate(blocks))
    assert blocks[3].startswith(written["L0/E3"][:100])


def test_interleaved_segment_comes_back_plain(path: Path) -> None:
    kind = cf.DTYPES["q4_k"]
    plain = np.random.default_rng(1).integers(0, 256, (32, 144), np.uint8)
    layout = cf.Layout.of((cf.SegmentSpec(cf.Role.GATE, kind, (32, 256), 16),))
    plan = cf.plan_layout(n_layers=1, n_experts=1, layer_layouts=[layout])
    with cf.Writer(path, plan) as writer:
        writer.write_block(0, 0, cf.interleave(plain.reshape(-1), kind, (32, 256)))

    with cf.open(path) as file:
        expert = file.expert(0, 0)
        block = expert.read()
        assert block.tobytes() != plain.tobytes()
        assert expert.plain(expert.segments[0], block).tobytes() == plain.tobytes()


def test_large_alignment_and_index_of_many_experts_open(path: Path) -> None:
    layout = layout_of("q8_0", 32, 32)
    plan = cf.plan_layout(
        n_layers=2, n_experts=400, layer_layouts=[layout, layout], alignment=65_536
    )
    write_sample(path, plan)

    with cf.open(path) as file:
        assert not (file.index["offset"] % 65_536).any()
        assert file.verify() == []


def test_forged_file_is_as_the_writer_made_it(path: Path) -> None:
    write_sample(path, sample_plan())
    data = path.read_bytes()
    forge = Forge(data)

    forge.set_superblock(forge.superblock)

    assert bytes(forge.data) == data
