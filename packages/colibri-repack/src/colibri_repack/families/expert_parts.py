"""The experts of one layer as slices, whatever way their tensors are put together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from colibri_format import DTYPES, Role

from ..decoding import Mxfp4Decoder, Slice, StridedDecoder
from ..decoding.mxfp4 import BLOCK_ELEMENTS
from ..errors import SourceError
from ..sources import SourceTensor
from .expert_table import ExpertTable
from .fp8_weights import Weights

# Templates below `blk.{}.`; `gate_up` is both in one tensor. `blocks` and `scales` are MXFP4 in two
# tensors.
STACK: Final = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale|blocks|scales)")
SINGLE: Final = re.compile(r"ffn_(gate|up|down)\.\{\}\.(weight|bias)")
_MATRICES: Final = {"gate": Role.GATE, "up": Role.UP, "down": Role.DOWN}
_BIAS: Final = 1
_SCALE: Final = 2


class Fused(Enum):
    """How gate and up share a tensor: all of gate's rows first, or row by row in turn."""

    HALVES = "halves"
    IN_TURN = "in turn"


@dataclass
class LayerExperts:
    """Expert tensors of one layer: stacks by `(matrix, part)`, single ones by expert below that."""

    stacks: dict[tuple[str, str], SourceTensor] = field(default_factory=dict)
    singles: dict[tuple[str, str], dict[int, SourceTensor]] = field(default_factory=dict)

    def of(self, matrix: tuple[str, str]) -> dict[int, SourceTensor]:
        """The single tensors `(matrix, part)` by expert, to be added to."""
        found = self.singles.get(matrix)
        if found is None:
            found = self.singles[matrix] = {}
        return found

    @property
    def n_experts(self) -> int:
        """How many experts the tensors are of."""
        counts = [t.shape[0] for t in self.stacks.values() if t.shape]
        counts += [max(experts) + 1 for experts in self.singles.values()]
        return max(counts, default=0)


@dataclass(frozen=True)
class ExpertShape:
    """What a family knows of its experts; `is_turned` None is to be told from the shapes.

    A turned stack is `(n_experts, inputs, outputs)`. `hidden_size` is that of the model.
    """

    n_experts: int
    hidden_size: int
    fused: Fused
    is_turned: bool | None


def take_experts(
    where: str, found: LayerExperts, facts: ExpertShape, weights: Weights
) -> ExpertTable:
    """The experts of one layer; all have the same roles and shapes.

    Raises:
        SourceError: `missing-tensor` when an expert lacks what others have, `tensor-shape` when
            shapes do not fit each other, `duplicate-tensor` when a part is there twice.
    """
    assembly = _Assembly(where, facts, weights)
    for (matrix, part), tensor in found.stacks.items():
        assembly.add_stack(matrix, part, tensor, found)
    for (matrix, part), experts in found.singles.items():
        if part != "weight" or not assembly.add_all(matrix, experts):
            for expert, tensor in experts.items():
                assembly.add_single(matrix, part, expert, tensor)
    return assembly.checked()


