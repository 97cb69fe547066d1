"""Files that a reader must accept, each with what is special in it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import colibri_format as cf
from colibri_format.ends import derive_uuid
from colibri_format.header import (
    COPIED_REGIONS,
    Incompat,
    Region,
    encode_superblock,
    place_regions,
)
from colibri_format.layout import PAGE
from forge import Forge

F32, Q8_0 = cf.DTYPES["f32"], cf.DTYPES["q8_0"]


def network(dtype: cf.DType, hidden: int, width: int) -> cf.Layout:
    """Gate, up and down of one encoding."""
    return cf.Layout.of(
        (
            cf.SegmentSpec(cf.Role.GATE, dtype, (width, hidden)),
            cf.SegmentSpec(cf.Role.UP, dtype, (width, hidden)),
            cf.SegmentSpec(cf.Role.DOWN, dtype, (hidden, width)),
        )
    )


A, B = network(Q8_0, 32, 32), network(cf.DTYPES["f16"], 16, 16)
TINY = network(F32, 2, 1)


def base_plan(**changes: Any) -> cf.FilePlan:
    """Three layers of five experts: two encodings, one layer without experts, one absent one."""
    present = np.ones((3, 5), np.bool_)
    present[1] = False
    present[2, 3] = False
    arguments: dict[str, Any] = {
        "n_layers": 3,
        "n_experts": 5,
        "layer_layouts": [A, None, B],
        "present": present,
        "tensors": [
            cf.TensorSpec("blk.1.norm", F32, (3, 5), 1),
            cf.TensorSpec("token_embd.weight", Q8_0, (10, 64)),
            cf.TensorSpec("blk.0.empty", F32, (0, 4), 0),
            cf.TensorSpec("output_norm.weight", F32, (7,)),
        ],
        "files": [cf.FileSpec("config.json", 10), cf.FileSpec("empty.txt", 0)],
        "metadata": {"source": ["\u00e9", 1, True, None], "tool": "vectors"},
    }
    return cf.plan_layout(**(arguments | changes))


def tiny_plan(**changes: Any) -> cf.FilePlan:
    """One layer, one expert, nothing else."""
    return cf.plan_layout(**({"n_layers": 1, "n_experts": 1, "layer_layouts": [TINY]} | changes))


def mixed_plan(**changes: Any) -> cf.FilePlan:
    """Two layers of four experts; the second mixes two layouts and lacks an expert."""
    return base_plan(
        **(
            {
                "n_layers": 2,
                "n_experts": 4,
                "layer_layouts": [A, [B, None, A, B]],
                "present": None,
                "tensors": [],
                "files": [],
            }
            | changes
        )
    )


def pattern(place: str, size: int) -> bytes:
    """`size` bytes that differ from place to place and compress well."""
    start = sum(place.encode()) % 251
    return (np.arange(start, start + size) % 251).astype(np.uint8).tobytes()


def fill(writer: cf.Writer) -> None:
    """Patterns into everything that the writer's plan has."""
    plan = writer.plan
    for layer, expert in np.argwhere(plan.index["size"] != 0).tolist():
        layout = plan.layout(layer, expert)
        size = sum(segment.size for segment in layout.segments) if layout else 0
        writer.write_block(layer, expert, pattern(f"L{layer}/E{expert}", size))
    for tensor in plan.tensors:
        writer.write_tensor(tensor.name, pattern(tensor.name, tensor.size))
    for file in plan.files:
        writer.write_file(file.name, pattern(file.name, file.size))


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"d": value}
    return value


def dtype_tensors() -> list[cf.TensorSpec]:
    return [cf.TensorSpec(name, t, (2, t.block_elements)) for name, t in cf.DTYPES.items()]


def all_roles() -> cf.Layout:
    shapes: dict[int, tuple[int, ...]] = {0: (32, 32), 1: (32,), 2: (32, 1)}
    return cf.Layout.of(
        tuple(
            cf.SegmentSpec(role, F32 if role % 16 else Q8_0, shapes[role % 16]) for role in cf.Role
        )
    )


def interleaved() -> cf.Layout:
    q4_k = cf.DTYPES["q4_k"]
    return cf.Layout.of((cf.SegmentSpec(cf.Role.GATE, q4_k, (32, 512), 16),))


def chosen_volumes() -> np.ndarray[Any, np.dtype[np.uint16]]:
    chosen = np.zeros((2, 4), np.uint16)
    chosen[1, 2:] = 1
    return chosen


