"""How much memory a decoder needs beside weights, experts and KV cache: for the budget."""

from __future__ import annotations

from typing import Final

from colibri_format import ModelSpec

from .attention import attention_bytes
from .backend import Backend

# Workspace of a backend holds for rows of usual length; one longer row may need its own size
# several times over while it is unpacked.
_LONG_ROW_FACTOR: Final = 12
SLACK: Final = 256 * 1024
"""Small arrays, their headers and Python objects alive during a pass."""


def working_bytes(
    model: ModelSpec,
    batch_size: int,
    context: int,
    backend: Backend,
    kv_dtype: str = "float32",
    n_logits: int = 1,
) -> int:
    """Upper bound in bytes of all arrays a `Decoder` with `BackendSteps` holds at once.

    `context` is the number of positions of its KV cache, `n_logits` the most positions whose
    logits are asked for at once (the array handed out counts). Everything is allocated in the
    course of a pass and freed again; peak and bound are compared in the tests.
    """
    plain = plain_working_bytes(model, batch_size, context, kv_dtype, n_logits)
    return plain + backend.workspace_bytes


def plain_working_bytes(
    model: ModelSpec, batch_size: int, context: int, kv_dtype: str, n_logits: int
) -> int:
    """`working_bytes` without the backend's own workspace."""
    hidden, top_k = model.hidden_size, model.moe.top_k if model.moe else 1
    n_query, n_key = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    sizes = [model.ffn_size]
    n_experts = 1
    if (moe := model.moe) is not None:
        sizes += [moe.expert_size, moe.shared_size]
        n_experts = moe.n_experts
    row = max(hidden, n_query, *sizes)

    stream = 4 * batch_size * hidden
    attention = 4 * batch_size * (3 * n_query + 4 * n_key) + attention_bytes(
        batch_size,
        context,
        model.n_heads,
        model.n_kv_heads,
        model.head_dim,
        4 if kv_dtype == "float32" else 2,
    )
    # Gate and up at once, then up with the output, beside the gathered group of tokens.
    network = 4 * batch_size * (2 * max(sizes) + 2 * hidden)
    routing = 8 * batch_size * n_experts * 4 + 4 * batch_size * hidden
    experts = 4 * batch_size * top_k * (hidden + 8) * 2
    head = 4 * model.vocab_size * min(n_logits, batch_size)
    result = 4 * model.vocab_size * n_logits
    workspace = _LONG_ROW_FACTOR * 4 * row
    largest = max(attention, network + routing + experts, head)
    # The stream itself, its norm, and the norm's temporaries.
    return result + 4 * stream + largest + workspace + SLACK
