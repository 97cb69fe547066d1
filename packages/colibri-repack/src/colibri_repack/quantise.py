"""What matrices can be asked to become, and which type llama.cpp gives each one then."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from colibri_format import DTYPES, DType

from .errors import RepackError


class Quant(Enum):
    """What becomes of matrices.

    `KEEP` leaves every byte as it is. The types make every matrix of that type. `Q4_K_M` and
    `Q5_K_M` are llama.cpp's mixes: more bits for the matrices that need them.
    """

    KEEP = "keep"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    MXFP4 = "mxfp4"
    Q4_K_M = "q4_k_m"
    Q5_K_M = "q5_k_m"

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

    @property
    def is_mix(self) -> bool:
        """Whether matrices get different types by their place."""
        return self in (Quant.Q4_K_M, Quant.Q5_K_M)

    @property
    def base(self) -> DType:
        """The type asked for, of a mix the type of what gets no better one; not for `KEEP`."""
        return DTYPES[self.value.removesuffix("_m")]


# llama.cpp, src/llama-quant.cpp, tensor_type_fallback.
_FALLBACKS: Final = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}


def fitting(dtype: DType, n_columns: int) -> DType:
    """`dtype`, or what llama.cpp takes instead for rows of `n_columns` that it cannot hold.

    A K-quant becomes a type of 32 elements with more bits; float16 where even those do not fit.
    """
    for name in (dtype.name, _FALLBACKS.get(dtype.name, "f16")):
        if n_columns % DTYPES[name].block_elements == 0:
            return DTYPES[name]
    return DTYPES["f16"]


@dataclass(frozen=True, slots=True)
class MixFacts:
    """What a mix depends on: counts of the model and of its attention value matrices.

    `is_70b`: llama.cpp's LLM_TYPE_70B, 80 layers with grouped keys and values.
    """

    n_layers: int
    n_experts: int
    n_values: int
    is_tied: bool
    is_70b: bool = False


def is_value(name: str) -> bool:
    """Whether the canonical `name` is of a matrix that llama.cpp treats as attention values."""
    return name.endswith(("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"))


def mixed(
    quant: Quant, name: str, n_columns: int, layer: int, value: int, facts: MixFacts
) -> DType:
    """The type of the matrix `name` of `layer` in the mix `quant`, before `fitting`.

    `value` is the matrix's place among those that `is_value`, layer by layer. Rules of llama.cpp,
    src/llama-quant.cpp, llama_tensor_get_type_impl, for LLAMA_FTYPE_MOSTLY_Q4_K_M and Q5_K_M.
    """
    base = quant.base
    if name == "output.weight" or (facts.is_tied and name == "token_embd.weight"):
        return DTYPES["q8_0" if n_columns % base.block_elements else "q6_k"]
    if is_value(name):
        better = "q6_k" if _needs_more_bits(value, facts.n_values) else base.name
        if facts.is_70b and better == "q4_k":
            better = "q5_k"
        return DTYPES["q8_0" if facts.n_experts == 8 else better]
    if name.endswith("attn_k.weight") and facts.n_experts == 8:
        return DTYPES["q8_0"]
    if "ffn_down" in name and _needs_more_bits(layer, facts.n_layers):
        return DTYPES["q6_k"]
    if name.endswith("attn_output.weight") and facts.n_experts == 8 and quant is Quant.Q4_K_M:
        return DTYPES["q5_k"]
    return base


def _needs_more_bits(place: int, n: int) -> bool:
    """The first and the last eighth, and every third in between."""
    return place < n // 8 or place >= 7 * n // 8 or (place - n // 8) % 3 == 2
