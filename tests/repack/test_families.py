from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_format import ModelSpec, Role
from colibri_repack import Checkpoint, SourceError, open_source, read_checkpoint
from colibri_repack.families.names import split_name
from helpers import gguf_builder as g
from helpers.gguf_models import canonical_state, gguf_model, stacked_state
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import Entry, write_folder

Change = Callable[[dict[str, Any]], None]


def read_hf(tmp_path: Path, name: str, state: dict[str, Entry] | None = None, **config: Any) -> Any:
    tensors = dict(random_state(name)) if state is None else state
    values = {k: v for k, v in (CONFIGS[name] | config).items() if v is not ...}
    return read_checkpoint(open_source(write_folder(tmp_path, tensors, values)))


def read_gguf(tmp_path: Path, builder: g.GgufBuilder) -> Checkpoint:
    return read_checkpoint(open_source(builder.write(tmp_path / "m.gguf")))


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(SourceError) as caught:
        call()
    return caught.value.code


def bytes_of(tmp_path: Path, part: Any) -> bytes:
    with part.tensor.file.open("rb") as file:
        file.seek(part.tensor.offset + part.offset)
        return file.read(part.size)


def check_tensors(tmp_path: Path, checkpoint: Checkpoint, name: str) -> None:
    """Every tensor of the model is in its place, byte for byte, and there is no other."""
    left = dict(canonical_state(name))
    for weight in checkpoint.dense:
        assert bytes_of(tmp_path, weight.part) == left.pop(weight.name).tobytes(), weight.name
    for layer, experts in enumerate(checkpoint.experts):
        for expert, parts in enumerate(experts or ()):
            assert list(parts) == [Role.GATE, Role.UP, Role.DOWN]
            for role, part in parts.items():
                stem = f"blk.{layer}.ffn_{role.name.lower()}"
                key = f"{stem}.{expert}.weight" if checkpoint.model.moe else f"{stem}.weight"
                assert bytes_of(tmp_path, part) == left.pop(key).tobytes(), key
    assert not left


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_a_hugging_face_folder_finds_its_place(tmp_path: Path, name: str) -> None:
    checkpoint = read_hf(tmp_path, name)

    check_tensors(tmp_path, checkpoint, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_a_gguf_finds_its_place(tmp_path: Path, name: str) -> None:
    checkpoint = read_gguf(tmp_path, gguf_model(name))

    check_tensors(tmp_path, checkpoint, name)


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral"])
def test_gguf_with_one_tensor_an_expert_is_read(tmp_path: Path, name: str) -> None:
    checkpoint = read_gguf(tmp_path, gguf_model(name, canonical_state(name)))

    check_tensors(tmp_path, checkpoint, name)


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "olmoe", "mixtral"])
def test_stacks_of_transformers_5_are_read(tmp_path: Path, name: str) -> None:
    state = dict(random_state(name))
    config = CONFIGS[name]
    n_experts = config.get("num_local_experts") or config["num_experts"]
    block = "block_sparse_moe" if name == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else (
        "gate_proj", "up_proj", "down_proj")  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}.{block}.experts"
        if f"{stem}.0.{gate}.weight" not in state:
            continue
        parts = [
            [state.pop(f"{stem}.{e}.{m}.weight") for m in (gate, up, down)]
            for e in range(n_experts)
        ]
        stem = f"model.layers.{layer}.mlp.experts"
        state[f"{stem}.gate_up_proj"] = np.stack([np.concatenate(p[:2]) for p in parts])
        state[f"{stem}.down_proj"] = np.stack([p[2] for p in parts])
        if name == "mixtral":
            router = state.pop(f"model.layers.{layer}.{block}.gate.weight")
            state[f"model.layers.{layer}.mlp.gate.weight"] = router

    checkpoint = read_hf(tmp_path, name, state)

    check_tensors(tmp_path, checkpoint, name)


