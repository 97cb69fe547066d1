"""Checkpoints of families that are repacked, but that no `model.json` can describe yet.

Experts become blocks. Every other tensor is carried over under its GGUF name with the values it
has in the source: what llama.cpp's converter would compute anew (Gemma's and Qwen3-Next's norms
plus 1, -exp of `A_log`, DeepSeek's `kv_b` cut in two) is not computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Final

from colibri_format import DTYPES, Role

from ..errors import SourceError
from ..sources import Source, SourceTensor
from .auto_names import guess_name
from .expert_parts import SINGLE, STACK, ExpertShape, Fused, LayerExperts, take_experts
from .expert_table import ExpertTable
from .family import Family
from .fp8_weights import SCALE_SUFFIX, Weights
from .members import MAX_EXPERTS
from .names import split_name, take_column
from .outline import Outline
from .parts import Admit, Checkpoint, DenseWeight, is_same

_LAYERED: Final = "blk.{}."
_FFN: Final = {Role.GATE: "ffn_gate.weight", Role.UP: "ffn_up.weight", Role.DOWN: "ffn_down.weight"}
_GLOBALS: Final = ("token_embd.weight", "output_norm.weight")
_FUSED_SHARED: Final = "ffn_gate_up_shexp.weight"
_GATE_SHARED: Final = "ffn_gate_shexp.weight"
_UP_SHARED: Final = "ffn_up_shexp.weight"
_MAX_LISTED: Final = 10


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tensors of one canonical template belong, `template` without `blk.{}.`.

    `matrix` is which part of an expert they are, as `LayerExperts` names it; None for dense ones.
    """

    template: str
    is_layered: bool
    matrix: tuple[str, str] | None = None
    is_single: bool = False

    @classmethod
    def of(cls, canonical: str) -> _Place | None:
        """The place that the template `canonical` names; None for a layer without a number."""
        if not canonical.startswith(_LAYERED):
            return None if canonical.startswith("blk.") else cls(canonical, is_layered=False)
        rest = canonical.removeprefix(_LAYERED)
        single = SINGLE.fullmatch(rest)
        match = single or STACK.fullmatch(rest)
        matrix = (match[1], match[2]) if match is not None else None
        return cls(rest, is_layered=True, matrix=matrix, is_single=single is not None)


@dataclass
class _Layer:
    experts: LayerExperts = field(default_factory=LayerExperts)
    dense: dict[str, SourceTensor] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether the layer routes, or should: a router alone tells of experts that are missing."""
        return self.experts.n_experts > 0 or "ffn_gate_inp.weight" in self.dense

    def groups(self) -> dict[tuple[str, bool], set[str]]:
        """The layer's dense tensors by what they depend on: layers alike in that have the same."""
        attention = ("attention", any(name.startswith("ssm_") for name in self.dense))
        network = ("network", self.has_experts)
        further = ("further token", any(name.startswith("nextn.") for name in self.dense))
        found: dict[tuple[str, bool], set[str]] = {attention: set(), network: set(), further: set()}
        for name in self.dense:
            is_network = name.startswith(("ffn_", "exp_probs_b")) and "norm" not in name
            group = further if name.startswith("nextn.") else network if is_network else attention
            found[group].add(name)
        return found


