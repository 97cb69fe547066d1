"""Loading dense weights: what a file must have, what it costs, and what comes out."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from colibri_format import DTYPES, INDEX_DTYPE, Layout, Role, SegmentSpec
from colibri_runtime.decoder_errors import ModelError
from colibri_runtime.numpy_backend import NumpyBackend
from colibri_runtime.weights import check_weights, load_weights, resident_bytes
from helpers.memory_model import MemoryFile, MemoryTensor, memory_decoder, memory_file
from helpers.random_models import CONFIGS, prompt_tokens


def as_half(tensor: MemoryTensor) -> MemoryTensor:
    values = tensor.data.view("<f4").astype("<f2")
    return MemoryTensor(DTYPES["f16"], tensor.shape, values.view(np.uint8))


@pytest.mark.parametrize("name", CONFIGS)
def test_loading_allocates_what_was_foretold(name: str) -> None:
    file = memory_file(name)
    stated = resident_bytes(file.tensors, file.model, file.layouts)
    backend = NumpyBackend()

    tracemalloc.start()
    weights = load_weights(file, file.model, backend)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert weights.size_bytes == stated
    # A norm is read on its way to its place; objects and names take the rest.
    assert peak <= stated + 64 * 1024
    assert held >= stated


def test_vectors_are_decoded_and_matrices_stay_as_stored() -> None:
    file = memory_file("qwen3moe")
    file.tensors = {name: as_half(tensor) for name, tensor in file.tensors.items()}

    weights = load_weights(file, file.model, NumpyBackend())

    layer = weights.layers[1]
    stored = file.tensors["blk.1.attn_norm.weight"].data.view("<f2")
    assert layer.attn_norm.dtype == np.float32
    np.testing.assert_array_equal(layer.attn_norm, stored.astype(np.float32))
    assert layer.query.dtype.name == "f16"
    assert not layer.query.data.flags.writeable
    assert layer.query.data.ctypes.data % 64 == 0
    assert resident_bytes(file.tensors, file.model, file.layouts) == weights.size_bytes


def test_a_gate_of_the_shared_expert_may_be_a_matrix_of_one_row() -> None:
    file, tokens = memory_file("qwen2moe"), prompt_tokens("qwen2moe")
    expected = memory_decoder(file).forward(tokens)
    for name, tensor in file.tensors.items():
        if name.endswith("ffn_gate_inp_shexp.weight"):
            assert tensor.shape == (1, 96)
            file.tensors[name] = dataclasses.replace(tensor, shape=(96,))

    np.testing.assert_array_equal(memory_decoder(file).forward(tokens), expected)


def test_frequency_divisors_are_used_when_there() -> None:
    file, tokens = memory_file("llama"), prompt_tokens("llama")
    without = memory_decoder(file).forward(tokens)
    ones = np.ones(10, np.float32)
    file.tensors["rope_freqs.weight"] = MemoryTensor(DTYPES["f32"], (10,), ones.view(np.uint8))
    with_ones = memory_decoder(file).forward(tokens)
    twos = 2 * ones
    file.tensors["rope_freqs.weight"] = MemoryTensor(DTYPES["f32"], (10,), twos.view(np.uint8))

    with_twos = memory_decoder(file).forward(tokens)

    np.testing.assert_array_equal(with_ones, without)
    assert np.abs(with_twos - without).max() > 1e-2


def test_an_output_bias_is_added_when_there() -> None:
    file = memory_file("qwen2moe")
    before = memory_decoder(file).forward([5])
    bias = np.full(96, 0.5, np.float32)
    file.tensors["blk.2.attn_output.bias"] = MemoryTensor(DTYPES["f32"], (96,), bias.view(np.uint8))

    assert np.abs(memory_decoder(file).forward([5]) - before).max() > 1e-3


def test_expert_biases_are_added_when_there() -> None:
    file = memory_file("mixtral")
    layout = file.layouts[0]
    assert layout is not None
    specs = [SegmentSpec(s.role, s.dtype, s.shape) for s in layout.segments]
    for role, size in ((Role.GATE_BIAS, 72), (Role.UP_BIAS, 72), (Role.DOWN_BIAS, 96)):
        specs.append(SegmentSpec(role, DTYPES["f16"], (size,)))
        for expert in range(5):
            file.blocks[0, expert][role] = np.zeros(size, "<f2").view(np.uint8)
    before = memory_decoder(file).forward([5])
    file.layouts[0] = Layout.of(tuple(specs))
    with_zeros = memory_decoder(file).forward([5])
    for expert in range(5):
        file.blocks[0, expert][Role.DOWN_BIAS] = np.ones(96, "<f2").view(np.uint8)

    with_ones = memory_decoder(file).forward([5])

    np.testing.assert_array_equal(with_zeros, before)
    assert np.abs(with_ones - before).max() > 1e-2


def replace_tensor(name: str, **changes: Any) -> Callable[[MemoryFile], None]:
    def change(file: MemoryFile) -> None:
        file.tensors[name] = dataclasses.replace(file.tensors[name], **changes)

    return change


def replace_segments(change: Callable[[list[SegmentSpec]], None]) -> Callable[[MemoryFile], None]:
    def act(file: MemoryFile) -> None:
        layout = file.layouts[0]
        assert layout is not None
        specs = [SegmentSpec(s.role, s.dtype, s.shape) for s in layout.segments]
        change(specs)
        file.layouts[0] = Layout.of(tuple(specs))

    return act


def absent_expert(file: MemoryFile) -> None:
    file.index["size"][1, 4] = 0


def fewer_experts(file: MemoryFile) -> None:
    file.index = np.ones((3, 5), INDEX_DTYPE)


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (lambda f: f.tensors.pop("blk.1.attn_q.weight"), "missing-tensor", "blk.1.attn_q.weight"),
        (lambda f: f.tensors.pop("output.weight"), "missing-tensor", "output.weight"),
        (replace_tensor("blk.0.attn_k.weight", shape=(24, 192)), "tensor-shape", "(24, 192)"),
        (replace_tensor("output_norm.weight", shape=(2, 48)), "tensor-shape", "output_norm.weight"),
        (replace_tensor("output_norm.weight", dtype=DTYPES["i32"]), "unsupported-dtype", "i32"),
        (replace_tensor("output.weight", dtype=DTYPES["i32"]), "unsupported-dtype", "i32"),
        (
            lambda f: f.tensors.update({"blk.0.attn_q.bias": f.tensors["output_norm.weight"]}),
            "unexpected-tensor",
            "blk.0.attn_q.bias",
        ),
        (replace_segments(lambda s: s.pop()), "missing-segment", "down"),
        (
            replace_segments(lambda s: s.append(SegmentSpec(Role.UP_SCALE, DTYPES["f32"], (40,)))),
            "unsupported-segment",
            "up_scale",
        ),
        (
            replace_segments(
                lambda s: s.__setitem__(0, SegmentSpec(Role.GATE, DTYPES["f32"], (41, 96)))
            ),
            "segment-shape",
            "(40, 96)",
        ),
        (
            replace_segments(
                lambda s: s.__setitem__(0, SegmentSpec(Role.GATE, DTYPES["i32"], (40, 96)))
            ),
            "unsupported-dtype",
            "gate",
        ),
        (
            replace_segments(lambda s: s.append(SegmentSpec(Role.UP_BIAS, DTYPES["i32"], (40,)))),
            "unsupported-dtype",
            "up_bias",
        ),
        (absent_expert, "missing-expert", "L1/E4"),
        (fewer_experts, "missing-expert", "L0/E5"),
        (lambda f: setattr(f, "index", f.index[:2]), "layer-count", "2 layers"),
    ],
)
def test_a_file_that_does_not_fit_its_model_is_refused_before_it_is_read(
    change: Callable[[MemoryFile], object], code: str, named: str
) -> None:
    file = memory_file("qwen3moe")
    change(file)

    with pytest.raises(ModelError) as caught:
        check_weights(file, file.model, NumpyBackend())

    assert caught.value.code == code
    assert named in str(caught.value)
    assert "memory.colibri" in str(caught.value)
