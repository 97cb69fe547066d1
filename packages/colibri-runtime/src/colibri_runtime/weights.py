"""The dense weights of a model: what must be there, what it costs, and loading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType, Layout, ModelSpec, Role

from .backend import Backend, FeedForward, Floats, Matrix
from .decoder_errors import ModelError
from .dequant import check_decodable, dequantise
from .row_table import FileTable, ResidentTable, RowTable, StoredTensor

EMBEDDING: Final = "token_embd.weight"

_ALIGNMENT: Final = 64
_MATRIX_ROLES: Final = (Role.GATE, Role.UP, Role.DOWN)
_BIAS_ROLES: Final = (Role.GATE_BIAS, Role.UP_BIAS, Role.DOWN_BIAS)


class TensorFacts(Protocol):
    """What is known of a dense tensor before it is read."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def row_interleave(self) -> int: ...
    @property
    def size(self) -> int: ...


class TensorData(StoredTensor, Protocol):
    """A dense tensor that can be read; whole, it is checked against its checksum."""

    def read(self) -> NDArray[np.uint8]: ...
    def read_into(self, buffer: Any) -> object: ...


class ModelFile(Protocol):
    """The part of `colibri_format`'s reader that loading needs."""

    @property
    def path(self) -> object: ...
    @property
    def tensors(self) -> Mapping[str, TensorFacts]: ...
    @property
    def index(self) -> NDArray[np.void]: ...
    def tensor(self, name: str) -> TensorData: ...
    def layout(self, layer: int) -> Layout | None: ...


Layouts = Sequence[tuple[Layout, ...]]
"""The distinct layouts of each layer's blocks; none where a layer has no experts."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A tensor that a model has: name, shape, whether it is kept as float32 numbers."""

    name: str
    shape: tuple[int, ...]
    is_vector: bool = False
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Dense weights of one layer, and the layouts that its expert blocks have (none: no experts).

    Shapes as in `required_tensors`; vectors are float32. `dense` is the feed-forward network of
    a layer whose own is no block; `shared` the one that every token passes beside its experts.
    """

    attn_norm: Floats
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    query_bias: Floats | None
    key_bias: Floats | None
    value_bias: Floats | None
    output_bias: Floats | None
    query_norm: Floats | None
    key_norm: Floats | None
    ffn_norm: Floats
    layouts: tuple[Layout, ...]
    router: Matrix | None
    shared: FeedForward | None
    shared_gate: Floats | None
    dense: FeedForward | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All dense weights, in stored form; they live in one allocation of `size_bytes`."""

    where: str
    embedding: RowTable
    output_norm: Floats
    head: Matrix
    rope_divisors: Floats | None
    layers: tuple[LayerWeights, ...]
    size_bytes: int


