"""What an export will write and where each stored part goes, decided from metadata alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from colibri_format import DTYPES, DType, Reader

from ..errors import ExportError
from ..part_plan import some
from ..sources.gguf_header import KeyValue
from ..sources.gguf_source import GGUF_FILE
from .described import describe_model
from .description import FILE_TYPES, Description
from .gguf_head import GgufTensor, encode_head, place_tensors
from .gguf_record import GgufRecord, TensorEntry, parse_gguf_record
from .stored import Contents, StoredPart, TensorPart, common_dtype, stacked_shape

_FILE_TYPE: Final = "general.file_type"


@dataclass(frozen=True, slots=True)
class Move:
    """The bytes of one stored part, made plain, go to `offset` of the GGUF file.

    `dtype` is what they become: the stored type, or F32. `n_heads` not 0: the rows of that many
    heads change from halves to pairs (see `described`).
    """

    part: StoredPart
    offset: int
    dtype: DType
    n_heads: int = 0

    @property
    def size(self) -> int:
        """Bytes that are written."""
        return self.dtype.size_bytes(self.part.fact.shape)


@dataclass(frozen=True, slots=True, eq=False)
class ExportPlan:
    """A whole export: the head's bytes, the tensors behind it, and where each part goes.

    `tensor_moves` by name, `block_moves` by layer and expert, in the order of the segments. `made`
    are bytes that the file does not hold, by their place in the GGUF.
    """

    head: bytes
    tensors: tuple[GgufTensor, ...]
    file_size: int
    tensor_moves: Mapping[str, Move]
    block_moves: Mapping[tuple[int, int], tuple[Move, ...]]
    made: Mapping[int, bytes]
    notes: tuple[str, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)


def plan_export(reader: Reader) -> ExportPlan:
    """The plan that writes the open file `reader` as one GGUF file.

    Reads embedded files, no tensor and no block.

    Raises:
        ExportError: `cannot-export` with what a GGUF cannot hold or say of the file;
            `bad-gguf-record`.
        FormatError: `file-checksum`, `bad-model`.
    """
    where = str(reader.path)
    contents = Contents(reader)
    said = _describe(reader)
    entries = said.tensors
    if entries is None:
        entries = tuple(TensorEntry(name, ()) for name in contents.names())
    left = contents.keys()
    dropped = reader.metadata.get("dropped_tensors")
    lacking: list[str] = []
    rows: list[tuple[str, DType, tuple[int, ...]]] = []
    parts_of: dict[str, tuple[StoredPart, ...]] = {}
    for entry in entries:
        parts = contents.find(entry.name)
        if not parts and isinstance(dropped, list) and entry.name in dropped:
            lacking.append(entry.name)
            continue
        shape = entry.shape if said.tensors is not None else stacked_shape(entry.name, parts)
        dtype = _checked_dtype(where, entry.name, shape, parts)
        if entry.name in said.widened:
            dtype = DTYPES["f32"]
        rows.append((entry.name, dtype, shape))
        parts_of[entry.name] = parts
        left -= {part.key for part in parts}
    if left:
        names = sorted(str(key) for key in left)
        raise ExportError(
            "cannot-export",
            where,
            f"holds what {GGUF_FILE} does not name: {some(names)}",
            "a file as colibri repack writes it",
            "repack the source again",
        )
    for name, data in said.made.items():
        rows.append((name, DTYPES["f32"], (len(data) // 4,)))
    placed, n_bytes = place_tensors(rows, said.alignment)
    head = encode_head(said.version, said.alignment, said.key_values, placed)
    tensor_moves: dict[str, Move] = {}
    block_moves: dict[tuple[int, int], list[Move]] = {}
    made: dict[int, bytes] = {}
    for tensor in placed:
        offset = len(head) + tensor.offset
        if tensor.name in said.made:
            made[offset] = said.made[tensor.name]
        for part in parts_of.get(tensor.name, ()):
            n_heads = said.turned.get(tensor.name, 0)
            move = Move(part, offset, tensor.dtype, n_heads)
            offset += move.size
            if isinstance(part, TensorPart):
                tensor_moves[part.fact.name] = move
            else:
                block_moves.setdefault((part.layer, part.expert), []).append(move)
    notes = list(said.notes)
    if lacking:
        notes.append(f"left out when it was repacked, engines compute it: {some(lacking)}")
    return ExportPlan(
        head=head,
        tensors=placed,
        file_size=len(head) + n_bytes,
        tensor_moves=tensor_moves,
        block_moves={
            key: tuple(sorted(moves, key=lambda move: move.part.fact.offset))
            for key, moves in block_moves.items()
        },
        made=made,
        notes=tuple(notes),
    )


def _describe(reader: Reader) -> Description:
    if GGUF_FILE not in reader.files:
        return describe_model(reader)
    record = parse_gguf_record(reader.read_file(GGUF_FILE), f"{reader.path}: {GGUF_FILE}")
    notes = []
    if record.tensors is None:
        notes.append(
            "the file does not record its source's tensor table: experts are written as stacks, "
            "tensors in llama.cpp's usual order"
        )
    return Description(
        record.version,
        record.alignment,
        _with_file_type(record, reader),
        record.tensors,
        notes=tuple(notes),
    )


def _with_file_type(record: GgufRecord, reader: Reader) -> tuple[KeyValue, ...]:
    """The key-values, with the file's own type where it was quantised on the way."""
    file_type = FILE_TYPES.get(str(reader.metadata.get("quantisation")))
    if file_type is None:
        return record.key_values
    return tuple(
        KeyValue(_FILE_TYPE, "u32", file_type) if pair.key == _FILE_TYPE else pair
        for pair in record.key_values
    )


def _checked_dtype(
    where: str, name: str, shape: tuple[int, ...], parts: tuple[StoredPart, ...]
) -> DType:
    """The encoding of the tensor `name`, whose parts fill `shape` and which GGUF can hold."""
    place = f"{where}: tensor {name!r}"
    if not parts:
        raise ExportError("cannot-export", place, "is recorded, but the file does not hold it",
                          "every tensor of the source", "repack the source again")  # fmt: skip
    dtype = common_dtype(parts)
    if dtype is None or dtype.ggml_id is None:
        names = sorted({part.fact.dtype.name for part in parts})
        raise ExportError(
            "cannot-export",
            place,
            f"is {', '.join(names)}",
            "one type that GGUF has",
            "repack the source with another --quant, or without --fp8 keep",
        )
    held = sum(math.prod(part.fact.shape) for part in parts)
    is_same_row = all(part.fact.shape[-1] == shape[-1] for part in parts) or dtype.name == "f32"
    if held != math.prod(shape) or not is_same_row:
        shapes = sorted({part.fact.shape for part in parts})
        raise ExportError("cannot-export", place,
                          f"is recorded as {shape}, the file holds {len(parts)} of {shapes}",
                          "the same elements", "repack the source again")  # fmt: skip
    return dtype
