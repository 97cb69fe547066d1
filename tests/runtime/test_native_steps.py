"""The decoder's steps in C beside the reference in NumPy, and beside themselves."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import colibri_format
from colibri_format import DTYPES, DType, Layout, ModelSpec, Role, RopeSpec, SegmentSpec
from colibri_repack.numpy_encode import encode_blocks
from colibri_runtime import native_layers
from colibri_runtime._native import Isa
from colibri_runtime.backend import load_backend
from colibri_runtime.budget import MemoryNeeds, total_bytes
from colibri_runtime.config import RunConfig
from colibri_runtime.decoder_errors import ModelError
from colibri_runtime.native_backend import NativeBackend
from colibri_runtime.native_steps import NativeSteps
from colibri_runtime.runtime import Runtime, describe_needs, read_model
from helpers.kernel_calls import runtime_library
from helpers.memory_model import (
    MemoryFile,
    MemoryStore,
    MemoryTensor,
    memory_decoder,
    memory_file,
)
from helpers.quant_bytes import random_rows
from helpers.random_colibri import make_model, write_random_colibri
from helpers.random_models import CONFIGS, prompt_tokens

ISAS = [Isa.BASE, Isa.BASE | Isa.AVX2, Isa.BASE | Isa.AVX2 | Isa.AVX512]


def relative_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    print(f"relative difference {difference:.1e}")  # for docs/testing.md
    return difference


@pytest.fixture
def backend() -> Iterator[NativeBackend]:
    runtime_library()
    made = NativeBackend(n_threads=2)
    yield made
    made.close()


@pytest.fixture(params=ISAS, ids=["base", "avx2", "avx512"])
def of_one_isa(request: pytest.FixtureRequest) -> Iterator[NativeBackend]:
    if request.param not in runtime_library().isas:
        pytest.skip(f"this processor lacks {request.param!r}")
    made = NativeBackend(n_threads=2, isas=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_with_float_weights_are_those_of_the_reference(
    name: str, of_one_isa: NativeBackend
) -> None:
    """Both compute in float32, in different order: 30 times its precision after three layers."""
    file, tokens = memory_file(name), prompt_tokens(name)
    expected = memory_decoder(file).forward(tokens, all_logits=True)

    found = memory_decoder(file, seed=1, backend=of_one_isa).forward(tokens, all_logits=True)

    assert relative_difference(found, expected) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_batches_threads_and_order_of_arrival_change_no_bit(
    name: str, kv_dtype: str, backend: NativeBackend
) -> None:
    file, tokens = memory_file(name), prompt_tokens(name)
    options: dict[str, Any] = {"kv_dtype": kv_dtype}
    expected = memory_decoder(file, backend=backend, **options).forward(tokens, all_logits=True)

    with_one = NativeBackend(n_threads=1)
    for seed, batch_size in enumerate((1, 3, 17)):
        decoder = memory_decoder(
            file, seed=seed, backend=with_one, batch_size=batch_size, prefetch_depth=seed, **options
        )
        logits = decoder.forward(tokens, all_logits=True)

        np.testing.assert_array_equal(logits, expected)
    with_one.close()


@pytest.mark.parametrize("name", ["qwen3moe", "llama"])
def test_half_precision_keys_and_values_stay_near(name: str, of_one_isa: NativeBackend) -> None:
    """Rounded once where they are stored, to 11 bits."""
    file, tokens = memory_file(name), prompt_tokens(name)
    exact = memory_decoder(file, kv_dtype="float16").forward(tokens)

    found = memory_decoder(file, backend=of_one_isa, kv_dtype="float16").forward(tokens)

    # The reference rounds the same numbers; it may find another neighbour where they lie between.
    assert relative_difference(found, exact) < 2e-3


def stored(values: NDArray[np.float32], dtype: DType) -> NDArray[np.uint8]:
    """`values`, `(rows, columns)`, as `dtype` stores them; of IQ4_NL random bytes as large."""
    if dtype.name == "iq4_nl":
        rows = random_rows(dtype, *values.shape, seed=int(values[0, 0] * 2**20) % 2**20)
        scales = rows.reshape(-1, 18)[:, :2].copy().view("<f2") / 8
        rows.reshape(-1, 18)[:, :2] = scales.astype("<f2").view(np.uint8)
        return rows.reshape(-1)
    if dtype.name == "f16":
        return values.astype("<f2").view(np.uint8).reshape(-1)
    if dtype.name == "bf16":
        return (values.view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(-1)
    return encode_blocks(values.reshape(-1, dtype.block_elements), dtype.name, None).reshape(-1)


def converted(file: MemoryFile, dtype: DType, roles: tuple[Role, ...] = ()) -> MemoryFile:
    """The model with its matrices stored as `dtype` where rows allow; of experts only `roles`."""
    tensors = dict(file.tensors)
    for name, tensor in file.tensors.items():
        is_matrix = len(tensor.shape) == 2 and "gate_inp" not in name
        if is_matrix and tensor.shape[1] % dtype.block_elements == 0:
            values = tensor.data.view("<f4").reshape(tensor.shape)
            tensors[name] = MemoryTensor(dtype, tensor.shape, stored(values, dtype))
    layouts: list[Layout | None] = []
    blocks = {key: dict(block) for key, block in file.blocks.items()}
    for layer, layout in enumerate(file.layouts):
        specs = []
        for segment in layout.segments if layout else ():
            kind = dtype if segment.role in roles else segment.dtype
            specs.append(SegmentSpec(segment.role, kind, segment.shape))
            for key in blocks if kind is dtype else ():
                if key[0] == layer:
                    values = blocks[key][segment.role].view("<f4").reshape(segment.shape)
                    blocks[key][segment.role] = stored(values, dtype)
        layouts.append(Layout.of(tuple(specs)) if layout else None)
    return dataclasses.replace(file, tensors=tensors, layouts=layouts, blocks=blocks)


@pytest.mark.parametrize("kind", ["q8_0", "q4_1", "f16", "bf16", "iq4_nl"])
def test_logits_with_stored_weights_are_near_those_of_the_reference(
    kind: str, backend: NativeBackend
) -> None:
    """Activations are rounded to 8 bits of their group's greatest, or to half precision: each
    product is off by a hundredth at most, and errors of different signs add up to less."""
    file = converted(memory_file("llama"), DTYPES[kind], (Role.GATE, Role.UP))
    tokens = prompt_tokens("llama")
    expected = memory_decoder(file).forward(tokens, all_logits=True)

    found = memory_decoder(file, backend=backend).forward(tokens, all_logits=True)

    assert np.isfinite(expected).all()
    assert relative_difference(found, expected) < (1e-5 if kind == "iq4_nl" else 0.05)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_type_without_kernel_goes_to_numpy_and_is_named(
    batch_size: int, backend: NativeBackend
) -> None:
    file = converted(memory_file("mixtral"), DTYPES["iq4_nl"], (Role.GATE,))
    tokens = prompt_tokens("mixtral")
    expected = memory_decoder(file, batch_size=batch_size).forward(tokens, all_logits=True)
    decoder = memory_decoder(file, backend=backend, batch_size=batch_size, seed=3)

    found = decoder.forward(tokens, all_logits=True)
    working_bytes(backend, file, batch_size)

    assert relative_difference(found, expected) < 1e-5
    assert "iq4_nl" in backend.notes[0]
    assert "NumPy" in backend.notes[0]


def test_experts_of_one_layer_may_be_laid_out_differently(backend: NativeBackend) -> None:
    file = memory_file("mixtral")
    layout = file.layouts[1]
    assert layout is not None
    odd = Layout.of(
        tuple(
            SegmentSpec(s.role, DTYPES["f16"] if s.role is Role.UP else s.dtype, s.shape)
            for s in layout.segments
        )
    )
    for expert in (0, 3):
        up = file.blocks[1, expert][Role.UP].view("<f4").astype("<f2")
        file.blocks[1, expert][Role.UP] = up.view(np.uint8)
    tokens = prompt_tokens("mixtral")
    expected = memory_decoder(file, store=MixedStore(file, {0: odd, 3: odd})).forward(tokens)
    file_of_two = MixedFile(file, odd)

    decoder = memory_decoder(
        file_of_two,  # type: ignore[arg-type]
        store=MixedStore(file, {0: odd, 3: odd}, seed=2),
        backend=backend,
    )

    assert relative_difference(decoder.forward(tokens), expected) < 2e-3


class MixedFile:
    """A file whose layer 1 has blocks of two layouts."""

    def __init__(self, file: MemoryFile, odd: Layout) -> None:
        self._file, self._odd = file, odd
        plain = file.layouts[1]
        self.layouts = (plain, odd)
        self.expert_layouts = np.zeros(file.index.shape, np.uint16)
        self.expert_layouts[1, [0, 3]] = 1

    def is_mixed(self, layer: int) -> bool:
        return layer == 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class MixedStore(MemoryStore):
    """Gives some experts of layer 1 in another layout."""

    def __init__(self, file: MemoryFile, odd: dict[int, Layout], seed: int | None = None) -> None:
        super().__init__(file, seed)
        self._odd = odd

    def _layout(self, layer: int, expert: int) -> Layout:
        return self._odd.get(expert, super()._layout(layer, expert)) if layer == 1 else (
            super()._layout(layer, expert)
        )  # fmt: skip


def working_bytes(backend: NativeBackend, file: MemoryFile, batch_size: int, **more: Any) -> int:
    layouts = [() if layout is None else (layout,) for layout in file.layouts]
    options = {"context": 200, "kv_dtype": "float16", **more}
    return backend.working_bytes(
        file.model, file.tensors, layouts, batch_size=batch_size, **options
    )


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "llama"])
@pytest.mark.parametrize(("batch_size", "all_logits"), [(1, False), (32, True), (200, False)])
@pytest.mark.parametrize("kind", ["f32", "iq4_nl"])
def test_memory_stays_within_what_is_stated(
    name: str, batch_size: int, all_logits: bool, kind: str, backend: NativeBackend
) -> None:
    file = memory_file(name)
    if kind != "f32":
        file = converted(file, DTYPES[kind])
    tokens = [int(t) for t in np.arange(200) % 200]
    stated = working_bytes(backend, file, batch_size, n_logits=200 if all_logits else 1)
    store = MemoryStore(file)

    def beyond_held() -> int:
        tracemalloc.start()
        before = memory_decoder(file, backend=backend, context=1, batch_size=1)
        base = tracemalloc.get_traced_memory()[0]
        decoder = memory_decoder(
            file,
            store=store,
            backend=backend,
            context=200,
            kv_dtype="float16",
            batch_size=batch_size,
        )
        held = decoder.weights.size_bytes + decoder.kv_cache.size_bytes
        decoder.forward(tokens, all_logits)
        peak = tracemalloc.get_traced_memory()[1] - base
        tracemalloc.stop()
        del before
        return peak - held

    blocks = max((layout.block_size for layout in file.layouts if layout), default=0) + 4096
    # Once in a while a table of the interpreter's own (of interned strings) grows meanwhile.
    assert min(beyond_held() for _ in range(2)) <= stated + blocks


def test_an_expert_that_never_comes_is_an_error(backend: NativeBackend) -> None:
    class Short(MemoryStore):
        def _leases(self, layer, order):  # type: ignore[no-untyped-def]
            return super()._leases(layer, order[1:])

    file = memory_file("mixtral")
    decoder = memory_decoder(file, store=Short(file), backend=backend)

    with pytest.raises(ModelError) as caught:
        decoder.forward([5, 6, 7])

    assert caught.value.code == "expert-not-delivered"
    assert decoder.kv_cache.length == 0


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_weights_that_are_no_numbers_still_choose_experts_that_there_are(
    n_tokens: int, backend: NativeBackend
) -> None:
    file = memory_file("qwen3moe")
    file.tensors["blk.0.ffn_norm.weight"].data.view("<f4")[3] = np.nan
    store = MemoryStore(file)
    decoder = memory_decoder(file, store=store, backend=backend)

    logits = decoder.forward(prompt_tokens("qwen3moe")[:n_tokens])

    assert np.isnan(logits).all()
    asked = [experts for kind, _, experts in store.calls if kind == "fetch"]
    assert asked[1] == (0, 1, 2)


def test_ties_of_the_router_go_to_the_lowest_number(backend: NativeBackend) -> None:
    file = memory_file("qwen3moe")
    file.tensors["blk.0.ffn_gate_inp.weight"].data[:] = 0
    store = MemoryStore(file)

    memory_decoder(file, store=store, backend=backend).forward([5, 6])

    assert store.calls[0] == ("fetch", 0, (0, 1, 2))


def test_heads_too_wide_for_the_library_are_computed_in_numpy(backend: NativeBackend) -> None:
    wide = native_layers.MAX_HEAD_DIM + 16
    model = ModelSpec(
        family="llama", n_layers=1, hidden_size=32, vocab_size=8, context_length=64, n_heads=1,
        n_kv_heads=1, head_dim=wide, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4, n_dims=wide),
        ffn_size=16, tie_embeddings=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (8, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (wide, 32), "blk.0.attn_k": (wide, 32), "blk.0.attn_v": (wide, 32),
        "blk.0.attn_output": (32, wide), "blk.0.ffn_norm": (32,),
    }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) / 6).astype(np.float32)
        tensors[f"{name}.weight"] = MemoryTensor(
            DTYPES["f32"], shape, values.view(np.uint8).reshape(-1)
        )
    parts = ((Role.GATE, (16, 32)), (Role.UP, (16, 32)), (Role.DOWN, (32, 16)))
    layout = Layout.of(tuple(SegmentSpec(role, DTYPES["f32"], shape) for role, shape in parts))
    block = {
        role: (rng.standard_normal(shape) / 6).astype(np.float32).view(np.uint8).reshape(-1)
        for role, shape in parts
    }
    index = np.zeros((1, 1), [("offset", "<u8"), ("size", "<u8")])
    index["size"] = layout.block_size
    file = MemoryFile(model, tensors, [layout], {(0, 0): block}, index=index)

    found = memory_decoder(file, backend=backend).forward([1, 2, 3])

    assert relative_difference(found, memory_decoder(file).forward([1, 2, 3])) < 1e-5


def test_records_of_another_size_are_refused(
    monkeypatch: pytest.MonkeyPatch, backend: NativeBackend
) -> None:
    monkeypatch.setattr(native_layers, "LAYER", np.dtype([("attn_norm", "u8")]))

    with pytest.raises(ModelError) as caught:
        memory_decoder(memory_file("llama"), backend=backend)

    assert caught.value.code == "native-records"


def test_an_error_of_the_library_is_told(backend: NativeBackend) -> None:
    decoder = memory_decoder(memory_file("llama"), backend=backend)
    steps = decoder._steps
    assert isinstance(steps, NativeSteps)
    steps._decoder["workspace_bytes"] = 64

    with pytest.raises(ModelError, match="ENOSPC") as caught:
        decoder.forward([5])

    assert caught.value.code == "native-call"
    assert decoder.kv_cache.length == 0


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native") / "moe.colibri"
    model = make_model(n_layers=4, hidden=96, width=64, n_experts=10, top_k=2)
    write_random_colibri(path, model)
    return path


def test_logits_are_the_same_bits_with_a_tenth_of_the_experts(model_file: Path) -> None:
    """With all of them resident, with a tenth, read ahead or not, by one thread or by three."""
    runtime_library()
    tokens = list(range(20, 52))
    base = RunConfig(context=40, backend="auto", batch_size=16)
    needs = needs_of(model_file, base)
    found = []
    for n_slots, depth, threads in ((40, 1, 2), (4, 1, 1), (4, 0, 3), (4, 2, 2), (1, 1, 2)):
        budget = total_bytes(needs, n_slots, io_threads=2) + 64 * 1024
        config = dataclasses.replace(
            base, memory_bytes=budget, prefetch_depth=depth, threads=threads
        )
        with Runtime.open(model_file, config) as runtime:
            assert runtime.backend.name == "native"
            found.append(runtime.decoder.forward(tokens, all_logits=True))

    for logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0])


def needs_of(path: Path, config: RunConfig) -> MemoryNeeds:
    with colibri_format.open(path) as reader:
        backend = load_backend(config.backend)
        needs = describe_needs(reader, read_model(reader), backend, config)
        backend.close()  # type: ignore[attr-defined]
    return needs
