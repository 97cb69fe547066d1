"""Fills the tables and the example of `colibri-1.md` from the code; `--check` only compares.

Run from anywhere: `python packages/colibri-format/spec/render.py`.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

import colibri_format as cf
from colibri_format.header import Region

SPEC = Path(__file__).with_name("colibri-1.md")

JSON_TYPES = {
    " | None": " or null",
    "tuple[int, ...]": "array of whole numbers",
    "dict[str, Any]": "object",
    "RopeSpec": "object",
    "MoeSpec": "object",
    "float": "number",
    "bool": "true or false",
    "str": "string",
    "int": "whole number",
}

MEANINGS = {
    "FILE_TOO_SMALL": "fewer than 4 pages",
    "BAD_MAGIC": "the first 8 bytes are others",
    "UNSUPPORTED_VERSION": "another major version",
    "SUPERBLOCK_CHECKSUM": "the superblock does not match its checksum",
    "UNSUPPORTED_FEATURE": "an incompat feature that this reader does not know",
    "TRUNCATED": "the file is shorter than its superblock says",
    "TRAILING_BYTES": "the file is longer than its superblock says",
    "SUPERBLOCK_CONFLICT": "two sound superblocks that differ",
    "RESERVED_NOT_ZERO": "reserved bytes are not zero",
    "BAD_ALIGNMENT": "align_log2 out of range",
    "BAD_GEOMETRY": "layers, experts or their product out of range",
    "REGION_LENGTH": "a region is not as long as it must be",
    "REGION_PLACEMENT": "a region stands elsewhere than it must, or the file ends elsewhere",
    "REGION_CHECKSUM": "both copies of a region are damaged",
    "TABLE_COUNT": "a count of the tables' header is over its limit",
    "TABLE_LENGTH": "the tables are not as long as their counts demand",
    "BAD_STRING": "a string is out of place, out of range, or not allowed text",
    "DUPLICATE_NAME": "a name stands twice in a table",
    "BAD_DTYPE": "a dtype's numbers are impossible or not those of its name",
    "BAD_LAYOUT": "a layout's segments, size or use are wrong",
    "BAD_SEGMENT": "a segment's role, dtype number or offset is wrong",
    "BAD_SHAPE": "rank or lengths are impossible, or rows are no whole quant blocks",
    "SIZE_MISMATCH": "a size is not what shape and dtype demand",
    "BAD_INTERLEAVE": "row_interleave is unknown or cannot be",
    "BAD_LAYER": "a layer's layout is unknown, missing, or one too many",
    "BAD_PACK": "a pack's extent is misaligned or outside the data region",
    "BAD_TENSOR": "a tensor's layer, dtype number, order or extent is wrong",
    "BAD_FILE_ENTRY": "an embedded file's name, order or extent is wrong",
    "BLOCK_MISALIGNED": "a block does not start at a multiple of the alignment",
    "BLOCK_OUT_OF_BOUNDS": "a block is not inside the data region",
    "BLOCK_SIZE": "a block's size is not its layout's",
    "ABSENT_NOT_ZERO": "an absent expert has an offset, a size or a checksum",
    "EXTENT_OVERLAP": "blocks or packs overlap",
    "BAD_EXPERT_LAYOUT": "an expert's layout number cannot be",
    "BAD_VOLUME": "a volume's record or an expert's volume number is wrong",
    "VOLUME_DIGEST": "a volume's digest is not that of the blocks it holds",
    "VOLUME_MISSING": "no file in the folders is the volume",
    "VOLUME_MISMATCH": "a file with the volume's label and number has other content",
    "METADATA_INVALID": "the metadata is no JSON object within the limits",
    "METADATA_NOT_CANONICAL": "the metadata is not the canonical text",
    "BLOCK_CHECKSUM": "a block does not match its checksum",
    "TENSOR_CHECKSUM": "a dense tensor does not match its checksum",
    "FILE_CHECKSUM": "an embedded file does not match its checksum",
    "PADDING_NOT_ZERO": "padding is not zero (verification only)",
    "SHORT_READ": "the file ended inside a read",
    "BAD_MODEL": "`model.json` is not as annex A says",
}


def dtype_table() -> str:
    """Section 8's table."""
    rows = ["| name | ggml id | elements | bytes | units |", "|---|---|---|---|---|"]
    for dtype in cf.DTYPES.values():
        units = " ".join(
            f"{len(list(run))}\N{MULTIPLICATION SIGN}{width}" for width, run in groupby(dtype.units)
        )
        ggml_id = "\N{MINUS SIGN}1" if dtype.ggml_id is None else dtype.ggml_id
        rows.append(
            f"| `{dtype.name}` | {ggml_id} | {dtype.block_elements} | {dtype.block_bytes} "
            f"| {units or '—'} |"
        )
    return "\n".join(rows)


