"""The reference backend: plain NumPy, any dtype that has a decoder, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType

from .backend import FeedForward, Floats, Matrix
from .dequant import check_decodable, dequantise, has_own_decoder, plain_rows
from .quant_blocks import BLOCK_CODECS, BlockCodec

# Tiles of 512 KiB stay in a core's second-level cache: Q8_0 products ran at 1.4 to 1.55 GB/s
# against 0.8 to 1.1 with 64 to 128 KiB (one core, 768 x 2048), and larger ones gained nothing.
TILE_BYTES: Final = 512 * 1024
# The library gguf's decoders make many temporaries as large as their result.
_FOREIGN_SHARE: Final = 8


class NumpyBackend:
    """Decodes weights tile by tile into one workspace and multiplies with NumPy's BLAS.

    Tiles depend on the weight's shape and dtype alone, and the way of summing on the number of
    tokens as well, so equal calls give equal bits.
    """

    name = "numpy"
    # The tile, what unpacking takes beside it (at most as much again), and products of groups.
    workspace_bytes = 3 * TILE_BYTES

    def __init__(self, *, notes: tuple[str, ...] = ()) -> None:
        """A backend with a workspace of its own; `notes` say why it was taken, for reports."""
        self.notes = notes
        self._tile = np.empty(TILE_BYTES // 4, np.float32)

    def check(self, matrix_name: str, dtype: DType, where: object) -> None:
        """Nothing, when `dtype` has a decoder; else ModelError `unsupported-dtype`."""
        check_decodable(dtype, where, matrix_name)

    def matmul(self, x: Floats, weight: Matrix) -> Floats:
        """`x @ weight.T`: `(n_tokens, columns)` to `(n_tokens, rows)`."""
        n_rows, n_columns = weight.shape
        out = np.empty((len(x), n_rows), np.float32)
        if weight.dtype.name == "f32" and not weight.row_interleave:
            return np.matmul(x, weight.data.view("<f4").reshape(n_rows, n_columns).T, out=out)
        codec = BLOCK_CODECS.get(weight.dtype.name)
        for start, rows in self._tiles(weight):
            stop = start + len(rows)
            if len(x) == 1 and codec is not None:
                out[0, start:stop] = self._multiply_groups(x[0], rows, weight.dtype, codec)
            else:
                tile = self._workspace(len(rows), n_columns)
                dequantise(rows, weight.dtype, tile, weight.name)
                np.matmul(x, tile.T, out=out[:, start:stop])
        return out

    def rows(self, weight: Matrix, ids: NDArray[np.intp]) -> Floats:
        """The rows `ids` of the weight, `(len(ids), columns)`."""
        n_columns = weight.shape[1]
        out = np.empty((len(ids), n_columns), np.float32)
        group = weight.row_interleave or 1
        row_bytes = weight.dtype.row_bytes(n_columns)
        for place, row in enumerate(ids):
            first = int(row) // group * group
            held = weight.data[first * row_bytes : (first + group) * row_bytes]
            plain = plain_rows(held, weight.dtype, (group, n_columns), weight.row_interleave)
            inside = int(row) - first
            dequantise(
                plain[inside : inside + 1], weight.dtype, out[place : place + 1], weight.name
            )
        return out

    def feed_forward(self, x: Floats, network: FeedForward) -> Floats:
        """`down(silu(gate(x)) * up(x))`: `(n_tokens, hidden)`."""
        gate = self.matmul(x, network.gate)
        if network.gate_bias is not None:
            gate += network.gate_bias
        up = self.matmul(x, network.up)
        if network.up_bias is not None:
            up += network.up_bias
        up *= gate
        # silu(g) = g / (1 + exp(-g)); exp overflows to infinity where the quotient is -0 anyway.
        with np.errstate(over="ignore"):
            np.negative(gate, out=gate)
            np.exp(gate, out=gate)
        gate += 1
        up /= gate
        del gate
        out = self.matmul(up, network.down)
        if network.down_bias is not None:
            out += network.down_bias
        return out

    def _workspace(self, n_rows: int, n_columns: int) -> Floats:
        """The workspace as `(n_rows, n_columns)`; grown for rows longer than a tile."""
        if n_rows * n_columns > self._tile.size:
            self._tile = np.empty(n_rows * n_columns, np.float32)
        return self._tile[: n_rows * n_columns].reshape(n_rows, n_columns)

    def _tiles(self, weight: Matrix) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The number of the first row and the plain bytes of each tile, from the first on."""
        n_rows, n_columns = weight.shape
        group = weight.row_interleave or 1
        limit = TILE_BYTES if has_own_decoder(weight.dtype) else TILE_BYTES // _FOREIGN_SHARE
        step = max(limit // (4 * n_columns) // group * group, group)
        row_bytes = weight.dtype.row_bytes(n_columns)
        for start in range(0, n_rows, step):
            stop = min(start + step, n_rows)
            held = weight.data[start * row_bytes : stop * row_bytes]
            shape = (stop - start, n_columns)
            yield start, plain_rows(held, weight.dtype, shape, weight.row_interleave)

    def _multiply_groups(
        self, x: Floats, rows: NDArray[np.uint8], dtype: DType, codec: BlockCodec
    ) -> Floats:
        """`rows @ x` for one token: the values of each group first, then one scale for each sum.

        Scaling sums instead of weights saves a pass over the tile: 1.3 times the speed of
        decoding whole weights, at one token; from two tokens on it costs more than it saves.
        """
        blocks = rows.reshape(-1, dtype.block_bytes)
        m, n_planes, k = codec.runs
        planes = self._workspace(len(rows), x.size).reshape(n_planes, -1, m, k)
        scale, offset = codec.unpack(blocks, planes)
        # What one product sums: a group, or the run of it that lies in a plane.
        span = min(codec.group, k)
        parts = x.reshape(-1, n_planes, k // span, span).transpose(1, 0, 2, 3)
        parts = parts.reshape(n_planes, -1, span, 1)
        runs = planes.reshape(n_planes, len(rows), -1, span).transpose(0, 2, 1, 3)
        sums = np.matmul(runs, parts)[..., 0]
        if span < codec.group:
            sums = sums.sum(axis=0, keepdims=True)
        scales = scale.reshape(len(rows), -1, len(sums), k // span)
        product: Floats = np.zeros(len(rows), np.float32)
        for plane, of_plane in enumerate(sums):
            product += np.einsum("gr,rg->r", of_plane, scales[:, :, plane].reshape(len(rows), -1))
        if offset is not None:
            product += offset.reshape(len(rows), -1) @ x.reshape(-1, codec.group).sum(axis=1)
        return product
