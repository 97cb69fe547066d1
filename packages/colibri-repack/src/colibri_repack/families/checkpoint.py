"""A checkpoint in canonical form: a decoder, its dense tensors, and its experts as slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from colibri_format import FormatError, ModelSpec, Role, parse_model

from ..decoding import Fp8Form, Slice
from ..errors import SourceError
from ..sources import Source, SourceTensor
from .expert_table import ExpertTable
from .family import Family
from .fp8_weights import SCALE_SUFFIX, Weights, check_quantisation
from .gguf_model import read_gguf_model
from .hf_model import hf_dense_layers, read_hf_model
from .members import Members
from .names import FUSED, ROPE_FREQS, split_name, take_column
from .outline import read_outline
from .parts import Admit, Checkpoint, DenseWeight, is_same
from .registry import choose_family
from .repack_only import RepackOnlyReader
from .weights import Wanted, wanted_globals, wanted_in_layer

_FLOATS: Final = frozenset({"f32", "f16", "bf16"})
_MATRIX_ROLES: Final = {Role.GATE: "gate", Role.UP: "up", Role.DOWN: "down"}
_SCALE_ROLES: Final = {
    Role.GATE: Role.GATE_SCALE,
    Role.UP: Role.UP_SCALE,
    Role.DOWN: Role.DOWN_SCALE,
}
_STACKED: Final = ".ffn_down_exps.weight"
_MAX_LISTED: Final = 10


def read_checkpoint(
    source: Source,
    *,
    family: str | None = None,
    fp8: Fp8Form = Fp8Form.BF16,
    admit: Admit | None = None,
) -> Checkpoint:
    """`source` in canonical form, complete and of the shapes that its description asks for.

    `family` names one of `FAMILIES`, or is `auto`: experts of a family that is not known are
    recognised by names and shapes. By default the source says its family. `fp8` is what weights
    with FP8 block scales become. `admit` is asked with how many layers have stacks of experts, and
    how many are in one, before there is an object for each; it raises if they are too many.

    Reads tensor data in one case: embeddings said to be tied with a head that is there too are
    compared, and a head that differs is kept.

    Raises:
        SourceError: `unknown-family`, `bad-config`, `unsupported-model`, `quantised-checkpoint`,
            `unknown-tensors`, `missing-tensor`, `duplicate-tensor`, `tensor-shape`,
            `unsupported-dtype`.
    """
    chosen, is_auto = choose_family(source, family)
    weights = Weights(source, check_quantisation(source, chosen.packings), fp8)
    if not chosen.is_described:
        outline = read_outline(source, chosen.architecture, chosen.default_tie)
        return RepackOnlyReader(source, chosen, outline, weights, is_auto, admit).read()
    read_model = read_gguf_model if source.format == "gguf" else read_hf_model
    model = _checked(read_model(source, chosen), source)
    return _Reader(source, chosen, model, weights, admit).read()


def _checked(model: ModelSpec, source: Source) -> ModelSpec:
    try:
        return parse_model(model.to_bytes())
    except (FormatError, ValueError) as error:
        found = error.found if isinstance(error, FormatError) else str(error)
        required = error.required if isinstance(error, FormatError) else "plain numbers"
        raise SourceError("bad-config", source.path, found, required) from error


class _Reader:
    """Takes each tensor out of `left` when its place is known; what stays is not understood."""

    def __init__(
        self,
        source: Source,
        family: Family,
        model: ModelSpec,
        weights: Weights,
        admit: Admit | None,
    ) -> None:
        self.source = source
        self.weights = weights
        self.family = family
        self.model = model
        self.admit = admit
        self.dropped: list[str] = []
        self.notes: list[str] = []
        self.left = self._by_canonical_name()

    def read(self) -> Checkpoint:
        dense_layers = self._dense_layers()
        stacks = [t for name, t in self.left.items() if name.endswith(_STACKED) and t.shape]
        if self.admit is not None and stacks:
            # A stack of another size than described is refused before it is cut.
            described = self.model.moe.n_experts if self.model.moe else 1
            self.admit(len(stacks), min(described, max(tensor.shape[0] for tensor in stacks)))
        self._settle_head()
        dense: list[DenseWeight] = []
        experts: list[ExpertTable | None] = []
        for wanted in wanted_globals(self.model):
            if wanted.name != "output.weight" or not self.model.tie_embeddings:
                dense.extend(self._take(wanted))
        if ROPE_FREQS in self.left:
            dense.extend(self._take(Wanted(ROPE_FREQS, None, ((self.model.rope.n_dims // 2,),))))
        for layer in range(self.model.n_layers):
            is_moe = self.model.moe is not None and layer not in dense_layers
            wanted_here = wanted_in_layer(
                self.model, self.family, layer, is_moe, self._has_output_bias(layer)
            )
            for wanted in wanted_here:
                dense.extend(self._take(wanted))
            if is_moe:
                experts.append(self._take_experts(layer))
            elif self.model.moe is None:
                experts.append(self._take_ffn(layer))
            else:
                experts.append(None)
        self._refuse_unknown([tensor.name for tensor in self.left.values()])
        moe = self.model.moe
        return Checkpoint(
            family=self.family,
            # Engines have no place for scales beside dense tensors.
            model=None if self.weights.keeps_scales else self.model,
            n_layers=self.model.n_layers,
            n_experts=moe.n_experts if moe else 1,
            top_k=moe.top_k if moe else 1,
            dense=tuple(dense),
            experts=tuple(experts),
            dropped=tuple(self.dropped),
            notes=(*self.notes, *self.weights.notes()),
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
        left = dict(self.weights.tensors)
        for template, form in table.items():
            if template.count("{}") < 2 or template in self.family.ignored:
                continue
            for layer in range(self.model.n_layers):
                if form.format(layer, 0) not in found:
                    column = take_column(left, template, layer, n_experts)
                    found |= {form.format(layer, n): tensor for n, tensor in enumerate(column)}
        for name, tensor in left.items():
            template, numbers = split_name(name)
            if template in self.family.ignored:
                self.dropped.append(name)
                continue
            place = table.get(template)
            if place is None or any(n >= m for n, m in zip(numbers, limits, strict=False)):
                unknown.append(name)
                continue
            canonical = place.format(*numbers)
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
        if is_same(self.source, head, embedding):
            self.dropped.append(self.left.pop("output.weight").name)
        else:
            self.model = replace(self.model, tie_embeddings=False)
            self.notes.append(
                f"{head.name} differs from {embedding.name} though the configuration ties them: "
                "both are kept"
            )

    def _take(self, wanted: Wanted) -> list[DenseWeight]:
        tensor = self._pop(wanted.name)
        self._check_shape(tensor, wanted.shapes)
        found = [DenseWeight(wanted.name, wanted.layer, self.weights.whole(tensor))]
        if self.weights.has_scale(tensor):
            scales = self.weights.scales(tensor, 0, 0, tensor.shape[-2])
            if scales is not None:
                found.append(DenseWeight(wanted.name + SCALE_SUFFIX, wanted.layer, scales))
        return found

    def _pop(self, canonical: str) -> SourceTensor:
        tensor = self.left.pop(canonical, None)
        if tensor is None:
            raise SourceError("missing-tensor", self.source.path, f"has no {canonical!r}",
                              f"{self.family.name} has it",
                              "fetch the whole model")  # fmt: skip
        dtype = tensor.dtype
        is_ggml = dtype.is_quantised and dtype.ggml_id is not None
        if dtype.name not in _FLOATS and not is_ggml and not self.weights.has_scale(tensor):
            raise SourceError(
                "unsupported-dtype",
                f"{tensor.file}: tensor {tensor.name!r}",
                f"is {dtype.name}",
                "F32, F16, BF16, a ggml quantisation, or FP8 with block scales",
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

    def _take_ffn(self, layer: int) -> ExpertTable:
        columns: dict[Role, list[Slice]] = {}
        for role, matrix in _MATRIX_ROLES.items():
            tensor = self._pop(f"blk.{layer}.ffn_{matrix}.weight")
            self._check_shape(tensor, (self._expert_shape(role),))
            self._put(columns, role, tensor, 0, 0)
        return _table(f"{self.source.path}: layer {layer}", columns)

    def _take_experts(self, layer: int) -> ExpertTable:
        """Every expert's parts: from a stack of all experts' matrices, or one tensor an expert."""
        n_experts = self.model.moe.n_experts if self.model.moe else 1
        columns: dict[Role, list[Slice]] = {}
        is_fused = FUSED.format(layer) in self.left
        for role, matrix in _MATRIX_ROLES.items():
            rows, n_columns = self._expert_shape(role)
            stack = f"blk.{layer}.ffn_{matrix}_exps.weight"
            if stack in self.left:
                tensor = self._pop(stack)
                self._check_shape(tensor, ((n_experts, rows, n_columns),))
                for expert in range(n_experts):
                    self._put(columns, role, tensor, expert, 0)
            elif not (is_fused and role is not Role.DOWN):
                shapes = ((rows, n_columns),)
                for expert in range(n_experts):
                    tensor = self._pop(f"blk.{layer}.ffn_{matrix}.{expert}.weight")
                    self._check_shape(tensor, shapes)
                    self._put(columns, role, tensor, 0, 0)
        # Beside gate and up of their own the fused stack stays, and is refused as not understood.
        if is_fused and not columns.keys() & {Role.GATE, Role.UP}:
            tensor = self._pop(FUSED.format(layer))
            rows, n_columns = self._expert_shape(Role.GATE)
            self._check_shape(tensor, ((n_experts, 2 * rows, n_columns),))
            for expert in range(n_experts):
                self._put(columns, Role.GATE, tensor, expert, 0)
                self._put(columns, Role.UP, tensor, expert, rows)
        return _table(f"{self.source.path}: layer {layer}", columns)

    def _put(
        self,
        columns: dict[Role, list[Slice]],
        role: Role,
        tensor: SourceTensor,
        matrix: int,
        first: int,
    ) -> None:
        n_rows = self._expert_shape(role)[0]
        columns.setdefault(role, []).append(self.weights.rows(tensor, matrix, first, n_rows))
        scales = self.weights.scales(tensor, matrix, first, n_rows)
        if scales is not None:
            columns.setdefault(_SCALE_ROLES[role], []).append(scales)

    def _expert_shape(self, role: Role) -> tuple[int, int]:
        width = self.model.moe.expert_size if self.model.moe else self.model.ffn_size
        hidden = self.model.hidden_size
        return (hidden, width) if role is Role.DOWN else (width, hidden)


def _table(where: str, columns: Mapping[Role, list[Slice]]) -> ExpertTable:
    most = max(map(len, columns.values()))
    for role, column in columns.items():
        if len(column) < most:
            raise SourceError("missing-tensor", where,
                              f"{most - len(column)} experts have no {role.name.lower()}",
                              "every expert of a layer has the same parts",
                              "fetch the whole model, or repack with --fp8 bf16")  # fmt: skip
    return ExpertTable({role: tuple(columns[role]) for role in sorted(columns)})
