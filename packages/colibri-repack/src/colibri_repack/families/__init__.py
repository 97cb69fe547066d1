"""Model families as tables of names, and checkpoints brought into canonical form by them."""

from .checkpoint import Checkpoint, DenseWeight, Slice, read_checkpoint
from .family import Family
from .registry import FAMILIES, find_family
from .weights import is_matrix

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "DenseWeight",
    "Family",
    "Slice",
    "find_family",
    "is_matrix",
    "read_checkpoint",
]
