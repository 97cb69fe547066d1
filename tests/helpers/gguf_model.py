"""A GGUF of the families used in tests as a file in memory, without the repacker's help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from colibri_format import (
    DTYPES_BY_GGML_ID,
    INDEX_DTYPE,
    Layout,
    ModelSpec,
    MoeSpec,
    Role,
    RopeSpec,
    SegmentSpec,
)

from .memory_model import MemoryFile, MemoryTensor

_PARTS = {"gate": Role.GATE, "up": Role.UP, "down": Role.DOWN}


class GgufTextFile:
    """Embedded files of a GGUF: its key-values as the repacker writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = {
            key: field.contents()
            for key, field in GGUFReader(path).fields.items()
            if not key.startswith("GGUF.")
        }
        self.keys: dict[str, Any] = fields
        kv = [[key, "any", value] for key, value in fields.items()]
        self.files = {"gguf.json": json.dumps({"version": 3, "alignment": 32, "kv": kv}).encode()}

    def read_file(self, name: str) -> bytes:
        return self.files[name]


def gguf_model(path: Path) -> MemoryFile:
    """Tensors and blocks of a `qwen3moe` or `llama` GGUF in its own encodings."""
    keys = GgufTextFile(path).keys
    family = keys["general.architecture"]
    heads, hidden = keys[f"{family}.attention.head_count"], keys[f"{family}.embedding_length"]
    n_experts = keys.get(f"{family}.expert_count", 0)
    head_dim = keys.get(f"{family}.attention.key_length", hidden // heads)
    n_layers = keys[f"{family}.block_count"]
    tensors: dict[str, MemoryTensor] = {}
    blocks: dict[tuple[int, int], dict[Role, NDArray[np.uint8]]] = {}
    specs: dict[int, dict[Role, SegmentSpec]] = {}
    for tensor in GGUFReader(path).tensors:
        dtype = DTYPES_BY_GGML_ID[int(tensor.tensor_type)]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        data = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        name = tensor.name.split(".")
        role = _PARTS.get(name[2].removeprefix("ffn_").removesuffix("_exps")) if name[2:] else None
        if role is None or not name[2].startswith("ffn_"):
            tensors[tensor.name] = MemoryTensor(dtype, shape, data)
            continue
        layer = int(name[1])
        matrices = data.reshape(max(n_experts, 1), -1)
        specs.setdefault(layer, {})[role] = SegmentSpec(role, dtype, shape[-2:])
        for expert, matrix in enumerate(matrices):
            blocks.setdefault((layer, expert), {})[role] = matrix
    layouts: list[Layout | None] = [Layout.of(tuple(specs[n].values())) for n in range(n_layers)]
    model = ModelSpec(
        family=family,
        n_layers=n_layers,
        hidden_size=hidden,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=keys[f"{family}.context_length"],
        n_heads=heads,
        n_kv_heads=keys[f"{family}.attention.head_count_kv"],
        head_dim=head_dim,
        rms_norm_eps=keys[f"{family}.attention.layer_norm_rms_epsilon"],
        rope=RopeSpec(
            theta=keys[f"{family}.rope.freq_base"],
            n_dims=head_dim,
            # llama.cpp's converter reorders the rows of llama's q and k for this style.
            style="interleaved" if family == "llama" else "half",
        ),
        ffn_size=keys[f"{family}.feed_forward_length"],
        qk_norm="head" if family == "qwen3moe" else "none",
        tie_embeddings="output.weight" not in tensors,
        moe=MoeSpec(
            n_experts=n_experts,
            top_k=keys[f"{family}.expert_used_count"],
            expert_size=keys[f"{family}.expert_feed_forward_length"],
            norm_top_k=True,
        )
        if n_experts
        else None,
        bos_token=keys["tokenizer.ggml.bos_token_id"],
        eos_tokens=(keys["tokenizer.ggml.eos_token_id"],),
    )
    index = np.zeros((n_layers, max(n_experts, 1)), INDEX_DTYPE)
    for layer, expert in blocks:
        index["size"][layer, expert] = 1
    return MemoryFile(model, tensors, layouts, blocks, path=str(path), index=index)
