"""The `.colibri` expert-block file: one aligned, checksummed block for each expert."""

from .c_header import get_include
from .checkpoints import Resume
from .checksum import checksum
from .diff import Difference, diff_files
from .dtypes import DTYPES, DTYPES_BY_GGML_ID, DType
from .errors import (
    ColibriError,
    FormatCode,
    FormatError,
    StorageError,
    UsageError,
    printable,
)
from .handles import Expert, Tensor
from .interleave import can_interleave, deinterleave, interleave
from .layout import (
    INDEX_DTYPE,
    INTERLEAVE,
    NO_LAYOUT,
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
    Volume,
    block_seed,
    round_up,
)
from .model import MODEL_FILE, ModelSpec, MoeSpec, RopeSpec, is_float32, parse_model
from .plan import FilePlan, block_padding, plan_layout
from .reader import Reader
from .reader import open_file as open
from .repair import Restored, describe_loss, repair
from .sink import Sink
from .units import format_size, parse_size
from .verify import Damage
from .writer import Writer

__all__ = [
    "DTYPES",
    "DTYPES_BY_GGML_ID",
    "INDEX_DTYPE",
    "INTERLEAVE",
    "MODEL_FILE",
    "NO_LAYOUT",
    "ColibriError",
    "DType",
    "Damage",
    "DenseTensor",
    "Difference",
    "Expert",
    "Extent",
    "FileEntry",
    "FilePlan",
    "FileSpec",
    "FormatCode",
    "FormatError",
    "Geometry",
    "Layout",
    "ModelSpec",
    "MoeSpec",
    "Reader",
    "Restored",
    "Resume",
    "Role",
    "RopeSpec",
    "Segment",
    "SegmentSpec",
    "Sink",
    "StorageError",
    "Tensor",
    "TensorSpec",
    "UsageError",
    "Volume",
    "Writer",
    "block_padding",
    "block_seed",
    "can_interleave",
    "checksum",
    "deinterleave",
    "describe_loss",
    "diff_files",
    "format_size",
    "get_include",
    "interleave",
    "is_float32",
    "open",
    "parse_model",
    "parse_size",
    "plan_layout",
    "printable",
    "repair",
    "round_up",
]
