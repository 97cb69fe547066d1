"""The decoder that a file's tensors make up: embedded file `model.json` (spec, annex A).

Repackers write it from a checkpoint's own description; engines read only this one, and so need
to know neither `config.json` nor GGUF key-values.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from .errors import FormatCode, FormatError

MODEL_FILE: Final = "model.json"
MODEL_VERSION: Final = 1
ROPE_STYLES: Final = ("half", "interleaved")
QK_NORMS: Final = ("none", "head", "full")
_MAX_COUNT: Final = 2**31
# The least and the largest normal float32 (IEEE 754 binary32).
_LEAST: Final = 2.0**-126
_MOST: Final = (2 - 2.0**-23) * 2.0**127
_FAMILY: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

    `style` says which pairs turn together: `half` pairs element i with i + n_dims/2 (GPT-NeoX,
    Hugging Face), `interleaved` pairs 2i with 2i + 1 (the paper; ggml's "normal" mode).
    `n_dims` leading elements of each head turn, the rest pass. `scaling` is None, or a mapping
    with `type` and that type's own numbers, named as in `config.json`'s `rope_scaling`.
    """

    theta: float
    n_dims: int
    style: str = "half"
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Routing of a Mixture-of-Experts model.

    A token goes to the `top_k` experts of highest softmax probability; with `norm_top_k` their
    weights are divided by their sum. `shared_size` is the width of the shared expert that every
    token passes (0: there is none), `is_shared_gated` whether its output is scaled by a sigmoid
    gate (tensor `blk.N.ffn_gate_inp_shexp.weight`).
    """

    n_experts: int
    top_k: int
    expert_size: int
    norm_top_k: bool
    shared_size: int = 0
    is_shared_gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a decoder must know beside the tensors; all counts are positive.

    `family` is GGUF's architecture name (`qwen3moe`, `llama`, ...). `attention_bias` holds for
    q, k and v; `qk_norm` is `none`, `head` (RMSNorm over each head) or `full` (over all heads of
    the projection at once). `ffn_size` is the width of dense feed-forward layers (0: none).
    `clip_qkv` bounds q, k and v to [-clip, clip]; `sliding_window` lets a position see that many
    last positions, itself included; None means neither. `moe` is None for dense models.
    """

    family: str
    n_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    ffn_size: int = 0
    attention_bias: bool = False
    qk_norm: str = "none"
    clip_qkv: float | None = None
    sliding_window: int | None = None
    tie_embeddings: bool = False
    moe: MoeSpec | None = None
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = field(default=())

    def to_bytes(self) -> bytes:
        """This model as the embedded file's bytes: canonical JSON, the same for equal models."""
        record = {"version": MODEL_VERSION, **asdict(self)}
        text = json.dumps(record, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"


def parse_model(data: bytes, where: str = MODEL_FILE) -> ModelSpec:
    """The model that `data`, the bytes of `model.json`, describes.

    Raises:
        FormatError: `bad-model` naming the first member that is missing, unknown, of the wrong
            type or out of range.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"is not JSON ({error})", "an object with the model's members") from error
    if not isinstance(record, dict):
        raise _bad(where, "is not a JSON object", "an object with the model's members")
    version = record.pop("version", None)
    if type(version) is not int or version != MODEL_VERSION:
        raise _bad(where, f"has version {version!r}", f"version {MODEL_VERSION} is understood")
    rope = _section(where, record, "rope", RopeSpec)
    moe = _section(where, record, "moe", MoeSpec) if record.get("moe") is not None else None
    eos = record.get("eos_tokens", [])
    if not isinstance(eos, list):
        raise _bad(where, "member 'eos_tokens' is no array", "an array of token ids")
    record |= {"rope": rope, "moe": moe, "eos_tokens": tuple(eos)}
    model: ModelSpec = _build(where, "", record, ModelSpec)
    _check_model(where, model)
    return model


def is_float32(value: Any) -> bool:
    """Whether `value` is a number, not a truth value, that is 0 or a normal float32.

    Whole numbers of any length are taken: `math.isfinite` raises for those beyond a double.
    """
    if type(value) not in (int, float):
        return False
    return bool(value == 0 or _LEAST <= abs(value) <= _MOST)


def _bad(where: str, found: str, required: str) -> FormatError:
    return FormatError(FormatCode.BAD_MODEL, where, found, required, "repack the source again")


def _section(where: str, record: dict[str, Any], name: str, kind: type[Any]) -> Any:
    section = record.get(name)
    if not isinstance(section, dict):
        raise _bad(where, f"member {name!r} is {section!r}", "an object is required")
    return _build(where, f"{name}.", section, kind)


def _build(where: str, prefix: str, record: dict[str, Any], kind: type[Any]) -> Any:
    known = {f.name: f for f in fields(kind)}
    for name in record:
        if name not in known:
            raise _bad(where, f"unknown member {prefix + name!r}", f"one of {sorted(known)}")
    try:
        return kind(**record)
    except TypeError as error:
        raise _bad(
            where,
            f"members of {prefix or 'the model'!r} are missing ({error})",
            f"all of {sorted(known)}",
        ) from error


def _check_model(where: str, model: ModelSpec) -> None:
    def count(name: str, value: object, least: int = 1) -> None:
        if type(value) is not int or not least <= value < _MAX_COUNT:
            raise _bad(where, f"{name} is {value!r}", f"a whole number of at least {least}")

    def number(name: str, value: object) -> None:
        if not is_float32(value) or value <= 0:  # type: ignore[operator]
            raise _bad(
                where, f"{name} is {str(value)[:40]}", "a positive number within float32's range"
            )

    def flag(name: str, value: object) -> None:
        if type(value) is not bool:
            raise _bad(where, f"{name} is {value!r}", "true or false")

    def choice(name: str, value: object, options: tuple[str, ...]) -> None:
        if value not in options:
            raise _bad(where, f"{name} is {value!r}", f"one of {', '.join(options)}")

    if not isinstance(model.family, str) or not _FAMILY.fullmatch(model.family):
        raise _bad(
            where, f"family is {str(model.family)[:40]!r}", "1 to 64 letters, digits, -, _ or ."
        )
    for name in (
        "n_layers",
        "hidden_size",
        "vocab_size",
        "context_length",
        "n_heads",
        "n_kv_heads",
        "head_dim",
    ):
        count(name, getattr(model, name))
    count("ffn_size", model.ffn_size, 0)
    number("rms_norm_eps", model.rms_norm_eps)
    number("rope.theta", model.rope.theta)
    count("rope.n_dims", model.rope.n_dims)
    choice("rope.style", model.rope.style, ROPE_STYLES)
    choice("qk_norm", model.qk_norm, QK_NORMS)
    flag("attention_bias", model.attention_bias)
    flag("tie_embeddings", model.tie_embeddings)
    if model.rope.scaling is not None and not isinstance(model.rope.scaling, dict):
        raise _bad(where, f"rope.scaling is {model.rope.scaling!r}", "an object or null")
    for name, value in (model.rope.scaling or {}).items():
        if type(value) in (int, float) and not is_float32(value):
            raise _bad(
                where,
                f"rope.scaling.{name} is {str(value)[:40]}",
                "a number within float32's range",
            )
    if model.clip_qkv is not None:
        number("clip_qkv", model.clip_qkv)
    if model.sliding_window is not None:
        count("sliding_window", model.sliding_window)
    if model.n_heads % model.n_kv_heads:
        raise _bad(
            where,
            f"{model.n_heads} heads and {model.n_kv_heads} key/value heads",
            "n_heads is a multiple of n_kv_heads",
        )
    if model.rope.n_dims > model.head_dim or model.rope.n_dims % 2:
        raise _bad(
            where,
            f"rope.n_dims is {model.rope.n_dims}",
            f"an even number of at most head_dim ({model.head_dim})",
        )
    if model.bos_token is not None:
        count("bos_token", model.bos_token, 0)
    for token in model.eos_tokens:
        count("eos_tokens", token, 0)
    if (moe := model.moe) is not None:
        for name in ("n_experts", "top_k", "expert_size"):
            count(f"moe.{name}", getattr(moe, name))
        count("moe.shared_size", moe.shared_size, 0)
        flag("moe.norm_top_k", moe.norm_top_k)
        flag("moe.is_shared_gated", moe.is_shared_gated)
        if moe.top_k > moe.n_experts:
            raise _bad(where, f"moe.top_k is {moe.top_k}", f"at most n_experts ({moe.n_experts})")