class RepackOnlyReader:
    """Sorts a source's tensors into layers, experts and the rest.

    With `is_auto` names that no table has are told by their form; a tensor of an expert that
    cannot be placed is refused, any other one keeps its own name.
    """

    def __init__(
        self,
        source: Source,
        family: Family,
        outline: Outline,
        weights: Weights,
        is_auto: bool,
        admit: Admit | None,
    ) -> None:
        self.source = source
        self.family = family
        self.outline = outline
        self.weights = weights
        self.is_auto = is_auto
        self.admit = admit
        self.dropped: list[str] = []
        self.left_out: list[str] = []
        self.notes: list[str] = []
        self.mapping: dict[str, str] = {}
        self.globals: dict[str, SourceTensor] = {}
        self.layers = [_Layer() for _ in range(outline.n_layers)]

    def read(self) -> Checkpoint:
        """The checkpoint, without a model.

        Raises:
            SourceError: as `read_checkpoint`.
        """
        self._sort()
        self._settle_layers()
        n_experts = self._n_experts()
        is_moe = n_experts > 0
        stacked = [layer.experts.n_experts for layer in self.layers if layer.experts.stacks]
        if self.admit is not None and stacked:
            self.admit(len(stacked), max(stacked))
        self._settle_head()
        self._check_complete()
        dense = [self._weights(name, None, tensor) for name, tensor in self.globals.items()]
        experts: list[ExpertTable | None] = []
        facts = self._shape(n_experts)
        for number, layer in enumerate(self.layers):
            where = f"{self.source.path}: layer {number}"
            if is_moe:
                has_experts = layer.experts.n_experts > 0
                experts.append(
                    take_experts(where, layer.experts, facts, self.weights) if has_experts else None
                )
            else:
                experts.append(self._take_ffn(number, layer))
            for name, tensor in layer.dense.items():
                dense.append(self._weights(f"blk.{number}.{name}", number, tensor))
        return Checkpoint(
            family=self.family,
            model=None,
            n_layers=len(self.layers),
            n_experts=n_experts or 1,
            top_k=self.outline.top_k,
            dense=tuple(weight for weights in dense for weight in weights),
            experts=tuple(experts),
            dropped=tuple(self.dropped),
            notes=(*self._notes(), *self.weights.notes()),
        )

    def _sort(self) -> None:
        unknown: list[str] = []
        places: dict[str, _Place] = {}
        left = dict(self.weights.tensors)
        self._take_columns(left)
        for name, tensor in left.items():
            if name.startswith(self.family.left_out):
                self.left_out.append(name)
                continue
            plain = self._plain(name)
            template, numbers = split_name(plain)
            place = places.get(template)
            if template in self.family.ignored:
                self.dropped.append(name)
                continue
            if place is None and (canonical := self._known(template)) is not None:
                place = _Place.of(canonical)
                if place is not None:
                    places[template] = place
            elif place is None and self.is_auto:
                # Which of its numbers count is told by the form of each name.
                guessed, numbers = guess_name(plain)
                if guessed is not None:
                    self.mapping[template] = guessed
                    place = _Place.of(guessed)
            if place is None or not self._put(place, numbers, tensor):
                unknown.append(name)
        if unknown:
            listed = ", ".join(repr(name) for name in unknown[:_MAX_LISTED])
            more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
            raise SourceError(
                "unknown-tensors",
                self.source.path,
                f"{len(unknown)} tensors have no place in {self.family.name}: {listed}{more}",
                "every tensor is understood, or the model would be wrong without a word",
                "" if self.is_auto else "--family auto places experts by names and shapes alone",
            )

    def _take_columns(self, left: dict[str, SourceTensor]) -> None:
        """Take one matrix of every expert of a layer at once: nearly all tensors, by their names.

        Columns that are not whole or are there twice stay, to be refused.
        """
        for template, canonical in self.family.names.items():
            place = _Place.of(canonical)
            if place is None or place.matrix is None or not place.is_single:
                continue
            for spelling in self._spellings(template):
                for number, layer in enumerate(self.layers):
                    if place.matrix in layer.experts.singles:
                        continue
                    column = take_column(left, spelling, number, self.outline.n_experts)
                    if column:
                        layer.experts.singles[place.matrix] = dict(enumerate(column))

    def _spellings(self, template: str) -> list[str]:
        """`template` as it is and with all that may stand before it in multimodal checkpoints."""
        found = [template] + [
            prefix + template.removeprefix(short)
            for prefix, short in self.family.prefixes.items()
            if template.startswith(short)
        ]
        return [name for name in found if not name.startswith(self.family.left_out)]

    def _plain(self, name: str) -> str:
        """`name` without what stands before it in multimodal checkpoints."""
        for prefix, short in self.family.prefixes.items():
            if name.startswith(prefix):
                return short + name[len(prefix) :]
        return name

    def _known(self, template: str) -> str | None:
        """The canonical template of names of this one, where a table has it."""
        if self.source.format == "gguf":
            return template
        found = self.family.names.get(template)
        if found is not None:
            self.mapping[template] = found
        return found

    def _put(self, place: _Place, numbers: tuple[int, ...], tensor: SourceTensor) -> bool:
        """Put the tensor where it belongs; False if there is no such place."""
        if not place.is_layered:
            name = place.template.format(*numbers)
            taken = self.globals.setdefault(name, tensor)
        elif numbers[0] >= len(self.layers):
            return False
        else:
            layer = self.layers[numbers[0]]
            if place.matrix is None:
                taken = layer.dense.setdefault(place.template.format(*numbers[1:]), tensor)
            elif place.is_single:
                taken = layer.experts.of(place.matrix).setdefault(numbers[1], tensor)
            else:
                taken = layer.experts.stacks.setdefault(place.matrix, tensor)
                if self.source.format == "gguf" and not self.family.has_fused_gguf:
                    self._refuse_fused(place.template, tensor)
        if taken is not tensor:
            raise SourceError("duplicate-tensor", f"{self.source.path}: tensor {tensor.name!r}",
                              f"is another tensor in the place of {taken.name!r}",
                              "each tensor once")  # fmt: skip
        return True

    def _refuse_fused(self, name: str, tensor: SourceTensor) -> None:
        """Forks of llama.cpp differ in the order where llama.cpp itself has no such tensor."""
        if name.startswith("ffn_gate_up_"):
            raise SourceError(
                "unsupported-model",
                f"{tensor.file}: tensor {tensor.name!r}",
                "holds gate and up together, which of them first is not said",
                f"ffn_gate_exps and ffn_up_exps in a GGUF of {self.family.architecture}",
                "convert the model with llama.cpp",
            )

    def _settle_layers(self) -> None:
        """Layers for further tokens are described, but many checkpoints come without them."""
        described = len(self.layers)
        first = described - self.outline.n_extra
        while len(self.layers) > first and not (
            self.layers[-1].dense or self.layers[-1].experts.n_experts
        ):
            self.layers.pop()
        if len(self.layers) < described:
            self.notes.append(
                f"the checkpoint has no tensors of {described - len(self.layers)} layers that "
                "predict further tokens"
            )

    def _n_experts(self) -> int:
        found = max((layer.experts.n_experts for layer in self.layers), default=0)
        said = self.outline.n_experts
        if self.is_auto and not found:
            raise SourceError(
                "unknown-tensors",
                self.source.path,
                "no tensor looks like an expert's: "
                + ", ".join(repr(name) for name in list(self.source.tensors)[:_MAX_LISTED]),
                "experts.N.gate_proj and the like, or stacks of them",
                "say what the model is: its family may be missing here",
            )
        if found > (said or MAX_EXPERTS):
            said = said or MAX_EXPERTS
            raise SourceError("tensor-shape", self.source.path, f"has tensors of {found} experts",
                              f"at most {said}", "fetch the model again")  # fmt: skip
        return said or found

    def _settle_head(self) -> None:
        head = self.globals.get("output.weight")
        embedding = self.globals.get("token_embd.weight")
        if head is None or embedding is None or not self.outline.ties_head:
            return
        if is_same(self.source, head, embedding):
            del self.globals["output.weight"]
            self.dropped.append(head.name)
        else:
            self.outline = replace(self.outline, ties_head=None)
            self.notes.append(
                f"{head.name} differs from {embedding.name} though the configuration ties them: "
                "both are kept"
            )

    def _check_complete(self) -> None:
        """Layers that are alike have the same tensors: what one has, the others must have."""
        if self.is_auto:
            return
        wanted = [*_GLOBALS, *(["output.weight"] if self.outline.ties_head is False else [])]
        missing = [name for name in wanted if name not in self.globals]
        known: dict[tuple[str, bool], set[str]] = defaultdict(set)
        for layer in self.layers:
            for group, names in layer.groups().items():
                known[group] |= names
        for number, layer in enumerate(self.layers):
            required = {"attn_norm.weight"}.union(*(known[group] for group in layer.groups()))
            if layer.has_experts:
                required |= {"ffn_gate_inp.weight"}
                if not layer.experts.n_experts:
                    missing.append(f"blk.{number}.ffn_gate_exps.weight")
            else:
                required |= set(_FFN.values())
            missing += [f"blk.{number}.{name}" for name in sorted(required - layer.dense.keys())]
        if missing:
            raise SourceError("missing-tensor", self.source.path, f"has no {missing[0]!r}",
                              f"{self.family.name} has it, or its other layers have",
                              "fetch the whole model")  # fmt: skip

    def _take_ffn(self, number: int, layer: _Layer) -> ExpertTable:
        """The one block of a dense model's layer."""
        parts = LayerExperts()
        for role, name in _FFN.items():
            parts.singles[role.name.lower(), "weight"] = {0: layer.dense.pop(name)}
            bias = layer.dense.pop(name.replace("weight", "bias"), None)
            if bias is not None:
                parts.singles[role.name.lower(), "bias"] = {0: bias}
        where = f"{self.source.path}: layer {number}"
        return take_experts(where, parts, self._shape(1), self.weights)

    def _shape(self, n_experts: int) -> ExpertShape:
        hidden = self.outline.hidden_size
        if self.source.format == "gguf":
            # llama.cpp knows one order: outputs before inputs, gate's rows before up's.
            return ExpertShape(n_experts, hidden, Fused.HALVES, False)
        return ExpertShape(n_experts, hidden, self.family.fused, self.family.is_turned)

    def _weights(self, name: str, layer: int | None, tensor: SourceTensor) -> list[DenseWeight]:
        if DTYPES.get(tensor.dtype.name) is not tensor.dtype or 0 in tensor.shape:
            raise SourceError(
                "unsupported-dtype",
                f"{tensor.file}: tensor {tensor.name!r}",
                f"is {tensor.dtype.name} of shape {tensor.shape}",
                f"one of {', '.join(DTYPES)} with elements in it",
            )
        if name.endswith(_FUSED_SHARED) and len(tensor.shape) == 2 and tensor.shape[0] % 2 == 0:
            # Granite's shared expert: gate's rows first. GGUF has two tensors.
            half = tensor.shape[0] // 2
            return [
                DenseWeight(
                    name.replace(_FUSED_SHARED, own), layer, self.weights.rows(tensor, 0, at, half)
                )
                for own, at in ((_GATE_SHARED, 0), (_UP_SHARED, half))
            ]
        found = [DenseWeight(name, layer, self.weights.whole(tensor))]
        if self.weights.has_scale(tensor) and self.weights.keeps_scales:
            scales = self.weights.scales(tensor, 0, 0, tensor.shape[-2])
            if scales is not None:
                found.append(DenseWeight(name + SCALE_SUFFIX, layer, scales))
        return found

    def _notes(self) -> list[str]:
        notes = [
            f"{self.family.name}: repacked only. Engines of this version do not run it, so the "
            "file describes no model (no model.json)"
        ]
        if self.left_out:
            prefixes = dict.fromkeys(
                next(p for p in self.family.left_out if name.startswith(p))
                for name in self.left_out
            )
            notes.append(
                f"left out, no part of the text model: {len(self.left_out)} tensors under "
                + ", ".join(f"{prefix}*" for prefix in prefixes)
            )
        if self.is_auto:
            notes += [f"mapped {old} -> {new}" for old, new in self.mapping.items()]
        return notes + self.notes
