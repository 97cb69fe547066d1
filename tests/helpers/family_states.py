"""Tiny checkpoints of families that are repacked only: names and shapes of the Hub, float32.

`EXPERTS` and `dense_state` say what must come out, put together apart from the package's tables:
experts by hand, dense names by gguf-py's own map.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, get_tensor_name_map

from .random_models import State

HIDDEN, WIDTH, FFN, VOCAB, N_EXPERTS, TOP_K = 96, 64, 160, 101, 5, 2
_HEADS, _KV_HEADS, _HEAD = 6, 2, 16

# Per family: class, GGUF architecture, how experts are stored, layers that are dense.
FAMILIES: dict[str, tuple[str, str, str, tuple[int, ...]]] = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DEEPSEEK2", "single", (0,)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DEEPSEEK2", "single", (0,)),
    "glm4_moe": ("Glm4MoeForCausalLM", "GLM4_MOE", "single", (0,)),
    "gpt_oss": ("GptOssForCausalLM", "GPT_OSS", "turned", ()),
    "granitemoe": ("GraniteMoeForCausalLM", "GRANITE_MOE", "linear", ()),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", "GRANITE_MOE", "linear", ()),
    "phimoe": ("PhiMoEForCausalLM", "PHIMOE", "w", ()),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MINIMAXM2", "w", ()),
    "qwen3_next": ("Qwen3NextForCausalLM", "QWEN3NEXT", "single", ()),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "QWEN35MOE", "stacked", ()),
    "gemma": ("GemmaForCausalLM", "GEMMA", "dense", (0, 1, 2)),
    "gemma2": ("Gemma2ForCausalLM", "GEMMA2", "dense", (0, 1, 2)),
    "gemma3_text": ("Gemma3ForCausalLM", "GEMMA3", "dense", (0, 1, 2)),
}
N_LAYERS = 3
_MATRICES = ("gate", "up", "down")


def architecture(family: str) -> str:
    """GGUF's name of the family."""
    from gguf.constants import MODEL_ARCH_NAMES

    return MODEL_ARCH_NAMES[MODEL_ARCH[FAMILIES[family][1]]]


def config(family: str) -> dict[str, Any]:
    """`config.json`, as far as repacking looks at it."""
    hf_class, _, storage, _ = FAMILIES[family]
    values: dict[str, Any] = {
        "architectures": [hf_class],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": N_LAYERS,
        "tie_word_embeddings": family.startswith("gemma"),
    }
    if storage != "dense":
        key = {"deepseek_v2": "n_routed_experts", "deepseek_v3": "n_routed_experts",
               "glm4_moe": "n_routed_experts", "qwen3_next": "num_experts",
               "qwen3_5_moe": "num_experts"}.get(family, "num_local_experts")  # fmt: skip
        values |= {key: N_EXPERTS, "num_experts_per_tok": TOP_K}
    if family in ("deepseek_v3", "glm4_moe"):
        values["num_nextn_predict_layers"] = 1
    if family == "qwen3_5_moe":
        outer = {key: values.pop(key) for key in ("architectures", "model_type")}
        return outer | {"text_config": values}
    return values


def n_layers(family: str) -> int:
    """Layers with tensors: those that predict further tokens count."""
    return N_LAYERS + (family in ("deepseek_v3", "glm4_moe"))


def expert_state(family: str) -> dict[tuple[int, int, str], np.ndarray[Any, np.dtype[np.float32]]]:
    """What each expert must be, by layer, expert and matrix; with biases for gpt-oss."""
    _, _, storage, dense_layers = FAMILIES[family]
    rng = np.random.default_rng(zlib.crc32(family.encode()))
    found = {}
    n_experts = 1 if storage == "dense" else N_EXPERTS
    width = FFN if storage == "dense" else WIDTH
    for layer in range(n_layers(family)):
        if layer in dense_layers and storage != "dense":
            continue
        for expert in range(n_experts):
            for matrix in _MATRICES:
                shape = (HIDDEN, width) if matrix == "down" else (width, HIDDEN)
                found[layer, expert, matrix] = rng.standard_normal(shape).astype(np.float32)
                if storage == "turned":
                    bias = rng.standard_normal(shape[0]).astype(np.float32)
                    found[layer, expert, f"{matrix}_bias"] = bias
    return found


