"""Which parts of a `.colibri` file make up a tensor of a GGUF."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from colibri_format import DenseTensor, DType, Reader, Role, Segment

_LAYER: Final = re.compile(r"blk\.(\d{1,7})\.(.+)", re.DOTALL)
_STACK: Final = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)")
_SINGLE: Final = re.compile(r"ffn_(gate|up|down)(?:\.(\d{1,7}))?\.(weight|bias)")
_FUSED_SHARED: Final = "ffn_gate_up_shexp.weight"
_MATRICES: Final = {
    "gate": (Role.GATE,), "up": (Role.UP,), "down": (Role.DOWN,), "gate_up": (Role.GATE, Role.UP),
}  # fmt: skip
_PART: Final = {"weight": 0, "bias": 1, "scale": 2}
_SUFFIX: Final = {0: "weight", 1: "bias", 2: "scale"}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A whole dense tensor."""

    fact: DenseTensor

    @property
    def key(self) -> str:
        """What tells it from other parts."""
        return self.fact.name


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """One segment of an expert's block."""

    layer: int
    expert: int
    fact: Segment

    @property
    def key(self) -> tuple[int, int, Role]:
        """What tells it from other parts."""
        return self.layer, self.expert, self.fact.role


StoredPart: TypeAlias = TensorPart | SegmentPart


class Contents:
    """The parts of an open file, found by GGUF names."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.n_layers, self.n_experts = reader.index.shape

    def find(self, name: str) -> tuple[StoredPart, ...]:
        """The parts that follow each other in the tensor `name`; none if it is not in the file.

        Experts are found in stacks, in fused stacks with gate's rows first, and one by one; a
        dense model's feed-forward network is its one expert.
        """
        if name in self._reader.tensors:
            return (TensorPart(self._reader.tensors[name]),)
        if name.endswith(_FUSED_SHARED):
            halves = (name.replace(_FUSED_SHARED, f"ffn_{m}_shexp.weight") for m in ("gate", "up"))
            facts = [self._reader.tensors.get(half) for half in halves]
            return tuple(TensorPart(fact) for fact in facts if fact is not None)
        match = _LAYER.fullmatch(name)
        if match is None or int(match[1]) >= self.n_layers:
            return ()
        layer = int(match[1])
        if stack := _STACK.fullmatch(match[2]):
            experts = np.flatnonzero(self._reader.index["size"][layer]).tolist()
            roles = [Role(role + _PART[stack[2]]) for role in _MATRICES[stack[1]]]
            found = [self._segment(layer, e, role) for e in experts for role in roles]
        elif single := _SINGLE.fullmatch(match[2]):
            if (single[2] is None and self.n_experts > 1) or int(single[2] or 0) >= self.n_experts:
                return ()
            role = Role(_MATRICES[single[1]][0] + _PART[single[3]])
            found = [self._segment(layer, int(single[2] or 0), role)]
        else:
            return ()
        return tuple(part for part in found if part is not None)

    def _segment(self, layer: int, expert: int, role: Role) -> SegmentPart | None:
        if not self._reader.index["size"][layer, expert]:
            return None
        fact = self._reader.expert(layer, expert).layout.segment(role)
        return None if fact is None else SegmentPart(layer, expert, fact)

    def keys(self) -> set[str | tuple[int, int, Role]]:
        """The key of every part in the file."""
        keys: set[str | tuple[int, int, Role]] = set(self._reader.tensors)
        for layer, expert in np.argwhere(self._reader.index["size"]).tolist():
            layout = self._reader.expert(layer, expert).layout
            keys.update((layer, expert, segment.role) for segment in layout.segments)
        return keys

    def names(self) -> list[str]:
        """The tensors of a GGUF with all that the file holds, in llama.cpp's usual order.

        Experts in stacks; tensors of no layer first but for the last norm and the head.
        """
        last = ("output_norm.weight", "output_norm.bias", "output.weight", "output.bias")
        dense = self._reader.tensors
        of_none = [name for name, fact in dense.items() if fact.layer is None]
        names = [name for name in of_none if name not in last]
        of_layers: dict[int, list[str]] = {}
        for name, fact in dense.items():
            if fact.layer is not None:
                of_layers.setdefault(fact.layer, []).append(name)
        for layer in range(self.n_layers):
            names += of_layers.get(layer, [])
            names += [self._stack_name(layer, role) for role in self._roles(layer)]
        return names + [name for name in last if name in dense]

    def _roles(self, layer: int) -> list[Role]:
        present = np.flatnonzero(self._reader.index["size"][layer])
        if not len(present):
            return []
        layout = self._reader.expert(layer, int(present[0])).layout
        return [segment.role for segment in layout.segments]

    def _stack_name(self, layer: int, role: Role) -> str:
        matrix = {Role.GATE: "gate", Role.UP: "up", Role.DOWN: "down"}[Role(role & ~0xF)]
        suffix = "_exps" if self.n_experts > 1 else ""
        return f"blk.{layer}.ffn_{matrix}{suffix}.{_SUFFIX[role & 0xF]}"


def stacked_shape(name: str, parts: tuple[StoredPart, ...]) -> tuple[int, ...]:
    """The shape of the tensor `name` from its parts, for files that do not record it."""
    shape = parts[0].fact.shape
    if "_exps." not in name:
        return shape
    if name.endswith(".scale"):
        return (len(parts),)
    return (len(parts), *shape)


def common_dtype(parts: tuple[StoredPart, ...]) -> DType | None:
    """The encoding of all parts, None if they differ."""
    dtypes = {part.fact.dtype.name: part.fact.dtype for part in parts}
    return next(iter(dtypes.values())) if len(dtypes) == 1 else None
