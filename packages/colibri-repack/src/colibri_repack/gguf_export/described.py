"""Files that were repacked from safetensors, described as llama.cpp reads GGUF.

Key names and what absent ones mean: gguf-py's constants.py and llama.cpp's src/llama-model.cpp.
What differs from the values of a Hugging Face checkpoint: vectors and routers are F32, and for
`llama` the rows of q and k change from halves to pairs (`LlamaModel.permute` in
convert_hf_to_gguf.py), as llama.cpp turns neighbours together there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from colibri_format import MODEL_FILE, ModelSpec, Reader, parse_model

from ..errors import ExportError
from ..families import is_matrix
from ..sources.gguf_header import DEFAULT_ALIGNMENT, KeyValue
from .description import FILE_TYPES, Description
from .gguf_record import TensorEntry
from .stored import Contents, stacked_shape
from .vocabulary import vocabulary_keys

# Whether llama.cpp renormalises the weights of the top k, which no key tells it for these.
_NORMALISES: Final = {"qwen3moe": True, "llama": True, "qwen2moe": False, "olmoe": False}
_ARCHITECTURES: Final = frozenset({*_NORMALISES, "qwen2", "qwen3"})
_WITH_BIAS: Final = frozenset({"llama", "qwen2", "qwen2moe"})
_WITH_OWN_HEAD: Final = frozenset({"qwen2moe", "olmoe"})
_ROPE_FREQS: Final = "rope_freqs.weight"
_YARN: Final = frozenset(
    {"type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
)


def describe_model(reader: Reader) -> Description:
    """What a GGUF must say of the open file `reader`, which has no record of one.

    Raises:
        ExportError: `cannot-export` for what GGUF or llama.cpp cannot say of the model,
            `unsupported-tokenizer`.
    """
    if MODEL_FILE not in reader.files:
        raise ExportError(
            "cannot-export",
            reader.path,
            f"has no {MODEL_FILE}: it is repacked only, with the values of its checkpoint, of "
            "which llama.cpp's converter computes some anew",
            "a file of a family that engines run, or one repacked from a GGUF",
            "convert the checkpoint with llama.cpp",
        )
    model = parse_model(reader.read_file(MODEL_FILE), f"{reader.path}: {MODEL_FILE}")
    _check(reader, model)
    contents = Contents(reader)
    entries = []
    for name in contents.names():
        shape = stacked_shape(name, contents.find(name))
        if name.endswith("ffn_gate_inp_shexp.weight"):
            shape = shape[-1:]
        entries.append(TensorEntry(name, shape))
    words, notes = vocabulary_keys(reader, model)
    return Description(
        3,
        DEFAULT_ALIGNMENT,
        (*_keys(reader, model), *words),
        tuple(entries),
        widened=frozenset(
            name
            for name, fact in reader.tensors.items()
            if fact.dtype.name in ("f16", "bf16") and not is_matrix(name)
        ),
        turned=dict(_turned(model)),
        made=_rope_freqs(model),
        notes=notes,
    )


def _check(reader: Reader, model: ModelSpec) -> None:
    def refuse(found: str, required: str) -> ExportError:
        return ExportError("cannot-export", reader.path, found, required,
                           "convert the checkpoint with llama.cpp")  # fmt: skip

    family, moe = model.family, model.moe
    if family not in _ARCHITECTURES:
        raise refuse(f"is a {family}", f"one of {', '.join(sorted(_ARCHITECTURES))}")
    if moe is not None:
        if _NORMALISES.get(family) is not moe.norm_top_k:
            does = "renormalises" if _NORMALISES.get(family) else "does not renormalise"
            raise refuse(
                f"norm_top_k is {moe.norm_top_k}", f"llama.cpp {does} them for every {family}"
            )
        if not (reader.index["size"] != 0).any(axis=1).all():
            raise refuse("has layers without experts", f"llama.cpp takes none for {family}")
    if model.clip_qkv is not None:
        raise refuse(f"clip_qkv is {model.clip_qkv}", f"llama.cpp reads no bound for {family}")
    if model.sliding_window is not None:
        raise refuse(
            f"sliding_window is {model.sliding_window}", f"llama.cpp reads none for {family}"
        )
    if model.attention_bias and family not in _WITH_BIAS:
        raise refuse("has biases in attention", f"llama.cpp takes none for {family}")
    if model.tie_embeddings and family in _WITH_OWN_HEAD:
        raise refuse("the head is the embedding", f"llama.cpp wants a head of its own for {family}")
    if (
        family == "olmoe"
        and not model.n_heads == model.n_kv_heads == model.hidden_size / model.head_dim
    ):
        raise refuse(
            f"{model.n_heads} heads and {model.n_kv_heads} of keys, {model.head_dim} wide",
            "llama.cpp takes as many of both, as wide together as the model, for olmoe",
        )
    if family == "llama" and model.rope.n_dims != model.head_dim:
        raise refuse(f"{model.rope.n_dims} of {model.head_dim} elements turn", "all of them")
    scaling = model.rope.scaling or {"type": "linear"}
    is_known = scaling["type"] in ("linear", "llama3")
    if not is_known and not (scaling["type"] == "yarn" and scaling.keys() <= _YARN):
        raise refuse(f"rope scaling is {scaling}", "linear, llama3, or YaRN with its usual factors")


def _keys(reader: Reader, model: ModelSpec) -> Iterator[KeyValue]:
    family, moe = model.family, model.moe
    yield KeyValue("general.architecture", "str", family)
    yield KeyValue("general.name", "str", reader.path.stem)
    if (file_type := _file_type(reader)) is not None:
        yield KeyValue("general.file_type", "u32", file_type)
    numbers: dict[str, int | float | None] = {
        "vocab_size": model.vocab_size,
        "block_count": model.n_layers,
        "context_length": model.context_length,
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.ffn_size or (moe.expert_size if moe else 0),
        "attention.head_count": model.n_heads,
        "attention.head_count_kv": model.n_kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": float(model.rms_norm_eps),
        "rope.dimension_count": model.rope.n_dims,
        "rope.freq_base": float(model.rope.theta),
    }
    if moe is not None:
        numbers |= {
            "expert_count": moe.n_experts,
            "expert_used_count": moe.top_k,
            "expert_feed_forward_length": moe.expert_size,
            "expert_shared_feed_forward_length": moe.shared_size or None,
        }
    scaling = model.rope.scaling or {}
    if scaling.get("type") in ("linear", "yarn"):
        yield KeyValue(f"{family}.rope.scaling.type", "str", scaling["type"])
        numbers["rope.scaling.factor"] = float(scaling["factor"])
        numbers["rope.scaling.original_context_length"] = scaling.get(
            "original_max_position_embeddings"
        )
        for name in ("beta_fast", "beta_slow"):
            if name in scaling:
                numbers[f"rope.scaling.yarn_{name}"] = float(scaling[name])
    for name, value in numbers.items():
        if value is not None:
            kind = "f32" if isinstance(value, float) else "u32"
            yield KeyValue(f"{family}.{name}", kind, value)


def _file_type(reader: Reader) -> int | None:
    """As `FILE_TYPES`; of what was kept, the type of most bytes."""
    said = str(reader.metadata.get("quantisation"))
    if said == "keep":
        totals: Any = reader.metadata.get("types")
        if isinstance(totals, dict) and all(isinstance(t, dict) for t in totals.values()):
            said = max(totals, key=lambda name: totals[name].get("bytes", 0), default="")
    return FILE_TYPES.get(said)


def _turned(model: ModelSpec) -> Iterator[tuple[str, int]]:
    if model.family != "llama" or model.rope.style != "half":
        return
    for layer in range(model.n_layers):
        for name, n_heads in (("attn_q", model.n_heads), ("attn_k", model.n_kv_heads)):
            for part in ("weight", "bias"):
                yield f"blk.{layer}.{name}.{part}", n_heads


def _rope_freqs(model: ModelSpec) -> Mapping[str, bytes]:
    """Llama 3's scaling as divisors of the frequencies, the tensor that llama.cpp reads.

    transformers' modeling_rope_utils.py, `_compute_llama3_parameters`: long waves turn `factor`
    times slower, short ones as ever, those between by a share.
    """
    scaling = model.rope.scaling or {}
    if scaling.get("type") != "llama3":
        return {}
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    factor = float(scaling["factor"])
    original = float(scaling["original_max_position_embeddings"])
    half = model.rope.n_dims // 2
    wavelength = 2 * math.pi * model.rope.theta ** (np.arange(half) / half)
    share = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    divisors = 1 / ((1 - share) / factor + share)
    return {_ROPE_FREQS: divisors.astype("<f4").tobytes()}
