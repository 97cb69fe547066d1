"""Repacks safetensors and GGUF checkpoints into .colibri files within a memory limit."""

from .api import plan, repack
from .convert import Converted
from .decoding import Fp8Form
from .errors import ExportError, MemoryBudgetError, RepackError, SourceError
from .facts import BlockSize, FileFacts, LayerTypes, TypeTotal, facts_of_file, facts_of_plan
from .families import FAMILIES, Checkpoint, Family, read_checkpoint
from .gguf_export import ExportPlan, ExportReport, export, plan_export
from .imatrix import Imatrix
from .kernel_layout import KernelLayout
from .memory_plan import MemoryPlan
from .quantise import Quant
from .recode import quantise_q8_0, recode
from .repack_plan import RepackOptions, RepackPlan, plan_repack
from .report import RepackReport
from .routing_trace import RoutingTrace, read_trace
from .sources import Source, SourceTensor, open_source
from .striping import VolumeFolder
from .time_estimate import Estimate, estimate_time

__all__ = [
    "FAMILIES",
    "BlockSize",
    "Checkpoint",
    "Converted",
    "Estimate",
    "ExportError",
    "ExportPlan",
    "ExportReport",
    "Family",
    "FileFacts",
    "Fp8Form",
    "Imatrix",
    "KernelLayout",
    "LayerTypes",
    "MemoryBudgetError",
    "MemoryPlan",
    "Quant",
    "RepackError",
    "RepackOptions",
    "RepackPlan",
    "RepackReport",
    "RoutingTrace",
    "Source",
    "SourceError",
    "SourceTensor",
    "TypeTotal",
    "VolumeFolder",
    "estimate_time",
    "export",
    "facts_of_file",
    "facts_of_plan",
    "open_source",
    "plan",
    "plan_export",
    "plan_repack",
    "quantise_q8_0",
    "read_checkpoint",
    "read_trace",
    "recode",
    "repack",
]
