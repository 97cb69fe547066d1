"""A model held in memory that a decoder can load: a file's facts, and a store that shuffles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_format import (
    DTYPES,
    INDEX_DTYPE,
    DType,
    Layout,
    ModelSpec,
    MoeSpec,
    Role,
    RopeSpec,
    SegmentSpec,
)
from colibri_runtime.backend import Backend
from colibri_runtime.decoder import Decoder, RoutingObserver
from colibri_runtime.kv_cache import KvCache
from colibri_runtime.numpy_backend import NumpyBackend
from colibri_runtime.weights import load_weights

from .random_models import CONFIGS, State, random_state

_ROLES = {
    "gate_proj": Role.GATE, "w1": Role.GATE, "up_proj": Role.UP, "w3": Role.UP,
    "down_proj": Role.DOWN, "w2": Role.DOWN,
}  # fmt: skip
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
_FAMILIES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe"}


@dataclass(frozen=True)
class MemoryTensor:
    """A dense tensor's facts and bytes."""

    dtype: DType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    row_interleave: int = 0

    @property
    def size(self) -> int:
        return self.data.size

    def read(self) -> NDArray[np.uint8]:
        return self.data.copy()

    def read_into(self, buffer: Any) -> None:
        buffer[:] = self.data

    def read_part_into(self, start: int, buffer: Any) -> None:
        buffer[:] = self.data[start : start + len(buffer)]

    def stream(self) -> MemoryStream:
        return MemoryStream(self.data)


class MemoryStream:
    """A tensor's bytes piece by piece."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._left = data

    def read_into(self, buffer: Any) -> None:
        buffer[:] = self._left[: len(buffer)]
        self._left = self._left[len(buffer) :]

    def finish(self) -> None:
        assert not len(self._left)


@dataclass
class MemoryFile:
    """What a reader would say of a file; tests change members to make it wrong."""

    model: ModelSpec
    tensors: dict[str, MemoryTensor]
    layouts: list[Layout | None]
    blocks: dict[tuple[int, int], dict[Role, NDArray[np.uint8]]]
    path: str = "memory.colibri"
    index: NDArray[np.void] = field(default_factory=lambda: np.zeros((0, 0), INDEX_DTYPE))

    def tensor(self, name: str) -> MemoryTensor:
        return self.tensors[name]

    def layout(self, layer: int) -> Layout | None:
        return self.layouts[layer]


class MemoryLease:
    """A copy of a block, aligned as a slot is."""

    def __init__(
        self, layer: int, expert: int, layout: Layout, segments: Mapping[Role, NDArray[np.uint8]]
    ) -> None:
        self.layer, self.expert, self.layout = layer, expert, layout
        held = np.full(layout.block_size + 64, 0xEE, np.uint8)
        self.block = held[-held.ctypes.data % 64 :][: layout.block_size]
        self.address = self.block.ctypes.data
        self.segments = {s.role: self.block[s.offset : s.offset + s.size] for s in layout.segments}
        for role, place in self.segments.items():
            place[:] = segments[role]


class MemoryStore:
    """Gives blocks in a shuffled order out of one slot that it overwrites at every step."""

    def __init__(self, file: MemoryFile, seed: int | None = None) -> None:
        self._file = file
        self._rng = None if seed is None else np.random.default_rng(seed)
        self.calls: list[tuple[str, int, tuple[int, ...]]] = []

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[MemoryLease]:
        self.calls.append(("fetch", layer, tuple(experts)))
        order = list(experts)
        if self._rng is not None:
            self._rng.shuffle(order)
        return self._leases(layer, order)

    def _leases(self, layer: int, order: list[int]) -> Iterator[MemoryLease]:
        for expert in order:
            layout = self._layout(layer, expert)
            lease = MemoryLease(layer, expert, layout, self._file.blocks[layer, expert])
            yield lease
            lease.block[:] = 0xFF

    def _layout(self, layer: int, expert: int) -> Layout:
        layout = self._file.layouts[layer]
        assert layout is not None
        return layout

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        self.calls.append(("prefetch", layer, tuple(experts)))


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The model that a Hugging Face `config` of the random models describes."""
    kind = config["model_type"]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    scaling = config.get("rope_scaling")
    is_moe = "num_experts_per_tok" in config
    moe = None
    if is_moe:
        moe = MoeSpec(
            n_experts=config.get("num_local_experts") or config["num_experts"],
            top_k=config["num_experts_per_tok"],
            expert_size=config.get("moe_intermediate_size", config["intermediate_size"]),
            norm_top_k=config.get("norm_topk_prob", True),
            shared_size=config.get("shared_expert_intermediate_size", 0),
            is_shared_gated=kind == "qwen2_moe",
        )
    has_dense = not is_moe or bool(config.get("mlp_only_layers"))
    return ModelSpec(
        family=_FAMILIES.get(kind, kind),
        n_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        n_heads=heads,
        n_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        rms_norm_eps=config["rms_norm_eps"],
        rope=RopeSpec(
            theta=config["rope_theta"],
            n_dims=head_dim,
            scaling=scaling and {"type": scaling["rope_type"], **_without(scaling, "rope_type")},
        ),
        ffn_size=config["intermediate_size"] if has_dense else 0,
        attention_bias=kind in ("qwen2", "qwen2_moe"),
        qk_norm={"qwen3": "head", "qwen3_moe": "head", "olmoe": "full"}.get(kind, "none"),
        clip_qkv=config.get("clip_qkv"),
        sliding_window=config.get("sliding_window"),
        tie_embeddings=config["tie_word_embeddings"],
        moe=moe,
        bos_token=config["bos_token_id"],
        eos_tokens=(config["eos_token_id"],),
    )


