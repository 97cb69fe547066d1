"""Random Qwen3-MoE and dense models written straight to `.colibri`, of any size.

Every weight matrix is Q8_0 with small finite scales, so that logits stay finite however many
layers there are. The tokenizer knows single bytes only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from colibri_format import (
    DTYPES,
    MODEL_FILE,
    FileSpec,
    Layout,
    ModelSpec,
    MoeSpec,
    Role,
    RopeSpec,
    SegmentSpec,
    TensorSpec,
    Writer,
    plan_layout,
)

F16, F32, Q8 = DTYPES["f16"], DTYPES["f32"], DTYPES["q8_0"]


def byte_tokenizer() -> bytes:
    """A `tokenizer.json` whose tokens are the 256 bytes, as GPT-2 writes them, and `<eos>`."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in kept]
    characters = {byte: chr(byte) for byte in kept}
    characters |= {byte: chr(256 + n) for n, byte in enumerate(other)}
    vocab = {characters[byte]: byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    record = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256,
                "content": "<eos>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    return json.dumps(record).encode()


def random_q8_0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Q8_0 rows as bytes: a half-precision scale, then 32 signed bytes, for each quant block."""
    data = np.empty((rows * columns // 32, 34), np.uint8)
    data[:, 2:] = rng.integers(0, 256, (len(data), 32), dtype=np.uint8)
    # int8 values have a spread of 74: so weights have one of 1 / sqrt(columns).
    scales = np.full(len(data), 1 / (74 * np.sqrt(columns)), np.float16)
    data[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(-1)


def make_model(
    *,
    n_layers: int,
    hidden: int,
    width: int,
    n_experts: int = 0,
    top_k: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    context_length: int = 512,
) -> ModelSpec:
    """A Qwen3 model, of experts or dense with `n_experts` 0, that never ends a text by itself."""
    moe = None
    if n_experts:
        moe = MoeSpec(n_experts=n_experts, top_k=top_k, expert_size=width, norm_top_k=True)
    return ModelSpec(
        family="qwen3moe" if moe else "qwen3",
        n_layers=n_layers,
        hidden_size=hidden,
        vocab_size=257,
        context_length=context_length,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=10000.0, n_dims=head_dim),
        ffn_size=0 if moe else width,
        qk_norm="head",
        tie_embeddings=True,
        moe=moe,
    )


def write_random_colibri(
    path: Path,
    model: ModelSpec,
    seed: int = 0,
    files: dict[str, bytes | None] | None = None,
    *,
    is_mixed: bool = False,
    volume_folders: Sequence[Path] = (),
) -> None:
    """Writes `model` with random weights; experts differ in where they read one random run.

    `files` replaces embedded files by name or, with None, leaves them out. `is_mixed` stores the
    down matrix of every third expert of every second layer as F16. Blocks are striped over volumes
    in `volume_folders`.
    """
    rng = np.random.default_rng(seed)
    hidden, width = model.hidden_size, model.moe.expert_size if model.moe else model.ffn_size
    n_experts = model.moe.n_experts if model.moe else 1
    layout = Layout.of(
        (
            SegmentSpec(Role.GATE, Q8, (width, hidden)),
            SegmentSpec(Role.UP, Q8, (width, hidden)),
            SegmentSpec(Role.DOWN, Q8, (hidden, width)),
        )
    )
    wide = Layout.of(
        (
            SegmentSpec(Role.GATE, Q8, (width, hidden)),
            SegmentSpec(Role.UP, Q8, (width, hidden)),
            SegmentSpec(Role.DOWN, F16, (hidden, width)),
        )
    )
    layouts = [
        [wide if expert % 3 == 1 else layout for expert in range(n_experts)]
        if is_mixed and layer % 2
        else layout
        for layer in range(model.n_layers)
    ]
    tensors = [
        TensorSpec("token_embd.weight", Q8, (model.vocab_size, hidden)),
        TensorSpec("output_norm.weight", F32, (hidden,)),
    ]
    if not model.tie_embeddings:
        tensors.append(TensorSpec("output.weight", Q8, (model.vocab_size, hidden)))
    n_query, n_key = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    for layer in range(model.n_layers):
        shapes = {
            "attn_norm": (hidden,),
            "attn_q": (n_query, hidden),
            "attn_k": (n_key, hidden),
            "attn_v": (n_key, hidden),
            "attn_output": (hidden, n_query),
            "attn_q_norm": (model.head_dim,),
            "attn_k_norm": (model.head_dim,),
            "ffn_norm": (hidden,),
        }
        if model.moe:
            shapes["ffn_gate_inp"] = (n_experts, hidden)
        for name, shape in shapes.items():
            kind = F32 if len(shape) == 1 or name == "ffn_gate_inp" else Q8
            tensors.append(TensorSpec(f"blk.{layer}.{name}.weight", kind, shape, layer))
    embedded = {MODEL_FILE: model.to_bytes(), "tokenizer.json": byte_tokenizer()}
    for name, data in (files or {}).items():
        embedded.pop(name)
        if data is not None:
            embedded[name] = data
    plan = plan_layout(
        n_layers=model.n_layers,
        n_experts=n_experts,
        layer_layouts=layouts,
        tensors=tensors,
        files=[FileSpec(name, len(data)) for name, data in embedded.items()],
        volumes=[f"volume {n}" for n in range(len(volume_folders))],
    )
    up = random_q8_0(rng, 2 * width, hidden)
    down = random_q8_0(rng, 2 * hidden, width)
    halves = (rng.standard_normal(2 * hidden * width) / np.sqrt(width)).astype(np.float16)
    with Writer(path, plan, volume_folders=volume_folders) as writer:
        for name, data in embedded.items():
            writer.write_file(name, data)
        for spec in tensors:
            with writer.tensor(spec.name) as sink:
                if spec.dtype is Q8:
                    sink.write(random_q8_0(rng, *spec.shape))
                elif len(spec.shape) == 1:
                    sink.write(np.ones(spec.shape, np.float32).view(np.uint8))
                else:
                    router = rng.standard_normal(spec.shape).astype(np.float32)
                    sink.write(router.view(np.uint8).reshape(-1))
        for layer in range(model.n_layers):
            for expert in range(n_experts):
                with writer.block(layer, expert) as sink:
                    own = layouts[layer]
                    for segment in (own if own is layout else own[expert]).segments:
                        if segment.dtype is F16:
                            first = int(rng.integers(0, hidden * width + 1))
                            sink.write(halves[first : first + segment.size // 2].view(np.uint8))
                            continue
                        run = down if segment.role is Role.DOWN else up
                        start = int(rng.integers(0, (len(run) - segment.size) // 34 + 1)) * 34
                        sink.write(run[start : start + segment.size])
