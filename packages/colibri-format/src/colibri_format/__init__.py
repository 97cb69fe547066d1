"""The `.colibri` expert-block file: one aligned, checksummed block for each expert."""

from .dtypes import DTYPES, DTYPES_BY_GGML_ID, DType
from .errors import ColibriError, FormatCode, FormatError, StorageError, UsageError
from .layout import (
    INDEX_DTYPE,
    DenseTensor,
    Extent,
    FileEntry,
    FileSpec,
    Geometry,
    Layout,
    Role,
    Segment,
    SegmentSpec,
    TensorSpec,
)
from .model import MODEL_FILE, ModelSpec, MoeSpec, RopeSpec, parse_model
from .units import format_size, parse_size

__all__ = [
    "DTYPES",
    "DTYPES_BY_GGML_ID",
    "INDEX_DTYPE",
    "MODEL_FILE",
    "ColibriError",
    "DType",
    "DenseTensor",
    "Extent",
    "FileEntry",
    "FileSpec",
    "FormatCode",
    "FormatError",
    "Geometry",
    "Layout",
    "ModelSpec",
    "MoeSpec",
    "RopeSpec",
    "Role",
    "Segment",
    "SegmentSpec",
    "StorageError",
    "TensorSpec",
    "UsageError",
    "format_size",
    "parse_model",
    "parse_size",
]