FAMILY_FACTS: dict[str, dict[str, Any]] = {
    "qwen3moe": {"family": "qwen3moe", "qk_norm": "head", "attention_bias": False},
    "qwen2moe": {"family": "qwen2moe", "qk_norm": "none", "attention_bias": True},
    "olmoe": {"family": "olmoe", "qk_norm": "full", "clip_qkv": None},
    "olmoe-clip": {"family": "olmoe", "clip_qkv": 0.8},
    "mixtral": {"family": "llama", "qk_norm": "none", "sliding_window": None},
    "mixtral-window": {"family": "llama", "sliding_window": 9},
    "llama": {"family": "llama", "moe": None, "tie_embeddings": False},
    "qwen3": {"family": "qwen3", "moe": None, "tie_embeddings": True, "qk_norm": "head"},
    "qwen2": {"family": "qwen2", "moe": None, "attention_bias": True, "sliding_window": None},
    "mistral": {"family": "llama", "moe": None, "sliding_window": None},
    "mistral-window": {"family": "llama", "moe": None, "sliding_window": 9},
}


@pytest.mark.parametrize("name", FAMILY_FACTS)
def test_config_json_becomes_a_model(tmp_path: Path, name: str) -> None:
    model = read_hf(tmp_path, name).model

    assert {key: getattr(model, key) for key in FAMILY_FACTS[name]} == FAMILY_FACTS[name]
    assert model.rope.style == "half"
    assert (model.bos_token, model.eos_tokens) == (1, (2,))
    assert model.head_dim == CONFIGS[name].get("head_dim", 16)
    assert model.n_kv_heads == 2


def test_routing_is_read_from_config_json(tmp_path: Path) -> None:
    moe = {n: read_hf(tmp_path / n, n).model.moe for n in ("qwen3moe", "qwen2moe", "mixtral")}

    assert (moe["qwen3moe"].n_experts, moe["qwen3moe"].top_k) == (11, 3)
    assert moe["qwen3moe"].norm_top_k
    assert not moe["qwen2moe"].norm_top_k
    assert (moe["qwen2moe"].shared_size, moe["qwen2moe"].is_shared_gated) == (76, True)
    assert moe["mixtral"].norm_top_k
    assert moe["mixtral"].expert_size == 72


