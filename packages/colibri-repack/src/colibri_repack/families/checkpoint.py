"""A checkpoint in canonical form: a decoder, its dense tensors, and its experts as slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from colibri_format import DType, FormatError, ModelSpec, Role, parse_model

from ..errors import SourceError
from ..sources import Source, SourceTensor
from .family import Family
from .gguf_model import read_gguf_model
from .hf_model import hf_dense_layers, read_hf_model
from .members import Members
from .names import FUSED, ROPE_FREQS, split_name
from .registry import find_family
from .weights import Wanted, wanted_globals, wanted_in_layer

_FLOATS: Final = frozenset({"f32", "f16", "bf16"})
_MATRIX_ROLES: Final = {Role.GATE: "gate", Role.UP: "up", Role.DOWN: "down"}
_MAX_LISTED: Final = 10
_TILE_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Slice:
    """A C-contiguous part of a source tensor: `shape` from byte `offset` of `tensor` on."""

    tensor: SourceTensor
    offset: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        """The source's encoding."""
        return self.tensor.dtype

    @property
    def size(self) -> int:
        """Bytes in the source."""
        return self.dtype.size_bytes(self.shape)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A dense tensor under its canonical name."""

    name: str
    layer: int | None
    part: Slice


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a source holds, whatever it called it.

    `experts[layer][expert]` maps roles to slices; None for layers without experts. A dense model
    has one expert a layer. `dropped` are source tensors that engines compute by themselves.
    """

    family: Family
    model: ModelSpec
    dense: tuple[DenseWeight, ...]
    experts: tuple[tuple[Mapping[Role, Slice], ...] | None, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def n_experts(self) -> int:
        """Experts of a layer; 1 for dense models."""
        return self.model.moe.n_experts if self.model.moe else 1


def read_checkpoint(source: Source) -> Checkpoint:
    """`source` in canonical form, complete and of the shapes that its description asks for.

    Reads tensor data in one case: embeddings said to be tied with a head that is there too are
    compared, and a head that differs is kept.

    Raises:
        SourceError: `unknown-family`, `bad-config`, `unsupported-model`, `quantised-checkpoint`,
            `unknown-tensors`, `missing-tensor`, `duplicate-tensor`, `tensor-shape`,
            `unsupported-dtype`.
    """
    family = find_family(source)
    read_model = read_gguf_model if source.format == "gguf" else read_hf_model
    model = _checked(read_model(source, family), source)
    return _Reader(source, family, model).read()


def _checked(model: ModelSpec, source: Source) -> ModelSpec:
    try:
        return parse_model(model.to_bytes())
    except (FormatError, ValueError) as error:
        found = error.found if isinstance(error, FormatError) else str(error)
        required = error.required if isinstance(error, FormatError) else "plain numbers"
        raise SourceError("bad-config", source.path, found, required) from error


class _Reader:
    """Takes each tensor out of `left` when its place is known; what stays is not understood."""

    def __init__(self, source: Source, family: Family, model: ModelSpec) -> None:
        self.source = source
        self.family = family
        self.model = model
        self.dropped: list[str] = []
        self.notes: list[str] = []
        self.left = self._by_canonical_name()

    def read(self) -> Checkpoint:
        dense_layers = self._dense_layers()
        self._settle_head()
        dense: list[DenseWeight] = []
        experts: list[tuple[Mapping[Role, Slice], ...] | None] = []
        dense.extend(
            self._take(wanted)
            for wanted in wanted_globals(self.model)
            if wanted.name != "output.weight" or not self.model.tie_embeddings
        )
        if ROPE_FREQS in self.left:
            dense.append(self._take(Wanted(ROPE_FREQS, None, ((self.model.rope.n_dims // 2,),))))
        for layer in range(self.model.n_layers):
            is_moe = self.model.moe is not None and layer not in dense_layers
            wanted_here = wanted_in_layer(
                self.model, self.family, layer, is_moe, self._has_output_bias(layer)
            )
            dense.extend(map(self._take, wanted_here))
            if is_moe:
                experts.append(self._take_experts(layer))
            elif self.model.moe is None:
                experts.append((self._take_ffn(layer),))
            else:
                experts.append(None)
        self._refuse_unknown([tensor.name for tensor in self.left.values()])
        return Checkpoint(
            self.family,
            self.model,
            tuple(dense),
            tuple(experts),
            tuple(self.dropped),
            tuple(self.notes),
        )

    def _by_canonical_name(self) -> dict[str, SourceTensor]:
        table: Mapping[str, str] = self.family.names
        if self.source.format == "gguf":
            known = (set(table.values()) - {FUSED}) | {ROPE_FREQS}
            if self.family.is_moe:
                known |= {f"blk.{{}}.ffn_{m}_exps.weight" for m in _MATRIX_ROLES.values()}
            table = {name: name for name in known}
        n_experts = self.model.moe.n_experts if self.model.moe else 1
        limits = (self.model.n_layers, n_experts)
        found: dict[str, SourceTensor] = {}
        unknown: list[str] = []
        for name, tensor in self.source.tensors.items():
            template, numbers = split_name(name)
            if template in self.family.ignored:
                self.dropped.append(name)
                continue
            canonical = table.get(template)
            if canonical is None or any(n >= m for n, m in zip(numbers, limits, strict=False)):
                unknown.append(name)
                continue
            canonical = canonical.format(*numbers)
            if canonical in found:
                raise SourceError("duplicate-tensor", f"{self.source.path}: tensor {name!r}",
                                  f"is the same as {found[canonical].name!r}",
                                  "each tensor once")  # fmt: skip
            found[canonical] = tensor
        self._refuse_unknown(unknown)
        return found

    def _refuse_unknown(self, names: list[str]) -> None:
        if not names:
            return
        listed = ", ".join(repr(name) for name in names[:_MAX_LISTED])
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        raise SourceError(
            "unknown-tensors",
            self.source.path,
            f"{len(names)} tensors have no place in {self.family.name}: {listed}{more}",
            "every tensor is understood, or the model would be wrong without a word",
        )

    def _dense_layers(self) -> frozenset[int]:
        n_layers = self.model.n_layers
        if self.source.format == "gguf":
            return frozenset(i for i in range(n_layers) if f"blk.{i}.ffn_gate.weight" in self.left)
        config = Members(self.source.config, self.source.path)
        return hf_dense_layers(config, self.family, n_layers)

    def _has_output_bias(self, layer: int) -> bool:
        if self.source.format == "gguf":
            return f"blk.{layer}.attn_output.bias" in self.left
        return self.family.has_output_bias and self.model.attention_bias

    def _settle_head(self) -> None:
        head = self.left.get("output.weight")
        embedding = self.left.get("token_embd.weight")
        if head is None or embedding is None or not self.model.tie_embeddings:
            return
        if _is_same(self.source, head, embedding):
            self.dropped.append(self.left.pop("output.weight").name)
        else:
            self.model = replace(self.model, tie_embeddings=False)
            self.notes.append(
                f"{head.name} differs from {embedding.name} though the configuration ties them: "
                "both are kept"
            )

    def _take(self, wanted: Wanted) -> DenseWeight:
        tensor = self._pop(wanted.name)
        self._check_shape(tensor, wanted.shapes)
        return DenseWeight(wanted.name, wanted.layer, Slice(tensor, 0, tensor.shape))

    def _pop(self, canonical: str) -> SourceTensor:
        tensor = self.left.pop(canonical, None)
        if tensor is None:
            raise SourceError("missing-tensor", self.source.path, f"has no {canonical!r}",
                              f"{self.family.name} has it",
                              "fetch the whole model")  # fmt: skip
        dtype = tensor.dtype
        if dtype.name not in _FLOATS and not (dtype.is_quantised and dtype.ggml_id is not None):
            raise SourceError(
                "unsupported-dtype",
                f"{tensor.file}: tensor {tensor.name!r}",
                f"is {dtype.name}",
                "F32, F16, BF16 or a ggml quantisation",
            )
        return tensor

    def _check_shape(self, tensor: SourceTensor, shapes: tuple[tuple[int, ...], ...]) -> None:
        if tensor.shape not in shapes:
            raise SourceError(
                "tensor-shape",
                f"{tensor.file}: tensor {tensor.name!r}",
                f"has shape {tensor.shape}",
                f"the model's description makes it {' or '.join(map(str, shapes))}",
                "description and tensors are of different models: fetch both again",
            )

    def _take_ffn(self, layer: int) -> Mapping[Role, Slice]:
        parts = {}
        for role, matrix in _MATRIX_ROLES.items():
            tensor = self._pop(f"blk.{layer}.ffn_{matrix}.weight")
            self._check_shape(tensor, (self._expert_shape(role),))
            parts[role] = Slice(tensor, 0, tensor.shape)
        return parts

    def _take_experts(self, layer: int) -> tuple[Mapping[Role, Slice], ...]:
        moe = self.model.moe
        n_experts = moe.n_experts if moe else 1
        stacks = {role: self._take_stack(layer, role) for role in _MATRIX_ROLES}
        fused = FUSED.format(layer)
        if fused in self.left and not (stacks[Role.GATE] or stacks[Role.UP]):
            tensor = self._pop(fused)
            rows, columns = self._expert_shape(Role.GATE)
            self._check_shape(tensor, ((n_experts, 2 * rows, columns),))
            half = tensor.dtype.size_bytes((rows, columns))
            stacks[Role.GATE] = [
                Slice(tensor, 2 * e * half, (rows, columns)) for e in range(n_experts)
            ]
            stacks[Role.UP] = [
                Slice(tensor, (2 * e + 1) * half, (rows, columns)) for e in range(n_experts)
            ]
        experts = []
        for expert in range(n_experts):
            parts = {}
            for role, matrix in _MATRIX_ROLES.items():
                if stack := stacks[role]:
                    parts[role] = stack[expert]
                    continue
                tensor = self._pop(f"blk.{layer}.ffn_{matrix}.{expert}.weight")
                self._check_shape(tensor, (self._expert_shape(role),))
                parts[role] = Slice(tensor, 0, tensor.shape)
            experts.append(parts)
        return tuple(experts)

    def _take_stack(self, layer: int, role: Role) -> list[Slice]:
        name = f"blk.{layer}.ffn_{_MATRIX_ROLES[role]}_exps.weight"
        if name not in self.left or self.model.moe is None:
            return []
        tensor = self._pop(name)
        shape = self._expert_shape(role)
        self._check_shape(tensor, ((self.model.moe.n_experts, *shape),))
        size = tensor.dtype.size_bytes(shape)
        return [Slice(tensor, e * size, shape) for e in range(self.model.moe.n_experts)]

    def _expert_shape(self, role: Role) -> tuple[int, int]:
        width = self.model.moe.expert_size if self.model.moe else self.model.ffn_size
        hidden = self.model.hidden_size
        return (hidden, width) if role is Role.DOWN else (width, hidden)


def _is_same(source: Source, a: SourceTensor, b: SourceTensor) -> bool:
    """Whether two tensors have the same bytes, read tile by tile."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    tiles = bytearray(_TILE_BYTES), bytearray(_TILE_BYTES)
    for start in range(0, a.size, _TILE_BYTES):
        n = min(_TILE_BYTES, a.size - start)
        views = [memoryview(tile)[:n] for tile in tiles]
        source.read_into(a.name, start, views[0])
        source.read_into(b.name, start, views[1])
        if views[0] != views[1]:
            return False
    return True
