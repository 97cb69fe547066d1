"""Files that break one rule each: name -> code, base file, change.

A change gets a `Forge` over the base file and leaves it with all checksums right, so that the rule
it breaks is the first one a reader meets.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

from colibri_format.header import Region
from forge import Forge


def u16(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def table(array: str, number: int, offset: int, value: bytes) -> Callable[[Forge], object]:
    """Changes bytes of one record of the tables."""
    return lambda forge: forge.patch_region(
        Region.TABLES, forge.record_offset(array, number) + offset, value
    )


def header(offset: int, value: bytes) -> Callable[[Forge], object]:
    return lambda forge: forge.patch_superblock(offset, value)


def index(layer: int, expert: int, value: bytes) -> Callable[[Forge], object]:
    return lambda forge: forge.patch_region(
        Region.INDEX, 16 * (layer * forge.superblock.n_experts + expert), value
    )


def metadata(text: bytes) -> Callable[[Forge], object]:
    return lambda forge: forge.set_region(Region.METADATA, text)


def region_field(region: Region, field: int, value: int) -> Callable[[Forge], object]:
    return header(128 + 32 * region + 8 * field, u64(value))


def overlap_blocks(forge: Forge) -> None:
    content = forge.region(Region.INDEX)
    forge.patch_region(Region.INDEX, 16, bytes(content[:16]))


def overlap_pack(forge: Forge) -> None:
    offset = struct.unpack_from("<Q", forge.region(Region.TABLES), forge.record_offset("pack", 3))
    forge.patch_region(Region.INDEX, 0, u64(offset[0]))


def swap_names(forge: Forge) -> None:
    at = forge.record_offset("string")
    tables = forge.region(Region.TABLES)
    names = bytes(tables[at:])
    forge.patch_region(
        Region.TABLES, at, names.replace(b"output_norm.weight", b"token_embd.weight\x01")
    )


def tensor_offset(forge: Forge, number: int) -> int:
    tables = forge.region(Region.TABLES)
    (offset,) = struct.unpack_from("<Q", tables, forge.record_offset("tensor", number) + 56)
    return int(offset)


def drop_files(forge: Forge) -> None:
    """No file records, their strings and their pack still there."""
    tables = bytes(forge.region(Region.TABLES))
    start, end = forge.record_offset("file"), forge.record_offset("volume")
    tables = tables[:start] + tables[end:]
    forge.set_region(Region.TABLES, tables[:16] + u32(0) + tables[20:])


def dirty_padding(forge: Forge) -> None:
    """Bytes that are not zero after both copies of the index."""
    extent = forge.superblock.regions[Region.INDEX]
    for offset in (extent.offset, extent.copy_offset):
        forge.data[offset + 4095] = 1


def rename_file(forge: Forge, name: bytes) -> Forge:
    tables = bytes(forge.region(Region.TABLES))
    assert len(name) == len("config.json")
    return forge.set_region(Region.TABLES, tables.replace(b"config.json", name))


RULES: dict[str, tuple[str, Callable[[Forge], object]]] = {
    "other_major": ("unsupported-version", header(8, u16(2))),
    "unknown_incompat": ("unsupported-feature", header(16, u64(1 << 63))),
    "reserved_incompat": ("unsupported-feature", header(16, u64(4))),
    "reserved_12": ("reserved-not-zero", header(12, u32(1))),
    "reserved_76": ("reserved-not-zero", header(76, u32(1))),
    "reserved_80": ("reserved-not-zero", header(100, b"\1")),
    "reserved_tail": ("reserved-not-zero", header(4087, b"\1")),
    "align_11": ("bad-alignment", header(72, u32(11))),
    "align_22": ("bad-alignment", header(72, u32(22))),
    "align_huge": ("bad-alignment", header(72, u32(2**32 - 1))),
    "no_layers": ("bad-geometry", header(64, u32(0))),
    "no_experts": ("bad-geometry", header(68, u32(0))),
    "layers_over_limit": ("bad-geometry", header(64, u32(65_536))),
    "experts_over_limit": ("bad-geometry", header(68, u32(1_048_577))),
    "product_over_limit": ("bad-geometry", header(64, u32(65_535, 1_048_576))),
    "index_length": ("region-length", region_field(Region.INDEX, 2, 16)),
    "index_for_more_experts": ("region-length", header(68, u32(6))),
    "checksums_length": ("region-length", region_field(Region.CHECKSUMS, 2, 8)),
    "volume_map_present": ("region-length", region_field(Region.VOLUME_MAP, 2, 30)),
    "expert_layouts_present": ("region-length", region_field(Region.EXPERT_LAYOUTS, 2, 30)),
    "tables_too_long": ("region-length", region_field(Region.TABLES, 2, 2**29 + 1)),
    "tables_too_short": ("region-length", region_field(Region.TABLES, 2, 63)),
    "metadata_too_short": ("region-length", region_field(Region.METADATA, 2, 1)),
    "metadata_too_long": ("region-length", region_field(Region.METADATA, 2, 2**24 + 1)),
    "extension_without_feature": ("region-length", region_field(Region.EXTENSION, 2, 8)),
    "data_not_aligned": ("region-length", region_field(Region.DATA, 2, 4097)),
    "length_wraps": ("region-length", region_field(Region.DATA, 2, 2**64 - 4096)),
    "tables_length_wraps": ("region-length", region_field(Region.TABLES, 2, 2**64 - 1)),
    "index_elsewhere": ("region-placement", region_field(Region.INDEX, 0, 8192)),
    "copy_elsewhere": ("region-placement", region_field(Region.TABLES, 1, 0)),
    "data_elsewhere": ("region-placement", region_field(Region.DATA, 0, 2**40)),
    "absent_region_with_offset": ("region-placement", region_field(Region.VOLUME_MAP, 0, 4096)),
    "data_with_checksum": ("region-placement", region_field(Region.DATA, 3, 1)),
    "tables_longer_than_file": ("region-placement", region_field(Region.TABLES, 2, 2**28)),
    "region_checksum": ("region-checksum", region_field(Region.INDEX, 3, 1)),
    "many_dtypes": ("table-count", table("dtype", 0, -64, u32(257))),
    "many_layouts": ("table-count", table("dtype", 0, -60, u32(2**31))),
    "many_segments": ("table-count", table("dtype", 0, -56, u32(2**32 - 1))),
    "many_tensors": ("table-count", table("dtype", 0, -52, u32(2**32 - 1))),
    "many_files": ("table-count", table("dtype", 0, -48, u32(4097))),
    "volumes": ("table-count", table("dtype", 0, -44, u32(1))),
    "string_bytes_wrap": ("table-count", table("dtype", 0, -40, u64(2**64 - 1))),
    "one_tensor_more": ("table-length", table("dtype", 0, -52, u32(5))),
    "string_bytes_more": ("table-length", table("dtype", 0, -40, u64(1))),
    "table_header_reserved": ("reserved-not-zero", table("dtype", 0, -1, b"\1")),
    "string_offset": ("bad-string", table("dtype", 1, 0, u32(0))),
    "string_empty": ("bad-string", table("dtype", 0, 4, u32(0))),
    "string_past_end": ("bad-string", table("dtype", 0, 4, u32(255))),
    "string_length_wraps": ("bad-string", table("dtype", 0, 4, u32(2**32 - 1))),
    "string_not_utf8": ("bad-string", table("string", 0, 0, b"\xff")),
    "string_with_nul": ("bad-string", table("string", 0, 0, b"\0")),
    "string_control": ("bad-string", swap_names),
    "dtype_reserved": ("reserved-not-zero", table("dtype", 0, 20, b"\1")),
    "dtype_wrong_bytes": ("bad-dtype", table("dtype", 0, 16, u32(33))),
    "dtype_wrong_id": ("bad-dtype", table("dtype", 0, 8, u32(9))),
    "dtype_unknown_zero_elements": (
        "bad-dtype",
        lambda forge: table("dtype", 0, 12, u32(0))(table("string", 0, 0, b"zz")(forge)),
    ),
    "dtype_duplicate": ("duplicate-name", table("string", 0, 4, b"zzzzzz")),
    "layout_first": ("bad-layout", table("layout", 1, 0, u32(2))),
    "layout_empty": ("bad-layout", table("layout", 0, 4, u32(0))),
    "layout_past_end": ("bad-layout", table("layout", 1, 4, u32(4))),
    "layout_short": ("bad-layout", table("layout", 1, 4, u32(2))),
    "layout_size": ("bad-layout", table("layout", 0, 8, u64(1))),
    "layout_unused": ("bad-layout", table("layer", 2, 0, u32(0))),
    "segment_role": ("bad-segment", table("segment", 0, 0, u16(0x40))),
    "segment_role_twice": ("bad-segment", table("segment", 1, 0, u16(0x10))),
    "segment_dtype": ("bad-segment", table("segment", 0, 2, u16(9))),
    "segment_offset": ("bad-segment", table("segment", 1, 8, u64(1))),
    "segment_reserved": ("reserved-not-zero", table("segment", 0, 56, b"\1")),
    "segment_interleave": ("bad-interleave", table("segment", 0, 4, u16(8))),
    "segment_interleave_rows": (
        "bad-interleave",
        table("segment", 3, 4, u16(16)),
    ),
    "segment_rank_0": ("bad-shape", table("segment", 0, 6, u16(0))),
    "segment_rank_5": ("bad-shape", table("segment", 0, 6, u16(5))),
    "segment_zero_length": ("bad-shape", table("segment", 0, 24, u64(0))),
    "segment_row_no_quant_block": ("bad-shape", table("segment", 0, 32, u64(63))),
    "segment_shape_beyond_rank": ("bad-shape", table("segment", 0, 40, u64(1))),
    "segment_shape_overflow": ("size-mismatch", table("segment", 0, 24, u64(2**61))),
    "segment_size": ("size-mismatch", table("segment", 0, 16, u64(1))),
    "last_segment_size": ("size-mismatch", table("segment", 5, 16, u64(1))),
    "segment_interleave_and_shape": (
        "bad-shape",
        lambda forge: table("segment", 0, 6, u16(9))(table("segment", 0, 4, u16(16))(forge)),
    ),
    "dtype_numbers_of_another_name": (
        "bad-dtype",
        table("string", 0, 4, b"f32"),
    ),
    "tensor_length_over_limit": ("bad-shape", table("tensor", 0, 24, u64(0, 2**63))),
    "tensor_gap_in_pack": (
        "bad-tensor",
        lambda forge: table("tensor", 3, 56, u64(tensor_offset(forge, 3) + 64))(forge),
    ),
    "pack_of_files_without_files": (
        "bad-file-entry",
        drop_files,
    ),
    "layer_layout": ("bad-layer", table("layer", 0, 0, u32(2))),
    "layer_reserved": ("reserved-not-zero", table("layer", 0, 4, b"\1")),
    "layer_without_layout_has_experts": (
        "bad-layer",
        lambda forge: forge.patch_region(
            Region.INDEX, 16 * 5, bytes(forge.region(Region.INDEX)[:16])
        ),
    ),
    "layer_with_layout_has_none": ("bad-layer", table("layer", 1, 0, u32(0))),
    "pack_half_zero": ("bad-pack", table("pack", 1, 0, u64(0))),
    "pack_misaligned": ("bad-pack", table("pack", 1, 0, u64(64))),
    "pack_size_wraps": ("bad-pack", table("pack", 1, 8, u64(2**64 - 1))),
    "pack_outside": ("bad-pack", table("pack", 1, 0, u64(2**61))),
    "tensor_reserved": ("reserved-not-zero", table("tensor", 0, 18, b"\1")),
    "tensor_reserved_tail": ("reserved-not-zero", table("tensor", 0, 95, b"\1")),
    "tensor_layer": ("bad-tensor", table("tensor", 0, 8, u32(3))),
    "tensor_order": ("bad-tensor", table("tensor", 0, 8, u32(0xFFFF_FFFF))),
    "tensor_dtype": ("bad-tensor", table("tensor", 1, 12, u16(9))),
    "tensor_misaligned": ("bad-tensor", table("tensor", 3, 56, u64(1))),
    "tensor_outside_pack": ("bad-tensor", table("tensor", 1, 56, u64(2**40))),
    "tensor_shorter_than_pack": ("bad-tensor", table("pack", 1, 8, u64(61))),
    "pack_without_tensors": (
        "bad-tensor",
        lambda forge: forge.patch_region(
            Region.TABLES,
            forge.record_offset("pack", 2),
            bytes(forge.region(Region.TABLES)[forge.record_offset("pack", 1) :][:16]),
        ),
    ),
    "tensor_size": ("size-mismatch", table("tensor", 1, 64, u64(59))),
    "tensor_rank": ("bad-shape", table("tensor", 1, 16, u16(0))),
    "file_name_with_slash": ("bad-file-entry", lambda forge: rename_file(forge, b"conf/g.json")),
    "file_name_dots": ("bad-file-entry", lambda forge: rename_file(forge, b"..\\fig.json")),
    "file_reserved": ("reserved-not-zero", table("file", 0, 40, b"\1")),
    "file_outside_pack": ("bad-file-entry", table("file", 0, 16, u64(65))),
    "absent_with_offset": ("absent-not-zero", index(1, 0, u64(4096, 0))),
    "absent_with_size": ("absent-not-zero", index(1, 0, u64(0, 4096))),
    "absent_with_checksum": (
        "absent-not-zero",
        lambda forge: forge.patch_region(Region.CHECKSUMS, 8 * 5, u64(1)),
    ),
    "block_misaligned": ("block-misaligned", index(0, 0, u64(4097))),
    "block_size": ("block-size", index(0, 0, u64(0x10000, 64))),
    "block_size_huge": ("block-size", index(0, 0, u64(0x10000, 2**64 - 1))),
    "block_in_header": ("block-out-of-bounds", index(0, 0, u64(4096))),
    "block_past_end": ("block-out-of-bounds", index(0, 0, u64(2**63))),
    "block_offset_wraps": ("block-out-of-bounds", index(0, 0, u64(2**64 - 4096))),
    "block_over_block": ("extent-overlap", overlap_blocks),
    "block_over_pack": ("extent-overlap", overlap_pack),
    "metadata_not_utf8": ("metadata-invalid", metadata(b'{"a":"\xff"}')),
    "metadata_byte_order_mark": ("metadata-invalid", metadata(b"\xef\xbb\xbf{}")),
    "metadata_utf16": ("metadata-invalid", metadata("{}".encode("utf-16-le"))),
    "metadata_exponent": ("metadata-invalid", metadata(b'{"a":1e2}')),
    "metadata_leading_zero": ("metadata-invalid", metadata(b'{"a":01}')),
    "metadata_control_character": ("metadata-invalid", metadata(b'{"a":"\x01"}')),
    "metadata_trailing_text": ("metadata-invalid", metadata(b"{}{}")),
    "metadata_surrogate_pair": (
        "metadata-not-canonical",
        metadata(b'{"a":"\\ud83d\\udc26"}'),
    ),
    "metadata_escaped_slash": ("metadata-not-canonical", metadata(b'{"a":"\\/"}')),
    "metadata_upper_case_escape": ("metadata-not-canonical", metadata(b'{"a":"\\u001F"}')),
    "metadata_float_in_dropped_member": ("metadata-invalid", metadata(b'{"a":1.5,"a":1}')),
    "metadata_surrogate_in_dropped_member": (
        "metadata-invalid",
        metadata(b'{"a":{"b":"\\ud800"},"a":1}'),
    ),
    "metadata_no_json": ("metadata-invalid", metadata(b'{"a":}')),
    "metadata_no_object": ("metadata-invalid", metadata(b"[]")),
    "metadata_float": ("metadata-invalid", metadata(b'{"a":1.5}')),
    "metadata_nan": ("metadata-invalid", metadata(b'{"a":NaN}')),
    "metadata_big_number": ("metadata-invalid", metadata(b'{"a":9007199254740992}')),
    "metadata_million_digits": ("metadata-invalid", metadata(b'{"a":' + b"9" * 3000 + b"}")),
    "metadata_deep": ("metadata-invalid", metadata(b'{"a":' + b"[" * 1500 + b"]" * 1500 + b"}")),
    "metadata_surrogate": ("metadata-invalid", metadata(b'{"a":"\\ud800"}')),
    "metadata_space": ("metadata-not-canonical", metadata(b'{"a": 1}')),
    "metadata_order": ("metadata-not-canonical", metadata(b'{"b":1,"a":1}')),
    "metadata_twice": ("metadata-not-canonical", metadata(b'{"a":1,"a":1}')),
    "metadata_escape": ("metadata-not-canonical", metadata(b'{"a":"\\u0041"}')),
    "metadata_minus_zero": ("metadata-not-canonical", metadata(b'{"a":-0}')),
}


def raw(change: Callable[[bytearray], None]) -> Callable[[Forge], object]:
    """Changes bytes of the file without mending any checksum."""
    return lambda forge: change(forge.data)


def cut(n_bytes: int) -> Callable[[Forge], object]:
    """Leaves the first `n_bytes`, or all but the last if negative."""

    def change(data: bytearray) -> None:
        del data[n_bytes:]

    return raw(change)


def append(tail: bytes) -> Callable[[Forge], object]:
    return raw(lambda data: data.extend(tail))


def replace(content: bytes) -> Callable[[Forge], object]:
    def change(data: bytearray) -> None:
        data[:] = content

    return raw(change)


def flip(*places: int) -> Callable[[Forge], object]:
    def change(data: bytearray) -> None:
        for place in places:
            data[place] ^= 0x10

    return raw(change)


def flip_both_copies(region: Region) -> Callable[[Forge], object]:
    def change(forge: Forge) -> None:
        extent = forge.superblock.regions[region]
        flip(extent.offset, extent.copy_offset + extent.length - 1)(forge)

    return change


def other_tail(forge: Forge) -> None:
    """Two sound superblocks that differ."""
    tail = bytes(forge.data[-4096:])
    forge.set_superblock(dataclasses.replace(forge.superblock, minor=7))
    forge.data[-4096:] = tail


def tail_of_other_size(forge: Forge) -> None:
    """A damaged head, and a sound tail that belongs to a longer file."""
    block = forge.superblock
    longer = dataclasses.replace(block, file_size=block.file_size + 4096)
    forge.set_superblock(longer)
    flip(30)(forge)


WHOLE_FILES: dict[str, tuple[str, Callable[[Forge], object]]] = {
    "empty": ("file-too-small", cut(0)),
    "magic_only": ("file-too-small", cut(8)),
    "three_pages": ("file-too-small", cut(3 * 4096)),
    "zeros": ("bad-magic", replace(bytes(65536))),
    "gguf": ("bad-magic", replace(b"GGUF" + bytes(65532))),
    "text_mode": ("bad-magic", replace(b"\x89CLB\n\x1a\n" + bytes(65529))),
    "truncated_by_one": ("truncated", cut(-1)),
    "truncated_by_a_page": ("truncated", cut(-4096)),
    "truncated_in_the_middle": ("truncated", cut(40_000)),
    "one_byte_appended": ("trailing-bytes", append(b"\0")),
    "copy_appended": ("trailing-bytes", append(bytes(4096))),
    "both_superblocks_flipped": ("superblock-checksum", flip(2000, -2000)),
    "head_flipped_tail_magic": ("superblock-checksum", flip(2000, -4096)),
    "head_magic_tail_flipped": ("bad-magic", flip(0, -1)),
    "tail_of_other_size": ("superblock-checksum", tail_of_other_size),
    "superblocks_differ": ("superblock-conflict", other_tail),
    "padding_of_both_indexes": ("region-checksum", dirty_padding),
    "both_indexes_flipped": ("region-checksum", flip_both_copies(Region.INDEX)),
    "both_checksums_flipped": ("region-checksum", flip_both_copies(Region.CHECKSUMS)),
    "both_tables_flipped": ("region-checksum", flip_both_copies(Region.TABLES)),
    "both_metadata_flipped": ("region-checksum", flip_both_copies(Region.METADATA)),
}

MIXED: dict[str, tuple[str, Callable[[Forge], object]]] = {
    "mixed_number_in_plain_layer": (
        "bad-expert-layout",
        lambda f: f.patch_region(Region.EXPERT_LAYOUTS, 0, b"\1\0"),
    ),
    "mixed_unknown_number": (
        "bad-expert-layout",
        lambda f: f.patch_region(Region.EXPERT_LAYOUTS, 8, b"\2\0"),
    ),
    "mixed_absent_with_number": (
        "bad-expert-layout",
        lambda f: f.patch_region(Region.EXPERT_LAYOUTS, 10, b"\0\0"),
    ),
    "mixed_present_without_number": (
        "bad-expert-layout",
        lambda f: f.patch_region(Region.EXPERT_LAYOUTS, 12, b"\xff\xff"),
    ),
    "mixed_layout_of_other_size": (
        "block-size",
        lambda f: f.patch_region(Region.EXPERT_LAYOUTS, 12, b"\1\0"),
    ),
    "mixed_layout_unused": (
        "bad-layout",
        lambda f: f.patch_region(Region.EXPERT_LAYOUTS, 8, u16(0, 0xFFFF, 0, 0)),
    ),
    "mixed_without_feature": ("region-length", header(16, bytes(8))),
    "mixed_layer_none": ("bad-layer", table("layer", 1, 0, u32(0xFFFF_FFFF))),
}

STRIPED: dict[str, tuple[str, Callable[[Forge], object]]] = {
    "volume_unknown": ("bad-volume", lambda f: f.patch_region(Region.VOLUME_MAP, 0, b"\3\0")),
    "volume_of_absent": ("bad-volume", lambda f: f.patch_region(Region.VOLUME_MAP, 10, b"\1\0")),
    "volume_digest": ("volume-digest", lambda f: f.patch_region(Region.CHECKSUMS, 0, b"\1\2\3")),
    "volume_data_offset": ("bad-volume", table("volume", 0, 32, b"\1")),
    "volume_data_length": ("bad-volume", table("volume", 0, 40, b"\1")),
    "volume_size_wraps": ("bad-volume", table("volume", 0, 40, u64(2**64 - 4096))),
    "volume_file_size": ("bad-volume", table("volume", 0, 8, b"\1")),
    "volume_label_with_slash": (
        "bad-volume",
        lambda f: f.set_region(
            Region.TABLES, bytes(f.region(Region.TABLES)).replace(b"fast", b"fa/t")
        ),
    ),
    "volume_label_twice": (
        "duplicate-name",
        lambda f: f.set_region(
            Region.TABLES, bytes(f.region(Region.TABLES)).replace(b"fast", b"slow")
        ),
    ),
    "volume_block_out_of_bounds": ("block-out-of-bounds", index(0, 0, u64(2**40))),
    "volume_block_in_page": ("block-misaligned", index(0, 0, u64(64))),
    "volume_blocks_overlap": (
        "extent-overlap",
        lambda f: f.patch_region(Region.INDEX, 32, bytes(f.region(Region.INDEX)[:16])),
    ),
    "striped_without_feature": ("region-length", header(16, bytes(8))),
    "volume_missing": ("volume-missing", lambda forge: None),
}
