"""Weights of a checkpoint as slices, FP8 ones together with their block scales."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from colibri_format import DTYPES

from ..decoding import FP8_DTYPES, Fp8Decoder, Fp8Form, Slice
from ..errors import SourceError
from ..sources import Source, SourceTensor
from ..tuples import tuples_of
from .members import Members

SCALE_SUFFIX: Final = "_scale_inv"
_BLOCK: Final = (128, 128)
_SCALE_DTYPES: Final = frozenset({"f32", "bf16", "f16", "e8m0"})


def check_quantisation(source: Source, packings: frozenset[str]) -> tuple[int, int]:
    """Rows and columns that share a scale, if the checkpoint is FP8; else what that would be.

    `packings` are the values of `quant_method` beside FP8 that the family's tables understand.

    Raises:
        SourceError: `quantised-checkpoint` for GPTQ, AWQ, FP8 of another kind and the like.
    """
    config = source.config.get("quantization_config")
    if config is None or source.format != "safetensors":
        return _BLOCK
    method = config.get("quant_method") if isinstance(config, dict) else config
    if isinstance(config, dict) and isinstance(method, str):
        if method in packings:
            return _BLOCK
        block = config.get("weight_block_size")
        if method == "fp8" and isinstance(block, list) and len(block) == 2:
            sizes = Members({"rows": block[0], "columns": block[1]}, source.path,
                            "")  # fmt: skip
            return sizes.count("rows", most=2**20), sizes.count("columns", most=2**20)
    raise SourceError(
        "quantised-checkpoint",
        source.path,
        f"its tensors are quantised ({str(method)[:40]})",
        "F32, F16 or BF16 tensors, FP8 with block scales"
        + "".join(f", {name}" for name in sorted(packings)),
        "take the unquantised checkpoint, or a GGUF of it",
    )


class Weights:
    """Cuts tensors into slices. `tensors` are the source's without the scales of others."""

    def __init__(self, source: Source, block: tuple[int, int], form: Fp8Form) -> None:
        self._source = source
        self._block = block
        self._form = form
        self._scales: dict[str, SourceTensor] = {}
        self.decoded: set[str] = set()
        every = source.tensors
        # Matrices are many and alike: each kind of them is looked at once.
        checked: set[tuple[object, ...]] = set()
        self.tensors: dict[str, SourceTensor] = dict(every)
        for scale_name in [name for name in every if name.endswith(SCALE_SUFFIX)]:
            scale, tensor = every[scale_name], every.get(scale_name[: -len(SCALE_SUFFIX)])
            if tensor is None:
                continue
            kind = tensor.dtype.name, tensor.shape, scale.dtype.name, scale.shape
            if kind not in checked:
                if tensor.dtype.name not in FP8_DTYPES or len(tensor.shape) < 2:
                    continue
                self._check(tensor, scale)
                checked.add(kind)
            self._scales[tensor.name] = scale
            del self.tensors[scale_name]
        self._decoder: Fp8Decoder | None = None
        if form is not Fp8Form.KEEP:
            self._decoder = Fp8Decoder(self._scales, block, DTYPES[form.value])

    def has_scale(self, tensor: SourceTensor) -> bool:
        """Whether the tensor is FP8 with block scales."""
        return tensor.name in self._scales

    @property
    def keeps_scales(self) -> bool:
        """Whether there are FP8 weights that stay as they are, their scales beside them."""
        return self._form is Fp8Form.KEEP and bool(self._scales)

    def whole(self, tensor: SourceTensor) -> Slice:
        """All of `tensor`."""
        if len(tensor.shape) == 2:
            return self.rows(tensor, 0, 0, tensor.shape[0])
        # A stack of matrices of which no row of scales belongs to two is one tall matrix.
        if self.has_scale(tensor) and self._form is not Fp8Form.KEEP:
            raise self._refuse(tensor, "a stack of FP8 matrices that are no experts")
        return Slice(tensor, 0, tensor.shape or (1,))

    def rows(self, tensor: SourceTensor, matrix: int, first: int, n_rows: int) -> Slice:
        """`n_rows` rows from `first` on of matrix number `matrix` of a stack (0: of a matrix)."""
        shape, dtype = tensor.shape, tensor.dtype
        columns = shape[-1]
        row = matrix * shape[-2] + first
        offset = row * columns // dtype.block_elements * dtype.block_bytes
        if dtype.name not in FP8_DTYPES:
            return Slice(tensor, offset, (n_rows, columns))
        if tensor.name not in self._scales:
            raise SourceError(
                "missing-tensor",
                self._source.path,
                f"has no {tensor.name + SCALE_SUFFIX!r}",
                f"{tensor.name} is {tensor.dtype.name}: it is nothing without its scales",
                "fetch the whole model",
            )
        if self._decoder is not None:
            self.decoded.add(tensor.name)
        return Slice(tensor, offset, (n_rows, columns), self._decoder)

    def alike(self, tensors: Sequence[SourceTensor]) -> list[Slice] | None:
        """Each of `tensors` whole, where they are matrices of one shape and encoding; else None.

        None, too, where scales stand beside them.
        """
        _, dtype, shape, *_ = tensors[0]
        decoder = None
        if len(shape) != 2 or 0 in shape:
            return None
        if any(tensor.dtype is not dtype or tensor.shape != shape for tensor in tensors):
            return None
        if dtype.name in FP8_DTYPES:
            names = {tensor.name for tensor in tensors}
            if self._decoder is None or not names <= self._scales.keys():
                return None
            decoder = self._decoder
            self.decoded |= names
        rows = zip(tensors, repeat(0), repeat(shape), repeat(decoder), strict=False)
        return list(tuples_of(Slice, rows))

    def scales(self, tensor: SourceTensor, matrix: int, first: int, n_rows: int) -> Slice | None:
        """The scales of those rows, where they are kept; None where there are none.

        Raises:
            SourceError: `unsupported-model` where the rows start or end inside a block.
        """
        if self._decoder is not None:
            return None
        scale = self._scales.get(tensor.name)
        if scale is None:
            return None
        height = tensor.shape[-2]
        if first % self._block[0] or (first + n_rows < height and n_rows % self._block[0]):
            raise self._refuse(tensor, f"{n_rows} rows from {first} on")
        grid = scale.shape[-2:]
        n_grid = -(-n_rows // self._block[0])
        at = (matrix * grid[0] + first // self._block[0]) * grid[1] * scale.dtype.block_bytes
        return Slice(scale, at, (n_grid, grid[1]))

    def notes(self) -> list[str]:
        """What was done to FP8 weights, in words."""
        if self.keeps_scales:
            return [f"{len(self._scales)} FP8 tensors keep their bytes, scales beside them"]
        if not self.decoded:
            return []
        return [
            f"{len(self.decoded)} FP8 tensors with block scales are decoded to {self._form.value}"
        ]

    def _refuse(self, tensor: SourceTensor, found: str) -> SourceError:
        return SourceError(
            "unsupported-model",
            f"{tensor.file}: tensor {tensor.name!r}",
            found,
            f"whole blocks of {self._block[0]} rows, or matrices, to keep or apply scales",
            "repack with --fp8 bf16",
        )

    def _check(self, tensor: SourceTensor, scale: SourceTensor) -> None:
        *stack, rows, columns = tensor.shape
        height, width = self._block
        grid = (*stack, -(-rows // height), -(-columns // width))
        if scale.shape != grid:
            raise SourceError(
                "tensor-shape",
                f"{scale.file}: tensor {scale.name!r}",
                f"has shape {scale.shape}",
                f"blocks of {height} x {width} of {tensor.shape} make it {grid}",
                "weights and scales are of different models: fetch both again",
            )
        if scale.dtype.name not in _SCALE_DTYPES:
            raise SourceError(
                "unsupported-dtype",
                f"{scale.file}: tensor {scale.name!r}",
                f"is {scale.dtype.name}",
                "F32, F16, BF16 or F8_E8M0 scales",
            )