@pytest.mark.parametrize("key", ["num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_expert_count_is_found_under_its_other_names(tmp_path: Path, key: str) -> None:
    checkpoint = read_hf(tmp_path, "qwen3moe", **{"num_experts": ..., key: 11})

    assert checkpoint.n_experts == 11


@pytest.mark.parametrize(
    ("name", "style", "norm"),
    [
        ("qwen3moe", "half", True),
        ("qwen2moe", "half", False),
        ("olmoe", "half", False),
        ("mixtral", "interleaved", True),
        ("llama", "interleaved", None),
        ("qwen3", "half", None),
    ],
)
def test_gguf_follows_llama_cpp(tmp_path: Path, name: str, style: str, norm: bool | None) -> None:
    model = read_gguf(tmp_path, gguf_model(name)).model

    assert model.rope.style == style
    assert (model.moe.norm_top_k if model.moe else None) == norm
    assert model.rms_norm_eps == CONFIGS[name]["rms_norm_eps"]
    assert model.eos_tokens == (2, 5)


def test_gguf_and_hugging_face_agree_on_the_model(tmp_path: Path) -> None:
    for name in ("qwen3moe", "qwen2moe", "olmoe", "qwen3"):
        a: ModelSpec = read_hf(tmp_path / name, name).model
        b = read_gguf(tmp_path, gguf_model(name)).model
        assert a.moe == b.moe
        assert (a.rope, a.ffn_size, a.attention_bias) == (b.rope, b.ffn_size, b.attention_bias)


def test_gguf_that_states_its_weights_norm_is_believed(tmp_path: Path) -> None:
    builder = gguf_model("qwen3moe").add("qwen3moe.expert_weights_norm", g.BOOL, False)

    moe = read_gguf(tmp_path, builder).model.moe

    assert moe is not None
    assert not moe.norm_top_k


def test_dense_layers_of_a_moe_model_have_no_experts(tmp_path: Path) -> None:
    for number, checkpoint in enumerate(
        (
            read_hf(tmp_path / "a", "qwen3moe-tied-dense-layer"),
            read_gguf(tmp_path, gguf_model("qwen3moe-tied-dense-layer")),
        )
    ):
        assert [e is None for e in checkpoint.experts] == [False, True, False], number
        assert checkpoint.model.ffn_size == 144
        names = {weight.name for weight in checkpoint.dense}
        assert {"blk.1.ffn_gate.weight", "blk.0.ffn_gate_inp.weight"} <= names
        assert "blk.1.ffn_gate_inp.weight" not in names


def test_sparse_step_counts_layers_from_one(tmp_path: Path) -> None:
    # Layers 0 and 2 are dense by the step, layer 1 by name: none is left to be sparse.
    with pytest.raises(SourceError, match=r"blk\.0\.ffn_gate\.weight") as caught:
        read_hf(tmp_path, "qwen3moe-tied-dense-layer", decoder_sparse_step=2)

    assert caught.value.code == "missing-tensor"


def test_tokens_that_end_a_text_come_from_generation_config(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        dict(random_state("llama")),
        CONFIGS["llama"],
        files={"generation_config.json": '{"eos_token_id": [7, 9]}'},
    )

    assert read_checkpoint(open_source(folder)).model.eos_tokens == (7, 9)


ROPE = {
    "rope_scaling with type": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        (5e5, {"type": "linear", "factor": 2.0}),
    ),
    "default": ({"rope_scaling": {"rope_type": "default"}}, (1e4, None)),
    "rope_parameters": (
        {
            "rope_theta": ...,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 7e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        (
            7e5,
            {
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "yarn without its original length": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        (1e4, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}),
    ),
    "nothing said": ({"rope_theta": ..., "rope_scaling": ...}, (1e4, None)),
}


@pytest.mark.parametrize("case", ROPE)
def test_rope_is_read_in_old_and_new_spelling(tmp_path: Path, case: str) -> None:
    config, (theta, scaling) = ROPE[case]

    rope = read_hf(tmp_path, "llama", **config).model.rope

    assert (rope.theta, rope.scaling, rope.n_dims) == (theta, scaling, 20)


def test_part_of_the_head_may_turn(tmp_path: Path) -> None:
    assert read_hf(tmp_path, "llama", partial_rotary_factor=0.5).model.rope.n_dims == 10


def test_gguf_rope_scaling_is_named_as_in_config_json(tmp_path: Path) -> None:
    builder = gguf_model("qwen3").add("qwen3.rope.scaling.type", g.STRING, "yarn")
    builder.add("qwen3.rope.scaling.factor", g.F32, 4.0)
    builder.add("qwen3.rope.scaling.original_context_length", g.U32, 64)

    scaling = read_gguf(tmp_path, builder).model.rope.scaling

    assert scaling == {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_rope_divisors_of_a_gguf_are_a_dense_tensor(tmp_path: Path) -> None:
    builder = gguf_model("llama").tensor("rope_freqs.weight", (10,), 0, bytes(40))

    names = [weight.name for weight in read_gguf(tmp_path, builder).dense]

    assert "rope_freqs.weight" in names


def test_tied_head_that_is_stored_twice_is_dropped(tmp_path: Path) -> None:
    state = dict(random_state("qwen3"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()

    checkpoint = read_hf(tmp_path, "qwen3", state)

    assert checkpoint.model.tie_embeddings
    assert checkpoint.dropped == ("lm_head.weight",)


def test_head_that_differs_is_kept_though_tied(tmp_path: Path) -> None:
    state = dict(random_state("qwen3"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1

    checkpoint = read_hf(tmp_path, "qwen3", state)

    assert not checkpoint.model.tie_embeddings
    assert "output.weight" in [weight.name for weight in checkpoint.dense]
    assert "lm_head.weight" in checkpoint.notes[0]


def test_tensors_that_engines_compute_are_dropped_and_told(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    state = dict(random_state("llama")) | {name: np.zeros(8, np.float32)}

    assert read_hf(tmp_path, "llama", state).dropped == (name,)


def test_biases_are_asked_for_where_the_config_has_them(tmp_path: Path) -> None:
    state = dict(random_state("llama"))
    assert code_of(lambda: read_hf(tmp_path, "llama", state, attention_bias=True)) == (
        "missing-tensor"
    )

    for layer in range(3):
        for part, rows in (("q", 120), ("k", 40), ("v", 40), ("o", 96)):
            key = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            state[key] = np.zeros(rows, np.float32)
    checkpoint = read_hf(tmp_path, "llama", state, attention_bias=True)
    assert checkpoint.model.attention_bias
    assert code_of(lambda: read_hf(tmp_path, "llama", state)) == "unknown-tensors"


def without(name: str, key: str) -> dict[str, Entry]:
    state: dict[str, Entry] = dict(random_state(name))
    del state[key]
    return state


WRONG: dict[str, tuple[str, dict[str, Entry] | None, dict[str, Any], str]] = {
    "a missing expert": (
        "qwen3moe",
        without("qwen3moe", "model.layers.2.mlp.experts.10.up_proj.weight"),
        {},
        "missing-tensor",
    ),
    "a missing router": (
        "mixtral",
        without("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        {},
        "missing-tensor",
    ),
    "a missing norm": ("llama", without("llama", "model.norm.weight"), {}, "missing-tensor"),
    "a missing head": ("llama", without("llama", "lm_head.weight"), {}, "missing-tensor"),
    "more layers than said": ("llama", None, {"num_hidden_layers": 2}, "unknown-tensors"),
    "fewer layers than said": ("llama", None, {"num_hidden_layers": 4}, "missing-tensor"),
    "more experts than said": ("mixtral", None, {"num_local_experts": 4}, "unknown-tensors"),
    "another vocabulary": ("llama", None, {"vocab_size": 204}, "tensor-shape"),
    "another width": ("qwen3moe", None, {"moe_intermediate_size": 41}, "tensor-shape"),
    "other heads": ("olmoe", None, {"num_key_value_heads": 3}, "tensor-shape"),
    "top-k above the experts": ("mixtral", None, {"num_experts_per_tok": 6}, "bad-config"),
    "heads that share no key": ("llama", None, {"num_key_value_heads": 4}, "bad-config"),
    "no layers": ("llama", None, {"num_hidden_layers": 0}, "bad-config"),
    "2^40 layers": ("llama", None, {"num_hidden_layers": 2**40}, "bad-config"),
    "layers true": ("llama", None, {"num_hidden_layers": True}, "bad-config"),
    "no hidden size": ("llama", None, {"hidden_size": ...}, "bad-config"),
    "an epsilon of text": ("llama", None, {"rms_norm_eps": "1e-6"}, "bad-config"),
    "a flag of text": ("qwen3moe", None, {"norm_topk_prob": "yes"}, "bad-config"),
    "dense layers of text": ("qwen3moe", None, {"mlp_only_layers": ["x"]}, "bad-config"),
    "end token of text": ("llama", None, {"eos_token_id": "</s>"}, "bad-config"),
    "rope scaling of text": ("llama", None, {"rope_scaling": "linear"}, "bad-config"),
    "a rope factor of text": (
        "llama",
        None,
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        "bad-config",
    ),
    "llama3 rope without its frequencies": (
        "llama",
        None,
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "bad-config",
    ),
    "a number of 400 digits": ("llama", None, {"rms_norm_eps": 10**400}, "bad-config"),
    "unknown rope": ("llama", None, {"rope_scaling": {"type": "su"}}, "unsupported-model"),
    "rope by kind of layer": (
        "llama",
        None,
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "unsupported-model",
    ),
    "another activation": ("llama", None, {"hidden_act": "gelu"}, "unsupported-model"),
    "window in some layers": (
        "qwen3",
        None,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "unsupported-model",
    ),
    "GPTQ": ("llama", None, {"quantization_config": {"quant_method": "gptq"}},
             "quantised-checkpoint"),
    "another family": (
        "llama",
        None,
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        "unknown-family",
    ),
    "biases of a feed-forward network": (
        "llama",
        dict(random_state("llama"))
        | {"model.layers.0.mlp.up_proj.bias": np.zeros(160, np.float32)},
        {},
        "unknown-tensors",
    ),
    "weights as integers": (
        "llama",
        dict(random_state("llama")) | {"model.norm.weight": np.zeros(96, "<i8")},
        {},
        "unsupported-dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_checkpoint_that_is_not_what_it_says_is_refused(tmp_path: Path, case: str) -> None:
    name, state, config, code = WRONG[case]

    assert code_of(lambda: read_hf(tmp_path, name, state, **config)) == code


def test_unknown_family_lists_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="Qwen3MoeForCausalLM"):
        read_hf(tmp_path, "llama", architectures=["X"])


def test_model_type_decides_where_no_architecture_is_named(tmp_path: Path) -> None:
    assert read_hf(tmp_path, "olmoe", architectures=...).family.name == "olmoe"


def test_windows_that_change_nothing_are_none(tmp_path: Path) -> None:
    for number, (name, config) in enumerate(
        (
            ("qwen3", {"use_sliding_window": False, "sliding_window": 8}),
            ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
            ("mixtral", {"sliding_window": 4096}),
            ("qwen2moe", {"sliding_window": 0}),
        )
    ):
        model = read_hf(tmp_path / str(number), name, **config).model
        assert model.sliding_window is None


def test_mistral_that_is_silent_of_its_window_has_one_of_4096(tmp_path: Path) -> None:
    silent = read_hf(tmp_path / "a", "mistral", sliding_window=..., max_position_embeddings=32768)
    none = read_hf(tmp_path / "b", "mistral", max_position_embeddings=32768)

    assert silent.model.sliding_window == 4096
    assert none.model.sliding_window is None


def gguf_with(name: str, key: str, kind: int, item: Any) -> g.GgufBuilder:
    return gguf_model(name).add(key, kind, item)


GGUF_WRONG = {
    "unknown architecture": (
        g.GgufBuilder().add("general.architecture", g.STRING, "gpt2"),
        "unknown-family",
    ),
    "no architecture": (g.GgufBuilder(), "unknown-family"),
    "dense model of a MoE family": (
        g.GgufBuilder().add("general.architecture", g.STRING, "qwen3moe"),
        "unknown-family",
    ),
    "no embedding": (
        gguf_model("llama", {"output_norm.weight": np.zeros(96, np.float32)}),
        "missing-tensor",
    ),
    "no key": (
        g.GgufBuilder()
        .add("general.architecture", g.STRING, "llama")
        .tensor("token_embd.weight", (3, 4), 0, bytes(48)),
        "bad-config",
    ),
    "sigmoid routing": (
        gguf_with("qwen3moe", "qwen3moe.expert_gating_func", g.U32, 2),
        "unsupported-model",
    ),
    "scaled experts": (
        gguf_with("qwen3moe", "qwen3moe.expert_weights_scale", g.F32, 2.5),
        "unsupported-model",
    ),
    "another attention scale": (
        gguf_with("llama", "llama.attention.scale", g.F32, 0.3),
        "unsupported-model",
    ),
    "longrope": (
        gguf_with("llama", "llama.rope.scaling.type", g.STRING, "longrope"),
        "unsupported-model",
    ),
    "a tensor of another kind": (
        gguf_model("llama").tensor("blk.0.attn_sinks.weight", (6,), 0, bytes(24)),
        "unknown-tensors",
    ),
    "an expert twice": (
        gguf_model("qwen3moe").tensor("blk.0.ffn_up.0.weight", (40, 96), 0, bytes(40 * 96 * 4)),
        "unknown-tensors",
    ),
    "a stack of fewer experts": (
        gguf_model(
            "mixtral",
            stacked_state("mixtral")
            | {"blk.1.ffn_up_exps.weight": np.zeros((4, 72, 96), np.float32)},
        ),
        "tensor-shape",
    ),
    "weights as integers": (
        gguf_model("llama", stacked_state("llama") | {"output_norm.weight": np.zeros(0)}),
        "tensor-shape",
    ),
}


@pytest.mark.parametrize("case", GGUF_WRONG)
def test_gguf_that_is_not_what_it_says_is_refused(tmp_path: Path, case: str) -> None:
    builder, code = GGUF_WRONG[case]

    assert code_of(lambda: read_gguf(tmp_path, builder)) == code


def test_heads_that_differ_by_layer_are_refused_and_equal_ones_read(tmp_path: Path) -> None:
    def build(heads: list[int]) -> g.GgufBuilder:
        builder = gguf_model("llama")
        key = g.string("llama.attention.head_count_kv")
        builder.pairs = [pair for pair in builder.pairs if not pair.startswith(key)]
        return builder.add("llama.attention.head_count_kv", g.ARRAY, (g.I32, heads))

    assert read_gguf(tmp_path, build([2, 2, 2])).model.n_kv_heads == 2
    assert code_of(lambda: read_gguf(tmp_path, build([2, 1, 2]))) == "unsupported-model"


def test_names_with_leading_zeros_are_names_of_their_own() -> None:
    assert split_name("blk.0.x.12.weight") == ("blk.{}.x.{}.weight", (0, 12))
    assert split_name("blk.01.x.²") == ("blk.01.x.²", ())
    assert split_name("blk." + "9" * 5000) == ("blk." + "9" * 5000, ())
