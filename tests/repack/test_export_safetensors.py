"""Files repacked from safetensors, exported as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from colibri_format import ColibriError
from colibri_repack import export, quantise_q8_0, repack
from helpers import family_states as f
from helpers.gguf_models import stacked_state
from helpers.hf_tokenizers import byte_level, sentence_piece
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import bf16, write_folder

Array = np.ndarray[Any, np.dtype[Any]]
# Models that GGUF and llama.cpp can say: what CONFIGS makes hard on purpose is set straight.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": {},
    "qwen2moe": {"mlp_only_layers": []},
    "olmoe": {"num_key_value_heads": 6},
    "mixtral": {},
    "llama": {},
    "llama-scaled": {},
    "llama-linear": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}


@pytest.fixture(autouse=True)
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, changes in MODELS.items():
        monkeypatch.setitem(CONFIGS, name, CONFIGS[name] | changes)


def folder_of(path: Path, name: str, *, half: bool = False, **config: Any) -> Path:
    state: dict[str, Any] = dict(random_state(name))
    if half:
        state = {key: bf16(value) for key, value in state.items()}
    return write_folder(path, state, CONFIGS[name] | config)


def exported(tmp_path: Path, folder: Path, **options: Any) -> gguf.GGUFReader:
    repack(folder, tmp_path / "m.colibri", **options)
    export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    return gguf.GGUFReader(tmp_path / "out.gguf")


def with_tokenizer(tmp_path: Path, data: bytes, name: str = "qwen3moe", **config: Any) -> Path:
    folder = folder_of(tmp_path / "hf", name, **config)
    (folder / "tokenizer.json").write_bytes(data)
    return folder


def keys_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def expected_state(name: str) -> dict[str, Array]:
    """The model's tensors as llama.cpp's converter gives them."""
    config = CONFIGS[name]
    state = dict(stacked_state(name))
    for key, tensor in state.items():
        n_heads = config["num_attention_heads" if "attn_q" in key else "num_key_value_heads"]
        is_turned = key.endswith((".attn_q.weight", ".attn_k.weight"))
        if is_turned and config["model_type"] in ("llama", "mixtral", "mistral"):
            # LlamaModel.permute in convert_hf_to_gguf.py
            heads = tensor.reshape(n_heads, 2, tensor.shape[0] // n_heads // 2, *tensor.shape[1:])
            state[key] = heads.swapaxes(1, 2).reshape(tensor.shape)
    return state


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_what_llamacpps_converter_makes(tmp_path: Path, name: str) -> None:
    reader = exported(tmp_path, folder_of(tmp_path / "hf", name))

    left = expected_state(name)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight" and name == "llama-scaled":
            continue
        want = left.pop(tensor.name)
        assert tensor.tensor_type.name == "F32"
        shape = tuple(int(n) for n in reversed(tensor.shape))
        assert shape == tuple(n for n in want.shape if not (n == 1 and "inp_shexp" in tensor.name))
        assert tensor.data.tobytes() == want.tobytes(), tensor.name
    assert not left


def test_vectors_and_routers_become_f32_and_matrices_stay(tmp_path: Path) -> None:
    reader = exported(tmp_path, folder_of(tmp_path / "hf", "llama", half=True))

    state = expected_state("llama")
    for tensor in reader.tensors:
        bits = state[tensor.name].view(np.uint32) >> 16
        is_vector = "norm" in tensor.name
        assert tensor.tensor_type.name == ("F32" if is_vector else "BF16")
        want = (bits << 16).astype("<u4") if is_vector else bits.astype("<u2")
        assert tensor.data.tobytes() == want.tobytes(), tensor.name
    assert keys_of(reader)["general.file_type"] == 32


@pytest.mark.parametrize("layout", ["plain", "x16"])
def test_quantised_rows_change_places_whole(tmp_path: Path, layout: str) -> None:
    reader = exported(tmp_path, folder_of(tmp_path / "hf", "llama"), quant="q8_0", layout=layout)

    state = expected_state("llama")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in ("blk.1.attn_q.weight", "blk.1.attn_k.weight", "blk.0.ffn_up.weight"):
        want = quantise_q8_0(np.ascontiguousarray(state[name]).reshape(-1))
        assert tensors[name].data.tobytes() == want.tobytes(), name
    assert keys_of(reader)["general.file_type"] == 7


def test_keys_describe_the_model(tmp_path: Path) -> None:
    keys = keys_of(exported(tmp_path, folder_of(tmp_path / "hf", "qwen2moe")))

    config = CONFIGS["qwen2moe"]
    assert keys["general.architecture"] == "qwen2moe"
    for key, member in {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.head_count_kv": "num_key_value_heads",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "vocab_size": "vocab_size",
    }.items():
        assert keys[f"qwen2moe.{key}"] == config[member], key


def test_scaled_rotation_is_told_as_llamacpp_reads_it(tmp_path: Path) -> None:
    linear = keys_of(exported(tmp_path, folder_of(tmp_path / "a", "llama-linear")))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = folder_of(tmp_path / "b", "qwen3moe", rope_scaling=yarn)
    (tmp_path / "y").mkdir()
    yarned = keys_of(exported(tmp_path / "y", folder))

    assert linear["llama.rope.scaling.type"] == "linear"
    assert yarned["qwen3moe.rope.scaling.type"] == "yarn"
    assert yarned["qwen3moe.rope.scaling.factor"] == 4.0
    assert yarned["qwen3moe.rope.scaling.original_context_length"] == 64


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("qwen3moe", {"norm_topk_prob": False}, "norm_top_k"),
        ("olmoe", {"norm_topk_prob": True}, "norm_top_k"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("mixtral", {"sliding_window": 9}, "sliding_window"),
        ("qwen3moe", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("qwen3moe", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 0.7}}, "mscale"),
        ("llama", {"partial_rotary_factor": 0.5}, "elements turn"),
    ],
)  # fmt: skip
def test_what_llamacpp_would_compute_otherwise_is_refused(
    tmp_path: Path, name: str, config: dict[str, Any], named: str
) -> None:
    repack(folder_of(tmp_path / "hf", name, **config), tmp_path / "m.colibri")

    with pytest.raises(ColibriError, match=named) as caught:
        export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    assert caught.value.code == "cannot-export"
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["qwen3moe-tied-dense-layer", "qwen2moe"])
def test_layers_without_experts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(
        CONFIGS, name, CONFIGS[name] | {"mlp_only_layers": [1], "norm_topk_prob": name[4] == "3"}
    )
    repack(folder_of(tmp_path / "hf", name), tmp_path / "m.colibri")

    with pytest.raises(ColibriError, match="without experts") as caught:
        export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    assert caught.value.code == "cannot-export"


def test_key_heads_fewer_than_heads_are_refused_for_olmoe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "olmoe", CONFIGS["olmoe"] | {"num_key_value_heads": 2})
    repack(folder_of(tmp_path / "hf", "olmoe"), tmp_path / "m.colibri")

    with pytest.raises(ColibriError, match="6 heads and 2") as caught:
        export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    assert caught.value.code == "cannot-export"


def test_families_that_are_repacked_only_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", dict(f.hf_state("phimoe")), f.config("phimoe"))
    repack(folder, tmp_path / "m.colibri")

    with pytest.raises(ColibriError, match="repacked only") as caught:
        export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    assert caught.value.code == "cannot-export"


def test_without_a_tokenizer_there_is_no_vocabulary_and_a_note(tmp_path: Path) -> None:
    repack(folder_of(tmp_path / "hf", "qwen3moe"), tmp_path / "m.colibri")

    report = export(tmp_path / "m.colibri", tmp_path / "out.gguf")

    assert keys_of(gguf.GGUFReader(tmp_path / "out.gguf"))["tokenizer.ggml.model"] == "no_vocab"
    assert "no vocabulary" in report.notes[0]


def test_a_byte_level_tokenizer_is_told_in_full(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path, byte_level())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))

    keys = keys_of(exported(tmp_path, folder))

    record = json.loads(byte_level())
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    vocab = record["model"]["vocab"]
    assert keys["tokenizer.ggml.tokens"][: len(vocab)] == list(vocab)
    assert len(keys["tokenizer.ggml.tokens"]) == CONFIGS["qwen3moe"]["vocab_size"]
    assert keys["tokenizer.ggml.tokens"][-1] == "[PAD202]"
    types = keys["tokenizer.ggml.token_type"]
    assert (types[:4], types[-1]) == ([3, 3, 3, 1], 5)
    assert keys["tokenizer.ggml.merges"] == [" ".join(m) for m in record["model"]["merges"]]
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert not keys["tokenizer.ggml.add_bos_token"]
    assert keys["tokenizer.chat_template"] == "{{ x }}"


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False}]}, "smollm"),
    ],
)  # fmt: skip
def test_ways_to_cut_words_get_llamacpps_names(
    tmp_path: Path, pre_tokenizer: dict[str, Any], name: str
) -> None:
    data = byte_level(pre_tokenizer=pre_tokenizer)

    keys = keys_of(exported(tmp_path, with_tokenizer(tmp_path, data)))

    assert keys["tokenizer.ggml.pre"] == name


def test_a_sentencepiece_tokenizer_gets_scores_in_the_order_of_its_merges(tmp_path: Path) -> None:
    data = sentence_piece()
    record = json.loads(data)
    n_tokens = len(record["model"]["vocab"])
    folder = tmp_path / "hf"
    state = dict(random_state("mixtral"))
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        state[key] = np.resize(state[key], (n_tokens, state[key].shape[1]))
    write_folder(folder, state, CONFIGS["mixtral"] | {"vocab_size": n_tokens})
    (folder / "tokenizer.json").write_bytes(data)

    keys = keys_of(exported(tmp_path, folder))

    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    made = ["".join(merge.split(" ")) for merge in record["model"]["merges"]]
    ranks = [scores[tokens.index(token)] for token in dict.fromkeys(made)]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == len(ranks)
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    assert keys["tokenizer.ggml.unknown_token_id"] == 0


BPE = json.loads(byte_level())["model"]
SPM = json.loads(sentence_piece())


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"{}",
        byte_level(model={"type": "Unigram", "vocab": []}),
        byte_level(model=BPE | {"vocab": {"a": 203}}),
        byte_level(model=BPE | {"vocab": {"a": 5, "b": 5}}),
        byte_level(model=BPE | {"ignore_merges": True}),
        byte_level(normalizer={"type": "Lowercase"}),
        byte_level(pattern=r"\w+"),
        byte_level(pre_tokenizer={"type": "Whitespace"}),
        byte_level(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}),
        byte_level(post_processor={"type": "RobertaProcessing"}),
        byte_level(post_processor={"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<pad>", "type_id": 0}}, {"Sequence": {"id": "A"}}]}),
        byte_level(model=BPE | {"byte_fallback": True, "merges": ["a b", "c d", "ab c", "a bc"]}),
        byte_level(model=BPE | {"byte_fallback": True, "merges": ["a bc", "c d", "ab c"]}),
    ],
)  # fmt: skip
def test_a_tokenizer_that_llamacpp_would_read_otherwise_is_refused(
    tmp_path: Path, data: bytes
) -> None:
    repack(with_tokenizer(tmp_path, data), tmp_path / "m.colibri")

    with pytest.raises(ColibriError) as caught:
        export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    assert caught.value.code == "unsupported-tokenizer"
