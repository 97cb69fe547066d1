"""What sets one model family apart from the others, as facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .expert_parts import Fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of decoders that share names and arithmetic.

    `names` maps the templates of Hugging Face tensor names to those of GGUF, numbers as `{}` (the
    layer, then the expert). `architecture` is GGUF's `general.architecture`. The `default_...`
    are what the family's configuration class in transformers takes when `config.json` is silent.

    `gguf_norm_top_k` is what llama.cpp takes for a GGUF file that does not say whether the top-k
    weights are renormalised (the `norm_w` argument of `build_moe_ffn` in its src/models);
    `norm_top_k` the same for `config.json`; None there means "always" without being asked.
    `gguf_rope_style` is `interleaved` where llama.cpp's converter permutes the rows of q and k
    (`LlamaModel.permute` in convert_hf_to_gguf.py), the bytes stay as they are.

    `is_described` is whether a `ModelSpec` can say all that a decoder of the family needs; where
    it cannot, the family is repacked only. The members behind it are for such families: `fused`
    and `is_turned` tell how stacks of experts in Hugging Face checkpoints stand (a turned one is
    `(n_experts, inputs, outputs)`; None: told from the shapes), `has_fused_gguf` whether llama.cpp
    defines `ffn_gate_up_exps` for the architecture, `packings` which `quant_method`s of
    `config.json` the names cover, `prefixes` what stands before the names in multimodal
    checkpoints and what it means, `left_out` the prefixes of tensors of no text model.
    """

    name: str
    architecture: str
    hf_architecture: str
    model_type: str
    names: Mapping[str, str]
    is_moe: bool
    qk_norm: str = "none"
    gguf_rope_style: str = "half"
    gguf_norm_top_k: bool = False
    is_top_k_always_normalised: bool = False
    bias_key: str = "attention_bias"
    default_bias: bool = False
    has_output_bias: bool = True
    expert_size_key: str = "moe_intermediate_size"
    has_shared_expert: bool = False
    default_head_dim: int | None = None
    default_rope_theta: float = 10_000.0
    default_rms_norm_eps: float = 1e-6
    default_sliding_window: int = 0
    hf_aliases: tuple[str, ...] = ()
    model_type_aliases: tuple[str, ...] = ()
    is_described: bool = True
    fused: Fused = Fused.HALVES
    is_turned: bool | None = False
    has_fused_gguf: bool = False
    packings: frozenset[str] = frozenset()
    prefixes: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    default_tie: bool = False
    ignored: frozenset[str] = field(
        default=frozenset(
            {
                "model.rotary_emb.inv_freq",
                "model.layers.{}.self_attn.rotary_emb.inv_freq",
                "blk.{}.attn_rot_embd.weight",
            }
        )
    )