def required_tensors(model: ModelSpec, layouts: Layouts) -> list[Requirement]:
    """Every dense tensor that `model` has, optional ones included, in order of layers."""
    hidden, head_dim = model.hidden_size, model.head_dim
    n_query, n_key = model.n_heads * head_dim, model.n_kv_heads * head_dim
    found = [
        Requirement(EMBEDDING, (model.vocab_size, hidden)),
        Requirement("output_norm.weight", (hidden,), is_vector=True),
        Requirement("rope_freqs.weight", (model.rope.n_dims // 2,), True, is_optional=True),
    ]
    if not model.tie_embeddings:
        found.append(Requirement("output.weight", (model.vocab_size, hidden)))
    for layer in range(model.n_layers):
        found.extend(_layer_tensors(model, f"blk.{layer}", bool(layouts[layer]), n_query, n_key))
    return found


def _layer_tensors(
    model: ModelSpec, prefix: str, has_experts: bool, n_query: int, n_key: int
) -> Iterator[Requirement]:
    hidden, moe = model.hidden_size, model.moe

    def vector(name: str, size: int, is_optional: bool = False) -> Requirement:
        return Requirement(f"{prefix}.{name}", (size,), True, is_optional)

    def matrix(name: str, rows: int, columns: int) -> Requirement:
        return Requirement(f"{prefix}.{name}.weight", (rows, columns))

    yield vector("attn_norm.weight", hidden)
    yield matrix("attn_q", n_query, hidden)
    yield matrix("attn_k", n_key, hidden)
    yield matrix("attn_v", n_key, hidden)
    yield matrix("attn_output", hidden, n_query)
    if model.attention_bias:
        yield vector("attn_q.bias", n_query)
        yield vector("attn_k.bias", n_key)
        yield vector("attn_v.bias", n_key)
        yield vector("attn_output.bias", hidden, is_optional=True)
    if model.qk_norm != "none":
        is_full = model.qk_norm == "full"
        yield vector("attn_q_norm.weight", n_query if is_full else model.head_dim)
        yield vector("attn_k_norm.weight", n_key if is_full else model.head_dim)
    yield vector("ffn_norm.weight", hidden)
    if not has_experts:
        yield matrix("ffn_gate", model.ffn_size, hidden)
        yield matrix("ffn_up", model.ffn_size, hidden)
        yield matrix("ffn_down", hidden, model.ffn_size)
    elif moe is not None:
        yield matrix("ffn_gate_inp", moe.n_experts, hidden)
        if moe.shared_size:
            yield matrix("ffn_gate_shexp", moe.shared_size, hidden)
            yield matrix("ffn_up_shexp", moe.shared_size, hidden)
            yield matrix("ffn_down_shexp", hidden, moe.shared_size)
            if moe.is_shared_gated:
                yield vector("ffn_gate_inp_shexp.weight", hidden)


def resident_bytes(tensors: Mapping[str, TensorFacts], model: ModelSpec, layouts: Layouts) -> int:
    """Bytes that `load_weights` keeps: stored form for matrices, float32 for vectors.

    Embeddings that are not the head as well stay in the file.
    """
    return _ALIGNMENT + sum(
        _kept_bytes(requirement, tensors[requirement.name])
        for requirement in required_tensors(model, layouts)
        if requirement.name in tensors
        and not _stays_in_file(requirement.name, tensors[requirement.name], model)
    )


def check_weights(file: ModelFile, model: ModelSpec, backend: Backend) -> Layouts:
    """The layouts of each layer, when `file` has all that `model` needs in the shapes it needs.

    Reads no tensor and allocates nothing.

    Raises:
        ModelError: `missing-tensor`, `tensor-shape`, `unexpected-tensor`, `unsupported-dtype`,
            `missing-segment`, `segment-shape`, `unsupported-segment`, `missing-expert`,
            `layer-count`, naming file, tensor or segment, what was found and what is required.
    """
    where = str(file.path)
    n_layers, n_experts = file.index.shape
    if n_layers != model.n_layers:
        raise _error(
            "layer-count", where, f"has {n_layers} layers", f"the model's {model.n_layers}"
        )
    layouts = [_layouts_of(file, layer) for layer in range(model.n_layers)]
    for layer, found in enumerate(layouts):
        for layout in found:
            _check_layout(where, layer, layout, model, backend)
        if found:
            wanted = model.moe.n_experts if model.moe else 1
            present = file.index["size"][layer, :wanted] > 0
            if n_experts < wanted or not present.all():
                absent = int(np.argmin(present)) if len(present) == wanted else n_experts
                raise _error(
                    "missing-expert",
                    f"{where}: L{layer}/E{absent}",
                    "the layer has no such expert",
                    f"all of {wanted} experts that its router may choose",
                )
    known = set()
    for requirement in required_tensors(model, layouts):
        known.add(requirement.name)
        _check_tensor(where, requirement, file.tensors.get(requirement.name), backend)
    for name in file.tensors:
        if name not in known:
            raise _error(
                "unexpected-tensor",
                where,
                f"tensor {name!r} has no place in a {model.family} model as {where} describes it",
                "only tensors that the decoder uses: leaving one out would give other text",
            )
    return layouts


def load_weights(file: ModelFile, model: ModelSpec, backend: Backend) -> Weights:
    """The dense weights of `file`, read into one allocation and checked against checksums.

    Raises:
        ModelError: as `check_weights`, before anything is allocated.
        FormatError: `tensor-checksum`.
        StorageError: what the kernel refused.
    """
    layouts = check_weights(file, model, backend)
    size = resident_bytes(file.tensors, model, layouts)
    arena = np.empty(size, np.uint8)
    position = -arena.ctypes.data % _ALIGNMENT
    vectors: dict[str, Floats] = {}
    matrices: dict[str, Matrix] = {}
    for requirement in required_tensors(model, layouts):
        name = requirement.name
        facts = file.tensors.get(name)
        if facts is None or _stays_in_file(name, facts, model):
            continue
        if requirement.is_vector:
            n_values = requirement.shape[0]
            values = arena[position : position + 4 * n_values].view(np.float32)
            raw = file.tensor(name).read()
            dequantise(raw.reshape(1, -1), facts.dtype, values.reshape(1, -1), name)
            vectors[name] = values
        else:
            data = arena[position : position + facts.size]
            file.tensor(name).read_into(data)
            data.flags.writeable = False
            shape = (requirement.shape[0], requirement.shape[1])
            matrices[name] = Matrix(name, facts.dtype, shape, data, facts.row_interleave)
        position += _kept_bytes(requirement, facts)
    embedding: RowTable
    if model.tie_embeddings:
        head = matrices[EMBEDDING]
        embedding = ResidentTable(head)
    else:
        head = matrices["output.weight"]
        resident = matrices.get(EMBEDDING)
        embedding = (
            FileTable(EMBEDDING, file.tensor(EMBEDDING))
            if resident is None
            else ResidentTable(resident)
        )
    return Weights(
        where=str(file.path),
        embedding=embedding,
        output_norm=vectors["output_norm.weight"],
        head=head,
        rope_divisors=vectors.get("rope_freqs.weight"),
        layers=tuple(
            _layer_weights(f"blk.{layer}", found, vectors, matrices)
            for layer, found in enumerate(layouts)
        ),
        size_bytes=size,
    )


def _layer_weights(
    prefix: str,
    layouts: tuple[Layout, ...],
    vectors: dict[str, Floats],
    matrices: dict[str, Matrix],
) -> LayerWeights:
    def network(suffix: str) -> FeedForward | None:
        names = [f"{prefix}.ffn_{part}{suffix}.weight" for part in ("gate", "up", "down")]
        if names[0] not in matrices:
            return None
        gate, up, down = (matrices[name] for name in names)
        return FeedForward(gate, up, down)

    return LayerWeights(
        attn_norm=vectors[f"{prefix}.attn_norm.weight"],
        query=matrices[f"{prefix}.attn_q.weight"],
        key=matrices[f"{prefix}.attn_k.weight"],
        value=matrices[f"{prefix}.attn_v.weight"],
        output=matrices[f"{prefix}.attn_output.weight"],
        query_bias=vectors.get(f"{prefix}.attn_q.bias"),
        key_bias=vectors.get(f"{prefix}.attn_k.bias"),
        value_bias=vectors.get(f"{prefix}.attn_v.bias"),
        output_bias=vectors.get(f"{prefix}.attn_output.bias"),
        query_norm=vectors.get(f"{prefix}.attn_q_norm.weight"),
        key_norm=vectors.get(f"{prefix}.attn_k_norm.weight"),
        ffn_norm=vectors[f"{prefix}.ffn_norm.weight"],
        layouts=layouts,
        router=matrices.get(f"{prefix}.ffn_gate_inp.weight"),
        shared=network("_shexp"),
        shared_gate=vectors.get(f"{prefix}.ffn_gate_inp_shexp.weight"),
        dense=network(""),
    )


def _layouts_of(file: ModelFile, layer: int) -> tuple[Layout, ...]:
    is_mixed = getattr(file, "is_mixed", None)
    if is_mixed is None or not is_mixed(layer):
        layout = file.layout(layer)
        return () if layout is None else (layout,)
    # Only a file whose layers may be mixed has the number of each expert's layout.
    numbers = file.expert_layouts[layer][file.index["size"][layer] > 0]  # type: ignore[attr-defined]
    return tuple(file.layouts[number] for number in sorted(set(numbers.tolist())))  # type: ignore[attr-defined]


def _stays_in_file(name: str, facts: TensorFacts, model: ModelSpec) -> bool:
    """Whether the tensor is read row by row: embeddings that are not the head as well."""
    return name == EMBEDDING and not model.tie_embeddings and not facts.row_interleave


def _kept_bytes(requirement: Requirement, facts: TensorFacts) -> int:
    size = 4 * requirement.shape[0] if requirement.is_vector else facts.size
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_tensor(
    where: str, requirement: Requirement, facts: TensorFacts | None, backend: Backend
) -> None:
    name = requirement.name
    if facts is None:
        if requirement.is_optional:
            return
        raise _error(
            "missing-tensor",
            where,
            f"has no tensor {name!r}",
            f"one of shape {requirement.shape}",
        )
    shape = facts.shape
    if requirement.is_vector and len(shape) == 2 and shape[0] == 1:
        shape = shape[1:]
    if shape != requirement.shape:
        raise _error(
            "tensor-shape",
            where,
            f"tensor {name!r} has shape {facts.shape}",
            f"shape {requirement.shape}",
        )
    if requirement.is_vector:
        check_decodable(facts.dtype, where, name)
    else:
        backend.check(name, facts.dtype, where)


def _check_layout(
    where: str, layer: int, layout: Layout, model: ModelSpec, backend: Backend
) -> None:
    width = model.moe.expert_size if model.moe else model.ffn_size
    hidden = model.hidden_size
    required = {
        Role.GATE: (width, hidden),
        Role.GATE_BIAS: (width,),
        Role.UP: (width, hidden),
        Role.UP_BIAS: (width,),
        Role.DOWN: (hidden, width),
        Role.DOWN_BIAS: (hidden,),
    }
    for role in _MATRIX_ROLES:
        if layout.segment(role) is None:
            raise _error(
                "missing-segment",
                f"{where}: layer {layer}",
                f"its blocks have no segment {role.name.lower()}",
                "gate, up and down",
            )
    for segment in layout.segments:
        name = f"L{layer} {segment.role.name.lower()}"
        if segment.role not in required:
            raise _error(
                "unsupported-segment",
                f"{where}: layer {layer}",
                f"its blocks have a segment {segment.role.name.lower()}",
                "gate, up, down and their biases",
            )
        if segment.shape != required[segment.role]:
            raise _error(
                "segment-shape",
                f"{where}: layer {layer}",
                f"segment {segment.role.name.lower()} has shape {segment.shape}",
                f"shape {required[segment.role]}",
            )
        if segment.role in _BIAS_ROLES:
            check_decodable(segment.dtype, where, name)
        else:
            backend.check(name, segment.dtype, where)


def _error(code: str, where: str, found: str, required: str) -> ModelError:
    return ModelError(code, where, found, required, "repack the source again")