PLANS: dict[str, Callable[[], cf.FilePlan]] = {
    "base": base_plan,
    "tiny": tiny_plan,
    "dense_model": lambda: tiny_plan(n_layers=4, layer_layouts=[TINY] * 4),
    "first_layers_without_experts": lambda: base_plan(layer_layouts=[None, A, A], present=None),
    "no_experts_at_all": lambda: base_plan(layer_layouts=[None] * 3, present=None),
    "no_experts_no_tensors": lambda: base_plan(
        layer_layouts=[None] * 3, present=None, tensors=[], files=[]
    ),
    "tensors_without_bytes": lambda: tiny_plan(
        tensors=[cf.TensorSpec("a", F32, (0, 3)), cf.TensorSpec("b", Q8_0, (5, 0), 0)],
        files=[cf.FileSpec("empty", 0)],
    ),
    "align_16k": lambda: base_plan(alignment=2**14),
    "align_2m": lambda: tiny_plan(alignment=2**21),
    "length_0_beside_huge_lengths": lambda: tiny_plan(
        tensors=[cf.TensorSpec("a", F32, (2**61, 2**61, 0)), cf.TensorSpec("b", F32, (3,))]
    ),
    "every_dtype": lambda: tiny_plan(tensors=dtype_tensors()),
    "unknown_dtypes": lambda: tiny_plan(
        tensors=[
            cf.TensorSpec("a", cf.DType("x4_new", 99, 8, 5), (3, 16)),
            cf.TensorSpec("b", cf.DType("mine", None, 65_536, 65_536), (1, 65_536)),
        ]
    ),
    "all_roles": lambda: tiny_plan(layer_layouts=[all_roles()]),
    "interleaved": lambda: tiny_plan(layer_layouts=[interleaved()]),
    "interleaved_tensor": lambda: tiny_plan(tensors=[cf.TensorSpec("a", Q8_0, (16, 64), 0, 16)]),
    "ranks_1_to_4": lambda: tiny_plan(
        tensors=[cf.TensorSpec(str(n), F32, (2,) * n) for n in range(1, 5)]
    ),
    "long_and_foreign_names": lambda: tiny_plan(
        tensors=[
            cf.TensorSpec("n" * 255, F32, (1,)),
            cf.TensorSpec("\u5c42/\U0001f426 \u00e9\\:", F32, (1,), 0),
        ],
        files=[cf.FileSpec("...", 1), cf.FileSpec("\u540d\u524d .json", 2)],
    ),
    "metadata_of_all_kinds": lambda: tiny_plan(
        metadata={
            "": "",
            "\u00e9": [[], {}, True, False, None],
            "a": 2**53 - 1,
            "b": 1 - 2**53,
            "text": '"\\/\b\f\n\r\t\x00\x1f\x7f\u2028\U0001f426',
        }
    ),
    "metadata_32_deep": lambda: tiny_plan(metadata=nested(32)),
    "many_experts": lambda: tiny_plan(
        n_layers=2,
        n_experts=300,
        layer_layouts=[TINY, TINY],
        present=np.arange(600).reshape(2, 300) % 40 == 7,
    ),
    "a_layout_for_each_layer": lambda: tiny_plan(
        n_layers=5, layer_layouts=[network(F32, 2, 1 + n) for n in range(5)]
    ),
    "mixed": mixed_plan,
    "striped": lambda: base_plan(volumes=["fast", "slow"]),
    "striped_and_mixed": lambda: mixed_plan(volumes=["v"], block_volumes=chosen_volumes()),
    "striped_empty_volumes": lambda: tiny_plan(volumes=["full", "empty", "also empty"]),
    "striped_align_16k": lambda: base_plan(volumes=["a", "b", "c"], alignment=2**14),
}


def flip_region(region: Region, *, is_tail: bool, place: int = 0) -> Callable[[Forge], object]:
    def change(forge: Forge) -> None:
        extent = forge.superblock.regions[region]
        forge.data[(extent.copy_offset if is_tail else extent.offset) + place] ^= 1

    return change


def flip_at(place: int) -> Callable[[Forge], object]:
    def change(forge: Forge) -> None:
        forge.data[place] ^= 1

    return change


