"""A small Qwen3-MoE GGUF whose matrices are random bytes of any ggml type."""

from __future__ import annotations

from collections.abc import Iterator

from colibri_format import DTYPES, DType
from helpers import gguf_builder as g
from helpers.quant_bytes import random_rows

HIDDEN, WIDTH, VOCAB, N_EXPERTS, N_LAYERS = 256, 512, 64, 3, 2


def tensors(*, tied: bool = False, vocab: int = VOCAB) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, those of one dimension and the router being F32."""
    yield "token_embd.weight", (vocab, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    if not tied:
        yield "output.weight", (vocab, HIDDEN)
    for layer in range(N_LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (256, HIDDEN),
            "attn_k": (128, HIDDEN),
            "attn_v": (128, HIDDEN),
            "attn_q_norm": (64,),
            "attn_k_norm": (64,),
            "attn_output": (HIDDEN, 256),
            "ffn_norm": (HIDDEN,),
            "ffn_gate_inp": (N_EXPERTS, HIDDEN),
            "ffn_gate_exps": (N_EXPERTS, WIDTH, HIDDEN),
            "ffn_up_exps": (N_EXPERTS, WIDTH, HIDDEN),
            "ffn_down_exps": (N_EXPERTS, HIDDEN, WIDTH),
        }.items():
            yield f"blk.{layer}.{name}.weight", shape


def describe(builder: g.GgufBuilder, vocab: int = VOCAB) -> g.GgufBuilder:
    """Adds the key-values that repacking needs."""
    builder.add("general.architecture", g.STRING, "qwen3moe")
    for key, number in {
        "block_count": N_LAYERS,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDTH,
        "expert_feed_forward_length": WIDTH,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "expert_count": N_EXPERTS,
        "expert_used_count": 2,
    }.items():
        builder.add(f"qwen3moe.{key}", g.U32, number)
    builder.add("qwen3moe.attention.layer_norm_rms_epsilon", g.F32, 1e-6)
    tokens = [f"token{n}" for n in range(vocab)]
    return builder.add("tokenizer.ggml.tokens", g.ARRAY, (g.STRING, tokens))


def quant_model(dtype: DType, *, tied: bool = False, vocab: int = VOCAB) -> g.GgufBuilder:
    """The whole model; matrices are of `dtype`."""
    builder = describe(g.GgufBuilder(), vocab)
    for seed, (name, shape) in enumerate(tensors(tied=tied, vocab=vocab)):
        is_plain = len(shape) == 1 or "ffn_gate_inp" in name
        kind = DTYPES["f32"] if is_plain else dtype
        n_rows = 1
        for length in shape[:-1]:
            n_rows *= length
        assert kind.ggml_id is not None
        data = random_rows(kind, n_rows, shape[-1], seed).tobytes()
        builder.tensor(name, shape, kind.ggml_id, data)
    return builder
