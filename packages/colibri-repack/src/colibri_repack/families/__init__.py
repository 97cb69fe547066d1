"""Model families as tables of names, and checkpoints brought into canonical form by them."""

from .checkpoint import read_checkpoint
from .family import Family
from .parts import Checkpoint, DenseWeight
from .registry import AUTO, FAMILIES, find_family
from .weights import is_matrix

__all__ = [
    "AUTO",
    "FAMILIES",
    "Checkpoint",
    "DenseWeight",
    "Family",
    "find_family",
    "is_matrix",
    "read_checkpoint",
]