def _shapes(family: str, layer: int) -> dict[str, tuple[int, ...]]:
    """Dense tensors of a layer, by names below `model.layers.N.`."""
    _, _, storage, dense_layers = FAMILIES[family]
    q, kv = _HEADS * _HEAD, _KV_HEADS * _HEAD
    norm = (HIDDEN,)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": norm,
        "post_attention_layernorm.weight": norm,
    }
    is_linear = family in ("qwen3_next", "qwen3_5_moe") and layer != 1
    if family.startswith("deepseek"):
        shapes |= {
            "self_attn.q_a_proj.weight": (32, HIDDEN), "self_attn.q_a_layernorm.weight": (32,),
            "self_attn.q_b_proj.weight": (144, 32),
            "self_attn.kv_a_proj_with_mqa.weight": (40, HIDDEN),
            "self_attn.kv_a_layernorm.weight": (32,), "self_attn.kv_b_proj.weight": (192, 32),
            "self_attn.o_proj.weight": (HIDDEN, q),
        }  # fmt: skip
    elif is_linear:
        shapes |= {"linear_attn.A_log": (4,), "linear_attn.dt_bias": (4,),
                   "linear_attn.conv1d.weight": (64, 1, 4), "linear_attn.norm.weight": (8,),
                   "linear_attn.out_proj.weight": (HIDDEN, 32)}  # fmt: skip
        if family == "qwen3_next":
            shapes |= {"linear_attn.in_proj_qkvz.weight": (96, HIDDEN),
                       "linear_attn.in_proj_ba.weight": (8, HIDDEN)}  # fmt: skip
        else:
            shapes |= {"linear_attn.in_proj_qkv.weight": (64, HIDDEN),
                       "linear_attn.in_proj_z.weight": (32, HIDDEN),
                       "linear_attn.in_proj_a.weight": (4, HIDDEN),
                       "linear_attn.in_proj_b.weight": (4, HIDDEN)}  # fmt: skip
    else:
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if family in ("glm4_moe", "gpt_oss", "phimoe"):
                shapes[f"self_attn.{part}_proj.bias"] = (rows,)
        shapes["self_attn.o_proj.weight"] = (HIDDEN, q)
        if family in ("gpt_oss", "phimoe"):
            shapes["self_attn.o_proj.bias"] = norm
        if family in ("glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe", "gemma3_text"):
            shapes |= {"self_attn.q_norm.weight": (_HEAD,), "self_attn.k_norm.weight": (_HEAD,)}
    if family == "gpt_oss":
        shapes |= {"self_attn.sinks": (_HEADS,), "mlp.router.weight": (N_EXPERTS, HIDDEN),
                   "mlp.router.bias": (N_EXPERTS,)}  # fmt: skip
    elif family == "phimoe":
        shapes |= {"input_layernorm.bias": norm, "post_attention_layernorm.bias": norm}
    if family in ("gemma2", "gemma3_text"):
        shapes |= {"pre_feedforward_layernorm.weight": norm,
                   "post_feedforward_layernorm.weight": norm}  # fmt: skip
    if storage == "linear":
        shapes["block_sparse_moe.router.layer.weight"] = (N_EXPERTS, HIDDEN)
    elif storage == "w":
        shapes["block_sparse_moe.gate.weight"] = (N_EXPERTS, HIDDEN)
        if family == "minimax_m2":
            shapes["block_sparse_moe.e_score_correction_bias"] = (N_EXPERTS,)
    elif storage in ("single", "stacked") and layer not in dense_layers:
        shapes["mlp.gate.weight"] = (N_EXPERTS, HIDDEN)
        shared = "shared_experts" if family in ("deepseek_v2", "deepseek_v3", "glm4_moe") else (
            "shared_expert")  # fmt: skip
        for matrix in ("gate", "up"):
            shapes[f"mlp.{shared}.{matrix}_proj.weight"] = (WIDTH, HIDDEN)
        shapes[f"mlp.{shared}.down_proj.weight"] = (HIDDEN, WIDTH)
        if shared == "shared_expert":
            shapes["mlp.shared_expert_gate.weight"] = (1, HIDDEN)
        elif family != "deepseek_v2":
            shapes["mlp.gate.e_score_correction_bias"] = (N_EXPERTS,)
    elif layer in dense_layers and storage != "dense":
        shapes |= {"mlp.gate_proj.weight": (FFN, HIDDEN), "mlp.up_proj.weight": (FFN, HIDDEN),
                   "mlp.down_proj.weight": (HIDDEN, FFN)}  # fmt: skip
    if family == "granitemoeshared":
        shapes |= {"shared_mlp.input_linear.weight": (2 * WIDTH, HIDDEN),
                   "shared_mlp.output_linear.weight": (HIDDEN, WIDTH)}  # fmt: skip
    if layer >= N_LAYERS:
        shapes |= {"eh_proj.weight": (HIDDEN, 2 * HIDDEN), "enorm.weight": norm,
                   "hnorm.weight": norm, "embed_tokens.weight": (VOCAB, HIDDEN),
                   "shared_head.norm.weight": norm,
                   "shared_head.head.weight": (VOCAB, HIDDEN)}  # fmt: skip
    return shapes


