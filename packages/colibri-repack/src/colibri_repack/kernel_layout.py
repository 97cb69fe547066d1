"""Which matrices are stored with 16 rows interleaved, for kernels to read them at full speed."""

from __future__ import annotations

from enum import Enum
from typing import Final

from colibri_format import INTERLEAVE, DType, can_interleave

from .errors import RepackError

# Types whose interleaved form the native kernels read faster than plain rows. This is the one
# place that says so; measure before editing it.
FASTER_INTERLEAVED: Final = frozenset({"q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "mxfp4"})
# Sixteen rows are held at once, as float32 while they are quantised: 4 MiB of them.
MAX_GROUP_ELEMENTS: Final = 2**20
_EMBEDDINGS: Final = ("token_embd.weight", "nextn.embed_tokens.weight")
_HEAD: Final = "output.weight"


class KernelLayout(Enum):
    """How matrices stand: `PLAIN` rows as ggml has them, `X16` with 16 rows interleaved.

    `X16` takes every type for which the format defines that, `AUTO` only those that
    `FASTER_INTERLEAVED` names. Matrices that cannot be interleaved stay plain.
    """

    PLAIN = "plain"
    X16 = "x16"
    AUTO = "auto"

    @classmethod
    def of(cls, value: str | KernelLayout) -> KernelLayout:
        """The member named `value`.

        Raises:
            RepackError: `bad-layout`.
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise RepackError("bad-layout", "repack", f"layout is {value!r}",
                              f"one of {names}") from None  # fmt: skip


DEFAULT_LAYOUT: Final = KernelLayout.AUTO


def is_looked_up(name: str, *, is_tied: bool) -> bool:
    """Whether single rows of the dense tensor `name` are read, so that they should touch.

    A table that is the head as well (`is_tied`) is read whole for every token, and one row of it
    besides: there the head decides.
    """
    own = name.split(".", 2)[-1] if name.startswith("blk.") else name
    return own in _EMBEDDINGS and not (is_tied and name == _EMBEDDINGS[0])


def obstacle(dtype: DType, shape: tuple[int, ...]) -> str:
    """Why a matrix of `dtype` and `shape` cannot be interleaved; empty if it can."""
    if not dtype.units:
        return f"{dtype.name} has no interleaved form"
    if len(shape) != 2:
        return "no matrix of rank 2"
    if not can_interleave(dtype, shape):
        return f"rows are no multiple of {INTERLEAVE}"
    if INTERLEAVE * shape[1] > MAX_GROUP_ELEMENTS:
        return f"rows of more than {MAX_GROUP_ELEMENTS // INTERLEAVE} elements"
    return ""