def flip_head(forge: Forge) -> None:
    """Everything before the data is damaged."""
    for region in (Region.INDEX, Region.CHECKSUMS, Region.TABLES, Region.METADATA):
        flip_region(region, is_tail=False)(forge)
    forge.data[9] ^= 1


def flip_block(padding: bool) -> Callable[[Forge], object]:
    def change(forge: Forge) -> None:
        offset, size = (int(v) for v in np.frombuffer(forge.region(Region.INDEX)[16:32], "<u8"))
        forge.data[offset + (size if padding else 5)] ^= 1

    return change


def with_features(**features: int) -> Callable[[Forge], object]:
    return lambda forge: forge.set_superblock(dataclasses.replace(forge.superblock, **features))


def with_extension(forge: Forge) -> None:
    """Puts an extension region in the gap before the data, which its alignment leaves."""
    block = forge.superblock
    content = {r: bytes(forge.region(r)) for r in COPIED_REGIONS if block.regions[r].length}
    content[Region.EXTENSION] = b"what a later version knows"
    data = block.regions[Region.DATA]
    body = bytes(forge.data[data.offset : data.offset + data.length])
    lengths = {r: len(content.get(r, b"")) for r in Region} | {Region.DATA: data.length}
    places, file_size = place_regions(lengths, block.geometry.alignment)
    assert places[Region.DATA][0] == data.offset
    forge.data[:] = bytes(file_size)
    forge.data[data.offset : data.offset + data.length] = body
    regions = []
    for region in Region:
        extent = dataclasses.replace(
            block.regions[region],
            offset=places[region][0],
            copy_offset=places[region][1],
            length=lengths[region],
        )
        if region in content:
            extent = dataclasses.replace(extent, checksum=cf.checksum(content[region]))
            for offset in places[region]:
                forge.data[offset : offset + len(content[region])] = content[region]
        regions.append(extent)
    page = encode_superblock(
        dataclasses.replace(
            block,
            uuid=derive_uuid([content[r] for r in COPIED_REGIONS if r in content]),
            regions=tuple(regions),
            file_size=file_size,
            compat=1 << 50,
            ro_compat=1 << 3,
        )
    )
    forge.data[:PAGE] = forge.data[-PAGE:] = page


FORGED: dict[str, tuple[str, Callable[[Forge], object]]] = {
    "unknown_compat_features": ("base", with_features(compat=1 << 63, ro_compat=1)),
    "later_minor": ("base", with_features(minor=9)),
    "extension": ("align_16k", with_extension),
    "head_superblock_damaged": ("base", flip_at(60)),
    "tail_superblock_damaged": ("base", flip_at(-60)),
    "head_index_damaged": ("base", flip_region(Region.INDEX, is_tail=False)),
    "tail_index_damaged": ("base", flip_region(Region.INDEX, is_tail=True)),
    "head_checksums_damaged": ("base", flip_region(Region.CHECKSUMS, is_tail=False)),
    "head_tables_damaged": ("base", flip_region(Region.TABLES, is_tail=False)),
    "head_metadata_damaged": ("base", flip_region(Region.METADATA, is_tail=False)),
    "head_padding_dirty": ("base", flip_region(Region.INDEX, is_tail=False, place=4000)),
    "head_all_damaged": ("base", flip_head),
    "block_damaged": ("base", flip_block(padding=False)),
    "block_padding_dirty": ("base", flip_block(padding=True)),
}


def write_valid(folder: Path) -> Iterator[tuple[str, Path]]:
    """Writes every valid file into `folder`; name and path of each.

    Striped files stand in a folder of their own, together with their volumes.
    """
    for name, make in PLANS.items():
        plan = make()
        path = folder / f"{name}.colibri"
        if plan.incompat & Incompat.STRIPED:
            path = folder / name / f"{name}.colibri"
            path.parent.mkdir()
        with cf.Writer(path, plan) as writer:
            fill(writer)
        yield name, path
    for name, (source, change) in FORGED.items():
        forge = Forge((folder / f"{source}.colibri").read_bytes())
        change(forge)
        yield name, forge.write(folder / f"{name}.colibri")
    for name, place in (("volume_head_damaged", 100), ("volume_tail_damaged", -100)):
        target = folder / name
        shutil.copytree(folder / "striped", target)
        volume = target / "striped.fast.colibri-volume"
        data = bytearray(volume.read_bytes())
        data[place] ^= 1
        volume.write_bytes(data)
        yield name, (target / "striped.colibri").rename(target / f"{name}.colibri")
