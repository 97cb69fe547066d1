"""A GGUF of a published model's shape with random weights, whose routing and text are known.

Three things make it fit to measure engines with. Its routing is skewed as in real models: one
channel of the residual stream is the same for every token in every layer, and through it each
router adds a bias that falls with the logarithm of a shuffled rank. Its greedy text is known: the
output head is the embedding table moved along one cycle through the whole vocabulary, and the
layers add little to the stream, so that after token t comes `cycle[t]` in any engine. And its
weights are valid, of zero mean and of the usual variance (1 / columns), so that activations
neither grow nor vanish.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import StorageError

from .synthetic_shape import Shape, plan_skew
from .synthetic_weights import generator, q4_k, q8_0, q8_0_value

CONSTANT: Final = 1.5
"""What the constant channel holds beside entries of standard deviation 1."""

# What a layer's attention and experts add to the stream, against an embedding of 1: so little
# that the embedding still decides the next token after all layers.
_ATTENTION_GAIN: Final = 0.1
_EXPERT_GAIN: Final = 0.4
# Logits are 2048 products of entries of 1: this brings them to the usual size.
_OUTPUT_GAIN: Final = 1 / 64
_RMS_EPS: Final = 1e-5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be made: its name, its shape as `(rows, columns)` or more, ggml's type."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[np.random.Generator], NDArray[Any]]


def greedy_cycle(shape: Shape, seed: int) -> NDArray[np.intp]:
    """`(vocab_size,)`: which token follows each, one cycle through all (Sattolo 1986)."""
    rng = generator(seed, "cycle")
    order = rng.permutation(shape.vocab_size)
    follows = np.empty(shape.vocab_size, np.intp)
    follows[order] = np.roll(order, -1)
    return follows


def expert_ranks(shape: Shape, seed: int, layer: int) -> NDArray[np.intp]:
    """`(n_experts,)`: each expert's rank in the layer's routing, 1 the hottest."""
    return generator(seed, f"ranks/{layer}").permutation(shape.n_experts) + 1


def plan_tensors(shape: Shape, seed: int) -> list[Tensor]:
    """Every tensor of the model, in the order of the file."""
    hidden, width = shape.hidden_size, shape.expert_size
    n_key = hidden // shape.n_heads * shape.n_kv_heads
    deviation = hidden**-0.5
    slope = plan_skew(shape)

    def embedding() -> NDArray[np.uint8]:
        table = q8_0(generator(seed, "embedding"), shape.vocab_size, hidden, 1.0)
        # The first value of the first block is the constant channel.
        table[:, 0, 2] = q8_0_value(1.0, CONSTANT)
        return table

    def head(_: np.random.Generator) -> NDArray[np.uint8]:
        moved = np.empty((shape.vocab_size, hidden // 32, 34), np.uint8)
        moved[greedy_cycle(shape, seed)] = embedding()
        return moved

    def vector(name: str, size: int, value: float = 1.0) -> Tensor:
        return Tensor(name, (size,), "F32", lambda _: np.full(size, value, np.float32))

    def dense(name: str, rows: int, gain: float = 1.0, *, is_output: bool = False) -> Tensor:
        def make(rng: np.random.Generator) -> NDArray[np.uint8]:
            blocks = q8_0(rng, rows, hidden, gain * deviation)
            if is_output:
                blocks[0, :, 2:] = 0  # adds nothing to the constant channel
            return blocks

        return Tensor(name, (rows, hidden), "Q8_0", make)

    def experts(name: str, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        def make(rng: np.random.Generator) -> NDArray[np.uint8]:
            blocks = q4_k(rng, shape.n_experts * rows, columns, gain * columns**-0.5)
            if columns == width:
                blocks.reshape(shape.n_experts, rows, -1, 144)[:, 0, :, :4] = 0
            return blocks

        return Tensor(name, (shape.n_experts, rows, columns), "Q4_K", make)

    def router(layer: int) -> Tensor:
        def make(rng: np.random.Generator) -> NDArray[np.float32]:
            rows = rng.standard_normal((shape.n_experts, hidden), np.float32)
            rows *= np.float32(deviation)
            rows[:, 0] = -slope / CONSTANT * np.log(expert_ranks(shape, seed, layer))
            return rows

        name = f"blk.{layer}.ffn_gate_inp.weight"
        return Tensor(name, (shape.n_experts, hidden), "F32", make)

    def layer_tensors(layer: int) -> Iterator[Tensor]:
        prefix = f"blk.{layer}"
        yield vector(f"{prefix}.attn_norm.weight", hidden)
        yield dense(f"{prefix}.attn_q.weight", hidden)
        yield dense(f"{prefix}.attn_k.weight", n_key)
        yield dense(f"{prefix}.attn_v.weight", n_key)
        if shape.has_qk_norm:
            yield vector(f"{prefix}.attn_q_norm.weight", hidden)
            yield vector(f"{prefix}.attn_k_norm.weight", n_key)
        yield dense(f"{prefix}.attn_output.weight", hidden, _ATTENTION_GAIN, is_output=True)
        yield vector(f"{prefix}.ffn_norm.weight", hidden)
        yield router(layer)
        yield experts(f"{prefix}.ffn_gate_exps.weight", width, hidden)
        yield experts(f"{prefix}.ffn_up_exps.weight", width, hidden)
        yield experts(f"{prefix}.ffn_down_exps.weight", hidden, width, _EXPERT_GAIN)

    table = (shape.vocab_size, hidden)
    return [
        Tensor("token_embd.weight", table, "Q8_0", lambda _: embedding()),
        *(tensor for layer in range(shape.n_layers) for tensor in layer_tensors(layer)),
        vector("output_norm.weight", hidden, _OUTPUT_GAIN),
        Tensor("output.weight", table, "Q8_0", head),
    ]


def write_model(
    path: Path, shape: Shape, seed: int = 1, *, progress: Progress | None = None
) -> int:
    """Writes the model as a GGUF to `path`, tensor by tensor; the bytes of its tensors.

    Takes memory for one stacked tensor. The file has its name only when it is complete.

    Raises:
        StorageError: `file-exists`, or what the kernel refused.
    """
    if path.exists():
        raise StorageError(
            "file-exists", path, "exists already", "a new name is required", "remove it first"
        )
    part = path.with_name(f"{path.name}.part")
    try:
        total = _write(part, shape, seed, progress)
        part.replace(path)
    except OSError as error:
        raise StorageError.of(error, path, "writing a synthetic model") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return total


def _write(path: Path, shape: Shape, seed: int, progress: Progress | None) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, shape.architecture)
    try:
        _describe(writer, shape)
        tensors = plan_tensors(shape, seed)
        sizes = []
        for tensor in tensors:
            dtype = GGMLQuantizationType[tensor.dtype]
            block_elements, block_bytes = GGML_QUANT_SIZES[dtype]
            row_bytes = tensor.shape[-1] // block_elements * block_bytes
            stored = (*tensor.shape[:-1], row_bytes)
            size = int(np.prod(stored))
            element = np.dtype(np.float32) if tensor.dtype == "F32" else np.dtype(np.uint8)
            shown = tensor.shape if tensor.dtype == "F32" else stored
            writer.add_tensor_info(tensor.name, shown, element, size, raw_dtype=dtype)
            sizes.append(size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            writer.write_tensor_data(tensor.make(generator(seed, tensor.name)))
            done += size
            if progress is not None:
                progress(done, sum(sizes))
    finally:
        writer.close()
    return sum(sizes)


def _describe(writer: Any, shape: Shape) -> None:
    from gguf import TokenType

    head_dim = shape.hidden_size // shape.n_heads
    writer.add_name(f"synthetic {shape.name}")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.expert_size)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(_RMS_EPS)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(shape.n_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    # A byte-level tokenizer must have a merge, and its result must be a token.
    merged = "\u0120t"
    names = (f"\u0120t{n}" for n in range(257, shape.vocab_size - 1))
    writer.add_token_list([*_byte_signs(), merged, *names, "<eos>"])
    writer.add_token_types([TokenType.NORMAL] * (shape.vocab_size - 1) + [TokenType.CONTROL])
    writer.add_token_merges([" ".join(merged)])
    writer.add_eos_token_id(shape.vocab_size - 1)
    writer.add_add_bos_token(False)


def _byte_signs() -> list[str]:
    """The printable character that stands for each byte (GPT-2's encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]
