"""The tensors of a model by their canonical names: which there must be, of which shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from colibri_format import ModelSpec

from .family import Family

# Matrices that may be quantised; router, norms, biases and the shared expert's gate may not:
# they are small, and their errors reach every later number.
_MATRICES: Final = frozenset(
    {
        "token_embd.weight",
        "output.weight",
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_output.weight",
        "ffn_gate.weight",
        "ffn_up.weight",
        "ffn_down.weight",
        "ffn_gate_shexp.weight",
        "ffn_up_shexp.weight",
        "ffn_down_shexp.weight",
        "attn_q_a.weight",
        "attn_q_b.weight",
        "attn_kv_a_mqa.weight",
        "attn_kv_b.weight",
        "attn_k_b.weight",
        "attn_v_b.weight",
        "attn_qkv.weight",
        "attn_gate.weight",
        "ssm_in.weight",
        "ssm_out.weight",
        "nextn.eh_proj.weight",
        "nextn.embed_tokens.weight",
        "nextn.shared_head_head.weight",
    }
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A dense tensor that a model needs; `shapes` are those it may have, in C order."""

    name: str
    layer: int | None
    shapes: tuple[tuple[int, ...], ...]


def is_matrix(name: str) -> bool:
    """Whether the dense tensor `name` is a matrix that quantising may touch."""
    return name.split(".", 2)[-1] in _MATRICES if name.startswith("blk.") else name in _MATRICES


def wanted_globals(model: ModelSpec) -> Iterator[Wanted]:
    """The tensors of no layer, in the file's order; the head also where it may be tied."""
    embedding = (model.vocab_size, model.hidden_size)
    yield Wanted("token_embd.weight", None, (embedding,))
    yield Wanted("output_norm.weight", None, ((model.hidden_size,),))
    yield Wanted("output.weight", None, (embedding,))


def wanted_in_layer(
    model: ModelSpec, family: Family, layer: int, is_moe: bool, has_output_bias: bool
) -> Iterator[Wanted]:
    """The dense tensors of `layer`, in the file's order.

    `is_moe` is whether this layer routes to experts. A dense model's feed-forward network is a
    block and not among these.
    """
    hidden = model.hidden_size
    q_rows = model.n_heads * model.head_dim
    kv_rows = model.n_kv_heads * model.head_dim

    def want(name: str, *shapes: tuple[int, ...]) -> Wanted:
        return Wanted(f"blk.{layer}.{name}", layer, shapes)

    yield want("attn_norm.weight", (hidden,))
    for name, rows in (("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows)):
        yield want(f"{name}.weight", (rows, hidden))
        if model.attention_bias:
            yield want(f"{name}.bias", (rows,))
    if family.qk_norm != "none":
        is_full = family.qk_norm == "full"
        yield want("attn_q_norm.weight", (q_rows if is_full else model.head_dim,))
        yield want("attn_k_norm.weight", (kv_rows if is_full else model.head_dim,))
    yield want("attn_output.weight", (hidden, q_rows))
    if has_output_bias:
        yield want("attn_output.bias", (hidden,))
    yield want("ffn_norm.weight", (hidden,))
    if model.moe is None:
        return
    if not is_moe:
        yield want("ffn_gate.weight", (model.ffn_size, hidden))
        yield want("ffn_up.weight", (model.ffn_size, hidden))
        yield want("ffn_down.weight", (hidden, model.ffn_size))
        return
    yield want("ffn_gate_inp.weight", (model.moe.n_experts, hidden))
    if model.moe.shared_size:
        width = model.moe.shared_size
        yield want("ffn_gate_inp_shexp.weight", (1, hidden), (hidden,))
        yield want("ffn_gate_shexp.weight", (width, hidden))
        yield want("ffn_up_shexp.weight", (width, hidden))
        yield want("ffn_down_shexp.weight", (hidden, width))
