"""The element encodings a file may use, by name: the table of the specification, section 8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DType:
    """How elements are encoded; `block_elements` consecutive ones of a row take `block_bytes`.

    `ggml_id` is ggml's number for the same bytes, None where ggml has no such type. `units` are
    the byte widths into which a quant block is cut when rows are interleaved (spec, section 9);
    empty where interleaving is not defined.
    """

    name: str
    ggml_id: int | None
    block_elements: int
    block_bytes: int
    units: tuple[int, ...] = ()

    @property
    def is_quantised(self) -> bool:
        """Whether elements share scales, so that single ones cannot be addressed."""
        return self.block_elements > 1

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of a row of `n_elements`; ValueError unless it holds whole quant blocks."""
        n_blocks, rest = divmod(n_elements, self.block_elements)
        if rest:
            raise ValueError(
                f"a row of {n_elements} elements is no whole number of {self.name} quant blocks "
                f"({self.block_elements} elements each)"
            )
        return n_blocks * self.block_bytes

    def size_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a C-contiguous tensor of `shape`, quant blocks running along the last axis."""
        # As row_bytes, which a plan of a large model would call some hundred thousand times.
        n_blocks, rest = divmod(shape[-1], self.block_elements)
        size = self.row_bytes(shape[-1]) if rest else n_blocks * self.block_bytes
        for length in shape[:-1]:
            size *= length
        return size


# Sizes follow ggml's block structs (ggml-common.h, ggml_type and GGML_QUANT_SIZES).
_TABLE: Final = (
    DType("f32", 0, 1, 4),
    DType("f16", 1, 1, 2),
    DType("bf16", 30, 1, 2),
    DType("f64", 28, 1, 8),
    DType("i8", 24, 1, 1),
    DType("i16", 25, 1, 2),
    DType("i32", 26, 1, 4),
    DType("i64", 27, 1, 8),
    DType("u8", None, 1, 1),
    DType("f8_e4m3", None, 1, 1),
    DType("f8_e5m2", None, 1, 1),
    DType("e8m0", None, 1, 1),
    DType("q4_0", 2, 32, 18, (2,) + (4,) * 4),
    DType("q4_1", 3, 32, 20, (2, 2) + (4,) * 4),
    DType("q5_0", 6, 32, 22, (2,) + (4,) * 5),
    DType("q5_1", 7, 32, 24, (2, 2) + (4,) * 5),
    DType("q8_0", 8, 32, 34, (2,) + (4,) * 8),
    DType("q2_k", 10, 256, 84, (4,) * 20 + (2, 2)),
    DType("q3_k", 11, 256, 110, (4,) * 27 + (2,)),
    DType("q4_k", 12, 256, 144, (2, 2) + (4,) * 35),
    DType("q5_k", 13, 256, 176, (2, 2) + (4,) * 43),
    DType("q6_k", 14, 256, 210, (4,) * 52 + (2,)),
    DType("iq2_xxs", 16, 256, 66),
    DType("iq2_xs", 17, 256, 74),
    DType("iq3_xxs", 18, 256, 98),
    DType("iq1_s", 19, 256, 50),
    DType("iq4_nl", 20, 32, 18, (2,) + (4,) * 4),
    DType("iq3_s", 21, 256, 110),
    DType("iq2_s", 22, 256, 82),
    DType("iq4_xs", 23, 256, 136),
    DType("iq1_m", 29, 256, 56),
    DType("tq1_0", 34, 256, 54),
    DType("tq2_0", 35, 256, 66),
    DType("mxfp4", 39, 32, 17, (1,) + (4,) * 4),
    DType("nvfp4", 40, 64, 36),
    DType("q1_0", 41, 128, 18),
)

DTYPES: Final[dict[str, DType]] = {dtype.name: dtype for dtype in _TABLE}
DTYPES_BY_GGML_ID: Final[dict[int, DType]] = {
    dtype.ggml_id: dtype for dtype in _TABLE if dtype.ggml_id is not None
}