class _Assembly:
    def __init__(self, where: str, facts: ExpertShape, weights: Weights) -> None:
        self.where = where
        self.facts = facts
        self.weights = weights
        self.columns: dict[Role, list[Slice | None]] = {}

    def put(self, expert: int, role: Role, part: Slice, tensor: SourceTensor) -> None:
        if DTYPES.get(part.dtype.name) is not part.dtype:
            raise SourceError("unsupported-dtype", f"{tensor.file}: tensor {tensor.name!r}",
                              f"is {part.dtype.name}", f"one of {', '.join(DTYPES)}")  # fmt: skip
        column = self.columns.get(role)
        if column is None:
            column = self.columns[role] = [None] * self.facts.n_experts
        if column[expert] is not None:
            raise SourceError("duplicate-tensor", f"{tensor.file}: tensor {tensor.name!r}",
                              f"gives expert {expert} its {role.name.lower()} a second time",
                              "each part once")  # fmt: skip
        column[expert] = part

    def add_all(self, matrix: str, experts: Mapping[int, SourceTensor]) -> bool:
        """Take one matrix of every expert at once; False, and nothing done, if they differ."""
        tensors = [experts.get(expert) for expert in range(self.facts.n_experts)]
        found = [tensor for tensor in tensors if tensor is not None]
        role = _MATRICES[matrix]
        if len(found) < max(len(tensors), len(experts)) or role in self.columns:
            return False
        column = self.weights.alike(found)
        if column is None or DTYPES.get(column[0].dtype.name) is not column[0].dtype:
            return False
        self.columns[role] = list(column)
        return True

    def add_single(self, matrix: str, part: str, expert: int, tensor: SourceTensor) -> None:
        if expert >= self.facts.n_experts:
            raise self.wrong(tensor, f"is of expert {expert}", f"{self.facts.n_experts} experts")
        role = _MATRICES[matrix]
        if part == "bias":
            self.check_rank(tensor, 1)
            self.put(expert, Role(role + _BIAS), Slice(tensor, 0, tensor.shape), tensor)
            return
        self.check_rank(tensor, 2)
        self.put_rows(expert, role, tensor, 0, 0, tensor.shape[0])

    def add_stack(self, matrix: str, part: str, tensor: SourceTensor, found: LayerExperts) -> None:
        if part == "scales":
            if (matrix, "blocks") not in found.stacks:
                raise SourceError("missing-tensor", self.where, f"{tensor.name!r} has no blocks",
                                  "blocks and scales")  # fmt: skip
            return
        rank = {"weight": 3, "blocks": 4, "bias": 2}.get(part, 1)
        self.check_rank(tensor, rank)
        if tensor.shape[0] != self.facts.n_experts:
            raise self.wrong(tensor, f"has shape {tensor.shape}",
                             f"{self.facts.n_experts} experts")  # fmt: skip
        if part == "weight":
            self.add_matrices(matrix, tensor, found)
        elif part == "blocks":
            self.add_blocks(matrix, tensor, found.stacks.get((matrix, "scales")))
        elif part == "bias":
            self.add_biases(matrix, tensor)
        else:
            # llama.cpp's `ffn_*_exps.scale`: one factor an expert.
            role = Role(_MATRICES[matrix] + _SCALE) if matrix in _MATRICES else None
            if role is None:
                raise self.wrong(tensor, "is a scale of two matrices", "a scale of one")
            size = tensor.dtype.size_bytes((1,))
            for expert in range(self.facts.n_experts):
                self.put(expert, role, Slice(tensor, expert * size, (1,)), tensor)

    def add_matrices(self, matrix: str, tensor: SourceTensor, found: LayerExperts) -> None:
        if self.is_turned(matrix, tensor, found):
            self.add_turned(matrix, tensor)
            return
        n_rows = tensor.shape[1]
        for expert in range(self.facts.n_experts):
            if matrix in _MATRICES:
                self.put_rows(expert, _MATRICES[matrix], tensor, expert, 0, n_rows)
                continue
            half = self.half(tensor, n_rows)
            if self.facts.fused is Fused.HALVES:
                self.put_rows(expert, Role.GATE, tensor, expert, 0, half)
                self.put_rows(expert, Role.UP, tensor, expert, half, half)
            else:
                raise self.wrong(tensor, "has rows of gate and up in turn", "a turned stack")

    def add_turned(self, matrix: str, tensor: SourceTensor) -> None:
        """Elements change places: `(inputs, outputs)` becomes rows, one an output."""
        dtype = tensor.dtype
        if dtype.is_quantised or self.weights.has_scale(tensor):
            raise self.wrong(tensor, f"is {dtype.name} and transposed", "F32, F16 or BF16")
        _, n_inputs, n_outputs = tensor.shape
        is_fused = matrix not in _MATRICES
        half = self.half(tensor, n_outputs) if is_fused else n_outputs
        in_turn = is_fused and self.facts.fused is Fused.IN_TURN
        decoder = StridedDecoder(dtype, 2 if in_turn else 1, n_outputs)
        starts = {_MATRICES[matrix]: 0} if not is_fused else {
            Role.GATE: 0, Role.UP: 1 if in_turn else half}  # fmt: skip
        for expert in range(self.facts.n_experts):
            base = expert * n_inputs * n_outputs
            for role, start in starts.items():
                offset = (base + start) * dtype.block_bytes
                self.put(expert, role, Slice(tensor, offset, (half, n_inputs), decoder), tensor)

    def add_blocks(self, matrix: str, tensor: SourceTensor, scales: SourceTensor | None) -> None:
        """MXFP4 in two tensors: `(n_experts, rows, blocks, 16)` and `(n_experts, rows, blocks)`."""
        if scales is None:
            raise SourceError("missing-tensor", self.where, f"{tensor.name!r} has no scales",
                              "blocks and scales")  # fmt: skip
        _, n_rows, n_blocks, n_bytes = tensor.shape
        if n_bytes * 2 != BLOCK_ELEMENTS or {tensor.dtype.name, scales.dtype.name} - {"u8", "e8m0"}:
            raise self.wrong(tensor, f"is {tensor.dtype.name} of shape {tensor.shape}",
                             "U8 blocks of 16 bytes")  # fmt: skip
        if scales.shape != tensor.shape[:3]:
            raise self.wrong(scales, f"has shape {scales.shape}",
                             f"{tensor.shape[:3]}, as its blocks")  # fmt: skip
        is_fused = matrix not in _MATRICES
        step = 2 if is_fused and self.facts.fused is Fused.IN_TURN else 1
        half = self.half(tensor, n_rows) if is_fused else n_rows
        starts = {_MATRICES[matrix]: 0} if not is_fused else {
            Role.GATE: 0, Role.UP: 1 if step == 2 else half}  # fmt: skip
        shape = (half, n_blocks * BLOCK_ELEMENTS)
        decoder = Mxfp4Decoder(scales, step)
        for expert in range(self.facts.n_experts):
            for role, start in starts.items():
                at = (expert * n_rows + start) * n_blocks
                self.put(expert, role, Slice(tensor, at * n_bytes, shape, decoder), tensor)

    def add_biases(self, matrix: str, tensor: SourceTensor) -> None:
        _, n = tensor.shape
        size = tensor.dtype.size_bytes((n,))
        item = tensor.dtype.block_bytes
        is_fused = matrix not in _MATRICES
        for expert in range(self.facts.n_experts):
            base = expert * size
            if not is_fused:
                role = Role(_MATRICES[matrix] + _BIAS)
                self.put(expert, role, Slice(tensor, base, (n,)), tensor)
                continue
            half = self.half(tensor, n)
            in_turn = self.facts.fused is Fused.IN_TURN
            decoder = StridedDecoder(tensor.dtype, 2) if in_turn else None
            other = base + (1 if in_turn else half) * item
            self.put(expert, Role.GATE_BIAS, Slice(tensor, base, (half,), decoder), tensor)
            self.put(expert, Role.UP_BIAS, Slice(tensor, other, (half,), decoder), tensor)

    def put_rows(
        self, expert: int, role: Role, tensor: SourceTensor, matrix: int, first: int, n_rows: int
    ) -> None:
        self.put(expert, role, self.weights.rows(tensor, matrix, first, n_rows), tensor)
        scales = self.weights.scales(tensor, matrix, first, n_rows)
        if scales is not None:
            self.put(expert, Role(role + _SCALE), scales, tensor)

    def is_turned(self, matrix: str, tensor: SourceTensor, found: LayerExperts) -> bool:
        """Whether the stack is `(n_experts, inputs, outputs)`; a square one is as the others are.

        Raises:
            SourceError: `tensor-shape` when no stack's shape tells.
        """
        if self.facts.is_turned is not None:
            return self.facts.is_turned
        hidden = self.facts.hidden_size
        stacks = [(m, t) for (m, part), t in found.stacks.items() if part == "weight"]
        for name, stack in [(matrix, tensor), *stacks]:
            if len(stack.shape) == 3:
                # Gate and up take `hidden` numbers in, down gives as many out.
                inputs, outputs = stack.shape[1] == hidden, stack.shape[2] == hidden
                if inputs != outputs:
                    return inputs != (name == "down")
        raise SourceError(
            "tensor-shape",
            f"{tensor.file}: tensor {tensor.name!r}",
            f"has shape {tensor.shape}: which axis is the input's cannot be told",
            f"exactly one of {hidden} numbers, here or in another stack",
            "name the family",
        )

    def half(self, tensor: SourceTensor, n_rows: int) -> int:
        if n_rows % 2:
            raise self.wrong(tensor, f"has shape {tensor.shape}", "as many rows of gate as of up")
        return n_rows // 2

    def check_rank(self, tensor: SourceTensor, rank: int) -> None:
        if len(tensor.shape) != rank or 0 in tensor.shape:
            raise self.wrong(tensor, f"has shape {tensor.shape}", f"{rank} lengths above 0")

    def wrong(self, tensor: SourceTensor, found: str, required: str) -> SourceError:
        return SourceError("tensor-shape", f"{tensor.file}: tensor {tensor.name!r}", found,
                           required, "fetch the model again")  # fmt: skip

    def checked(self) -> ExpertTable:
        columns: dict[Role, tuple[Slice, ...]] = {}
        lacking: list[tuple[int, Role]] = []
        for role in sorted({*self.columns, Role.UP, Role.DOWN}):
            column = self.columns.get(role, [None])
            columns[role] = tuple(part for part in column if part is not None)
            if len(columns[role]) < len(column):
                lacking.append((column.index(None), role))
        if lacking:
            expert, role = min(lacking)
            raise SourceError("missing-tensor", self.where,
                              f"expert {expert} has no {role.name.lower()}",
                              "every expert of a layer has the same parts",
                              "fetch the whole model")  # fmt: skip
        shapes = list(zip(*([part.shape for part in column] for column in columns.values()),
                          strict=True))  # fmt: skip
        for found in dict.fromkeys(shapes):
            self.check_shapes(shapes.index(found), dict(zip(columns, found, strict=True)))
        return ExpertTable(columns)

    def check_shapes(self, expert: int, shapes: Mapping[Role, tuple[int, ...]]) -> None:
        """Gate and up are `(width, hidden)`, down is `(hidden, width)`, biases as their rows."""
        width, hidden = shapes[Role.UP]
        required: dict[Role, tuple[int, ...]] = {
            Role.GATE: (width, hidden),
            Role.DOWN: (hidden, width),
            Role.GATE_BIAS: (width,),
            Role.UP_BIAS: (width,),
            Role.DOWN_BIAS: (hidden,),
        }
        if hidden != self.facts.hidden_size:
            required[Role.UP] = (width, self.facts.hidden_size)
        for role, shape in required.items():
            if role in shapes and shapes[role] != shape:
                raise SourceError("tensor-shape", self.where,
                                  f"expert {expert} has a {role.name.lower()} of shape "
                                  f"{shapes[role]}", f"{shape}",
                                  "fetch the model again")  # fmt: skip
