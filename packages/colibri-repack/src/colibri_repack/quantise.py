"""Encodings that repacking can produce: Q8_0 and F32 from the float types."""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .errors import RepackError

Q8_0_ELEMENTS: Final = 32
_Q8_0: Final = np.dtype([("d", "<f2"), ("qs", "i1", (Q8_0_ELEMENTS,))])
_SIGN: Final = np.uint32(0x8000_0000)
_BELOW_HALF: Final = np.uint32(0x3EFF_FFFF)  # the float32 next below 0.5


class Quant(Enum):
    """What becomes of the matrices; `KEEP` leaves every byte as it is."""

    KEEP = "keep"
    Q8_0 = "q8_0"

    @classmethod
    def of(cls, value: str | Quant) -> Quant:
        """The member named `value`.

        Raises:
            RepackError: `bad-quant`.
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise RepackError("bad-quant", "repack", f"quant is {value!r}",
                              f"one of {names}") from None  # fmt: skip


def decode_floats(data: NDArray[np.uint8], dtype_name: str) -> NDArray[np.float32]:
    """The numbers in `data`, encoded as `f32`, `f16` or `bf16`, as float32; exact.

    `data` may be any contiguous bytes of whole elements; the result may share its memory.
    """
    if dtype_name == "f32":
        return data.view("<f4")
    if dtype_name == "f16":
        return data.view("<f2").astype(np.float32)
    if dtype_name == "bf16":
        # bfloat16 is the upper half of a float32 (Intel, BFLOAT16 numerics definition, 2018).
        bits = data.view("<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    raise RepackError("requantize", "quantise", f"encoding {dtype_name}", "f32, f16 or bf16")


def quantise_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """`values`, whose number is a multiple of 32, as Q8_0 quant blocks of 34 bytes.

    Bit for bit what ggml's `quantize_row_q8_0_ref` (ggml-quants.c) writes: d = max|x| / 127,
    quants x * (1 / d) rounded half away from zero, d then stored as float16. All values must be
    finite; NaN and infinity are for the caller to refuse.

    Raises:
        RepackError: `scale-overflow` when a scale is beyond float16 (|x| above 8,321,499).
    """
    blocks = values.reshape(-1, Q8_0_ELEMENTS)
    # Turned once so that the maximum runs along memory: 4 times faster than max(axis=1) of 32.
    scale = np.abs(blocks.T, order="C").max(axis=0) / np.float32(127)
    if scale.size and scale.max() > np.finfo(np.float16).max:
        raise RepackError("scale-overflow", "quantise", f"a value of {float(scale.max()) * 127:g}",
                          "values whose Q8_0 scale fits float16")  # fmt: skip
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    # Of 0, and below 2^-128 where the reciprocal overflows; float16 makes such scales 0 anyway.
    inverse[np.isinf(inverse)] = 0
    scaled = blocks * inverse[:, None]
    # C's roundf: halves go away from zero (NumPy's rint takes them to even). With 0.5 itself
    # 0.49999997 would become 1, as that sum rounds up in float32.
    signed_half = scaled.view(np.uint32) & _SIGN
    signed_half |= _BELOW_HALF
    scaled += signed_half.view(np.float32)
    packed = np.empty(len(blocks), _Q8_0)
    packed["d"] = scale
    packed["qs"] = scaled
    return packed.view(np.uint8)


def first_not_finite(values: NDArray[np.float32]) -> int | None:
    """The index of the first NaN or infinity, None when there is none."""
    # NaN and infinity survive a sum, and float64 holds that of any tile of float32: one pass.
    with np.errstate(invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):
            return None
    bad = np.flatnonzero(~np.isfinite(values))
    return int(bad[0]) if bad.size else None