def memory_file(name: str, state: State | None = None) -> MemoryFile:
    """The random model `name` as a file of float32 tensors and blocks."""
    model = model_spec(CONFIGS[name])
    tensors: dict[str, MemoryTensor] = {}
    blocks: dict[tuple[int, int], dict[Role, NDArray[np.uint8]]] = {}
    shapes: dict[int, dict[Role, tuple[int, ...]]] = {}

    def block(layer: int, expert: int, role: Role, values: NDArray[np.float32]) -> None:
        blocks.setdefault((layer, expert), {})[role] = values.view(np.uint8).reshape(-1)
        shapes.setdefault(layer, {})[role] = values.shape

    def tensor(name: str, values: NDArray[np.float32]) -> None:
        raw = values.view(np.uint8).reshape(-1)
        tensors[name] = MemoryTensor(DTYPES["f32"], values.shape, raw)

    for hf_name, values in (state or random_state(name)).items():
        if (found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", hf_name)) is None:
            names = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }
            tensor(names[hf_name], values)
            continue
        layer, rest = int(found[1]), found[2]
        if part := re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", rest):
            block(layer, int(part[1]), _ROLES[part[2]], values)
        elif part := re.fullmatch(r"mlp\.(gate|up|down)_proj\.weight", rest):
            if model.moe is None:
                block(layer, 0, _ROLES[f"{part[1]}_proj"], values)
            else:
                tensor(f"blk.{layer}.ffn_{part[1]}.weight", values)
        elif part := re.fullmatch(r"mlp\.shared_expert\.(gate|up|down)_proj\.weight", rest):
            tensor(f"blk.{layer}.ffn_{part[1]}_shexp.weight", values)
        elif part := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", rest):
            tensor(f"blk.{layer}.attn_{part[1]}.{part[2]}", values)
        else:
            tensor(f"blk.{layer}.{_NAMES[rest]}", values)
    layouts = [
        Layout.of(tuple(SegmentSpec(r, DTYPES["f32"], s) for r, s in shapes[layer].items()))
        if layer in shapes
        else None
        for layer in range(model.n_layers)
    ]
    index = np.zeros((model.n_layers, model.moe.n_experts if model.moe else 1), INDEX_DTYPE)
    for layer, expert in blocks:
        layout = layouts[layer]
        index["size"][layer, expert] = layout.block_size if layout else 0
    return MemoryFile(model, tensors, layouts, blocks, index=index)


def memory_decoder(
    file: MemoryFile,
    *,
    seed: int | None = None,
    store: Any = None,
    backend: Backend | None = None,
    context: int = 64,
    kv_dtype: str = "float32",
    prefetch_depth: int = 1,
    batch_size: int = 32,
    observer: RoutingObserver | None = None,
) -> Decoder:
    """A decoder of `file` whose experts arrive in an order drawn from `seed`."""
    backend = backend or NumpyBackend()
    return Decoder(
        file.model,
        load_weights(file, file.model, backend),
        store or MemoryStore(file, seed),
        backend,
        KvCache(file.model, context, kv_dtype),
        prefetch_depth,
        batch_size=batch_size,
        observer=observer,
    )


def _without(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}