def code_table() -> str:
    """Section 12's table."""
    rows = ["| number | name | meaning |", "|---|---|---|"]
    rows += [f"| {code.value} | `{code.name}` | {MEANINGS[code.name]} |" for code in cf.FormatCode]
    return "\n".join(rows)


def model_table() -> str:
    """Annex A's tables."""
    parts = []
    for title, kind in (
        ("Members", cf.ModelSpec),
        ("Members of `rope`", cf.RopeSpec),
        ("Members of `moe`", cf.MoeSpec),
    ):
        doc = " ".join((kind.__doc__ or "").split())
        rows = [f"**{title}.** {doc}", "", "| name | type | default |", "|---|---|---|"]
        if kind is cf.ModelSpec:
            rows.append("| `version` | int | required: 1 |")
        for field in dataclasses.fields(kind):
            default = (
                "required"
                if field.default is dataclasses.MISSING
                else {None: "null", False: "false", (): "[]"}.get(field.default, field.default)
                if field.default != 0 or field.default is False
                else 0
            )
            kind_text = str(field.type)
            for python, text in JSON_TYPES.items():
                kind_text = kind_text.replace(python, text)
            rows.append(f"| `{field.name}` | {kind_text} | {default} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def example_file(path: Path) -> None:
    """One layer of two experts with 1x2 matrices of f32, one dense tensor, one embedded file."""
    f32 = cf.DTYPES["f32"]
    layout = cf.Layout.of(
        (
            cf.SegmentSpec(cf.Role.GATE, f32, (1, 2)),
            cf.SegmentSpec(cf.Role.UP, f32, (1, 2)),
            cf.SegmentSpec(cf.Role.DOWN, f32, (2, 1)),
        )
    )
    plan = cf.plan_layout(
        n_layers=1,
        n_experts=2,
        layer_layouts=[layout],
        tensors=[cf.TensorSpec("norm", f32, (2,), 0)],
        files=[cf.FileSpec("note.txt", 5)],
        metadata={"example": True},
    )
    with cf.Writer(path, plan) as writer:
        for expert in range(2):
            writer.write_block(0, expert, np.arange(1, 7, dtype="<f4") * (expert + 1))
        writer.write_tensor("norm", np.ones(2, "<f4"))
        writer.write_file("note.txt", b"hello")


def hexdump(data: bytes, start: int) -> Iterator[str]:
    """Lines of 16 bytes; runs of equal lines become one `*`."""
    last = b""
    is_starred = False
    for at in range(0, len(data), 16):
        line = data[at : at + 16]
        if line == last and at + 16 < len(data):
            if not is_starred:
                yield "*"
            is_starred = True
            continue
        is_starred, last = False, line
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        yield f"{start + at:08x}  {line.hex(' '):<47}  {text}"


def example() -> str:
    """Section 17."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example.colibri"
        example_file(path)
        data = path.read_bytes()
        with cf.open(path) as file:
            parts = [
                "One layer of two experts; each matrix is `f32`, gate and up `(1, 2)`, down "
                "`(2, 1)`; one dense tensor `norm`, one embedded file `note.txt`, metadata "
                f'`{{"example":true}}`. The file has {len(data)} bytes and the uuid {file.uuid}. '
                "`*` stands for lines equal to the one before."
            ]
            pieces = [("superblock", 0, 4096)]
            for region in (Region.INDEX, Region.CHECKSUMS, Region.TABLES, Region.METADATA):
                extent = file.superblock.region(region)
                pieces.append((f"{region.name.lower()} region", extent.offset, extent.length))
            pieces.append(("pack of layer 0", *dataclasses.astuple(file.layer_pack(0))))
            pieces.append(("pack of files", *file.tables.packs[2].item()))
            for expert in range(2):
                block = file.expert(0, expert)
                pieces.append((f"block of layer 0, expert {expert}", block.offset, block.size))
    for place, offset, size in pieces:
        dump = "\n".join(hexdump(data[offset : offset + size], offset))
        title = place[0].upper() + place[1:]
        parts.append(f"{title}, {size} bytes at {offset:#x}:\n\n```\n{dump}\n```")
    return "\n\n".join(parts)


def render(text: str) -> str:
    """The document with every generated part made anew."""
    for name, make in (
        ("dtypes", dtype_table),
        ("codes", code_table),
        ("model", model_table),
        ("example", example),
    ):
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        body = f"{begin}\n{make()}\n{end}"
        head, _, rest = text.partition(begin)
        text = head + body + rest.partition(end)[2]
    return text


def main() -> int:
    """Exit status 1 if `--check` is given and the document is not up to date."""
    text = SPEC.read_text(encoding="utf-8")
    made = render(text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    SPEC.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