def _dense_shapes(family: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not family.startswith("gemma"):
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    if family == "phimoe":
        shapes |= {"model.norm.bias": (HIDDEN,), "lm_head.bias": (VOCAB,)}
    for layer in range(n_layers(family)):
        shapes |= {f"model.layers.{layer}.{k}": v for k, v in _shapes(family, layer).items()}
    return shapes


def _hf_dense(family: str) -> State:
    rng = np.random.default_rng(zlib.crc32(family.encode()) + 1)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in _dense_shapes(family).items()
    }


def hf_state(family: str) -> State:
    """The checkpoint as it stands on the Hub."""
    storage = FAMILIES[family][2]
    state = _hf_dense(family)
    experts = expert_state(family)
    for layer in dict.fromkeys(layer for layer, _, _ in experts):
        stem = f"model.layers.{layer}"

        def stack(name: str, layer: int = layer) -> np.ndarray[Any, Any]:
            return np.stack([experts[layer, e, name] for e in range(N_EXPERTS)])

        if storage == "dense":
            for matrix in _MATRICES:
                state[f"{stem}.mlp.{matrix}_proj.weight"] = experts[layer, 0, matrix]
        elif storage in ("single", "w"):
            short = {"gate": "w1", "up": "w3", "down": "w2"}
            for expert in range(N_EXPERTS):
                for m in _MATRICES:
                    name = f"block_sparse_moe.experts.{expert}.{short[m]}" if storage == "w" else (
                        f"mlp.experts.{expert}.{m}_proj")  # fmt: skip
                    state[f"{stem}.{name}.weight"] = experts[layer, expert, m]
        elif storage in ("stacked", "linear"):
            both = np.concatenate([stack("gate"), stack("up")], axis=1)
            names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
            if storage == "linear":
                names = ("block_sparse_moe.input_linear.weight",
                         "block_sparse_moe.output_linear.weight")  # fmt: skip
            state[f"{stem}.{names[0]}"] = both
            state[f"{stem}.{names[1]}"] = stack("down")
        else:
            both = np.empty((N_EXPERTS, HIDDEN, 2 * WIDTH), np.float32)
            both[..., 0::2] = stack("gate").transpose(0, 2, 1)
            both[..., 1::2] = stack("up").transpose(0, 2, 1)
            bias = np.empty((N_EXPERTS, 2 * WIDTH), np.float32)
            bias[:, 0::2], bias[:, 1::2] = stack("gate_bias"), stack("up_bias")
            state[f"{stem}.mlp.experts.gate_up_proj"] = both
            state[f"{stem}.mlp.experts.gate_up_proj_bias"] = bias
            state[f"{stem}.mlp.experts.down_proj"] = np.ascontiguousarray(
                stack("down").transpose(0, 2, 1)
            )
            state[f"{stem}.mlp.experts.down_proj_bias"] = stack("down_bias")
    if family != "qwen3_5_moe":
        return state
    # The text model of a multimodal checkpoint, beside what is none of it.
    prefixed = {re.sub(r"^model\.", "model.language_model.", k): v for k, v in state.items()}
    extra = {"model.visual.blocks.0.mlp.weight": np.ones((4, 4), np.float32),
             "mtp.fc.weight": np.ones((4, 8), np.float32)}  # fmt: skip
    return prefixed | extra


def dense_state(family: str) -> State:
    """The dense tensors under GGUF's names, as gguf-py maps them."""
    arch = MODEL_ARCH[FAMILIES[family][1]]
    names = get_tensor_name_map(arch, n_layers(family))
    state: State = {}
    for name, tensor in _hf_dense(family).items():
        if "shared_mlp.input_linear" in name:
            layer = name.split(".")[2]
            state[f"blk.{layer}.ffn_gate_shexp.weight"] = tensor[:WIDTH]
            state[f"blk.{layer}.ffn_up_shexp.weight"] = tensor[WIDTH:]
            continue
        state[gguf_name(names, name)] = tensor
    return state


def gguf_name(names: Any, name: str) -> str:
    """GGUF's name of a Hugging Face tensor, by gguf-py's map `names` of the architecture."""
    # convert_hf_to_gguf.py renames these before it asks the map, or keeps them out of it.
    spelled = name.replace("e_score_correction_bias", "e_score_correction.bias")
    spelled = spelled.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
    found = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
    if found is not None:
        return f"{found}.weight" if found.endswith("attn_sinks") else str(found)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    own = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm",
           "embed_tokens": "embed_tokens", "shared_head.norm": "shared_head_norm",
           "shared_head.head": "shared_head_head"}  # fmt: skip
    assert match is not None, name
    return f"blk.{match[1]}.nextn.{own[match[2]]}.weight"
