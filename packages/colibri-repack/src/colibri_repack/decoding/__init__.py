"""Slices of source tensors, and what makes plain rows of those that are stored in another way."""

from .fp8 import FP8_DTYPES, Fp8Decoder, Fp8Form
from .mxfp4 import Mxfp4Decoder
from .slices import Decoder, Slice
from .strided import StridedDecoder

__all__ = [
    "FP8_DTYPES",
    "Decoder",
    "Fp8Decoder",
    "Fp8Form",
    "Mxfp4Decoder",
    "Slice",
    "StridedDecoder",
]
