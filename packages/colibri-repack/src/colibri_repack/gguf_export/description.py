"""What a GGUF file says before its data, and what must become of stored parts on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..sources.gguf_header import KeyValue
from .gguf_record import TensorEntry

# llama.h, enum llama_ftype: what general.file_type says of a file in which most matrices have the
# type. It is only shown.
FILE_TYPES: Final = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9,
                     "q2_k": 10, "q3_k": 12, "q4_k": 14, "q4_k_m": 15, "q5_k": 16, "q5_k_m": 17,
                     "q6_k": 18, "bf16": 32, "mxfp4": 38}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Description:
    """Key-values and tensors of a GGUF; `tensors` None: whatever the file holds.

    `widened` tensors become F32; rows of `turned` ones, in so many heads, change from halves to
    pairs; `made` are F32 tensors of one dimension that the file does not hold, by their bytes.
    """

    version: int
    alignment: int
    key_values: tuple[KeyValue, ...]
    tensors: tuple[TensorEntry, ...] | None
    widened: frozenset[str] = frozenset()
    turned: Mapping[str, int] = field(default_factory=dict)
    made: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
