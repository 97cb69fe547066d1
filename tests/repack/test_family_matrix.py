"""The families that engines run: source x quantisation, every tensor of the written file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_format
from colibri_format import parse_model
from colibri_repack import open_source, quantise_q8_0, read_checkpoint, repack
from colibri_repack.families import is_matrix
from helpers import family_states as f
from helpers.gguf_models import canonical_state, gguf_model
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import Entry, write_folder

# One model of each family; variants differ in arithmetic, not in tensors.
NAMES = ("qwen3moe-tied-dense-layer", "qwen2moe", "olmoe", "mixtral", "llama", "mistral", "qwen2",
         "qwen3")  # fmt: skip


def expected(array: np.ndarray[Any, Any], quant: str, is_weight: bool) -> tuple[str, bytes]:
    """Encoding and bytes that a float32 tensor becomes."""
    if quant == "keep" or not is_weight:
        return "f32", array.tobytes()
    if array.shape[-1] % 32:
        return "f16", array.astype("<f2").tobytes()
    return "q8_0", quantise_q8_0(np.ascontiguousarray(array).reshape(-1)).tobytes()


@pytest.mark.parametrize("quant", ["keep", "q8_0"])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_the_file_is_the_sources(
    tmp_path: Path, name: str, kind: str, quant: str
) -> None:
    path = tmp_path / "in.gguf"
    if kind == "gguf":
        gguf_model(name).write(path)
    else:
        path = write_folder(tmp_path / "in", dict(random_state(name)), CONFIGS[name])

    repack(path, tmp_path / "out.colibri", quant=quant)

    left = dict(canonical_state(name))
    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert file.verify() == []
        for key in file.tensors:
            tensor = file.tensor(key)
            want = expected(left.pop(key), quant, is_matrix(key))
            assert (tensor.dtype.name, tensor.read_plain().tobytes()) == want, key
        is_moe = file.geometry.n_experts > 1
        for layer, expert in np.argwhere(file.index["size"]).tolist():
            block = file.expert(layer, expert)
            data = block.read()
            for s in block.segments:
                stem = f"blk.{layer}.ffn_{s.role.name.lower()}"
                key = f"{stem}.{expert}.weight" if is_moe else f"{stem}.weight"
                payload = block.plain(s, data).tobytes()
                assert (s.dtype.name, payload) == expected(left.pop(key), quant, True), key
        model = parse_model(file.read_file("model.json"))
        assert model == read_checkpoint(open_source(path)).model
    assert not left


@pytest.mark.parametrize("quant", ["keep", "q8_0"])
@pytest.mark.parametrize(
    "item",
    [("I64", "<i8"), ("I32", "<i4"), ("I16", "<i2"), ("I8", "|i1"), ("U8", "|u1"), ("F64", "<f8"),
     ("F8_E8M0", "|u1"), ("F8_E5M2", "|u1")],
)  # fmt: skip
def test_dense_tensors_of_no_weights_pass_through_repack_only_families(
    tmp_path: Path, item: tuple[str, str], quant: str
) -> None:
    name, word = item
    values = np.arange(7).astype(word)
    state: dict[str, Entry] = dict(f.hf_state("phimoe"))
    state["lm_head.bias"] = (name, (7,), values.tobytes())
    folder = write_folder(tmp_path / "in", state, f.config("phimoe"))

    repack(folder, tmp_path / "out.colibri", quant=quant)

    with colibri_format.open(tmp_path / "out.colibri") as file:
        assert file.tensor("output.bias").read_plain().tobytes() == values.tobytes()
