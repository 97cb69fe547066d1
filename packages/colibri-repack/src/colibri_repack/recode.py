"""Elements from one encoding to another: the C library over threads, or NumPy without it."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES, DType

from ._native import ElementError, native
from .errors import RepackError
from .numpy_decode import decode_blocks
from .numpy_encode import encode_blocks, half

# Types that both engines read and write.
RECODABLE: Final = frozenset(
    {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"}
    | {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4"}
)
# Whole quant blocks of every type.
UNIT_ELEMENTS: Final = 256
# A piece below is not worth a thread's 50 microseconds.
_PIECE_ELEMENTS: Final = 2**15
_NUMPY_PIECE: Final = 2**17
_FAR_TOO_LARGE: Final = np.float32(1e12)  # as in csrc/convert.c, which says why
_HALF_SCALES: Final = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
}


def default_threads() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def engine_name() -> str:
    """What recodes here: `C (avx512)`, or `NumPy` and why there is no better."""
    loaded = native()
    if loaded.library is None:
        return f"NumPy, up to 25 times slower than C ({loaded.reason})"
    return f"C ({loaded.library.best.name.lower() if loaded.library.best.name else '?'})"


def is_slow() -> bool:
    """Whether NumPy does the work."""
    return native().library is None


def recode(
    data: NDArray[np.uint8],
    source: DType,
    target: DType,
    *,
    columns: int = 0,
    weights: NDArray[np.float32] | None = None,
    n_threads: int | None = None,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """The elements of `data`, contiguous bytes of `source`, as bytes of `target`, in `out`.

    The bytes are those of ggml's `ggml_quantize_chunk`, the same on every processor, with any
    number of threads, and in NumPy. `data` is whole quant blocks of both types; with `weights`,
    `(columns,)` float32 importances, whole rows of `columns`.

    Raises:
        ElementError: an element is not finite, or does not fit `target`; the first such one.
        RepackError: `requantize` for a type that nothing here decodes.
        ValueError: sizes that cannot be.
    """
    for dtype in (source, target):
        if dtype.name not in RECODABLE:
            raise RepackError("requantize", "quantise", f"encoding {dtype.name}",
                              f"one of {', '.join(sorted(RECODABLE))}")  # fmt: skip
    n_blocks, rest = divmod(data.size, source.block_bytes)
    n = n_blocks * source.block_elements
    unit = columns if weights is not None else max(source.block_elements, target.block_elements)
    if rest or unit <= 0 or n % unit or unit % max(source.block_elements, target.block_elements):
        raise ValueError(f"{data.size} bytes of {source.name} are no whole units of {unit}")
    if out is None:
        out = np.empty(target.size_bytes((n,)), np.uint8)
    if out.size != target.size_bytes((n,)):
        raise ValueError(f"{out.size} bytes for {n} elements of {target.name}")
    result = out
    n_threads = n_threads or default_threads()
    least = _NUMPY_PIECE if is_slow() else max(_PIECE_ELEMENTS, -(-n // n_threads))
    piece = -(-least // unit) * unit
    starts = range(0, n, piece)

    def work(start: int) -> None:
        stop = min(start + piece, n)
        try:
            _recode_piece(
                data[_bytes_at(source, start) : _bytes_at(source, stop)],
                source,
                result[_bytes_at(target, start) : _bytes_at(target, stop)],
                target,
                columns,
                weights,
            )
        except ElementError as error:
            raise ElementError(start + error.index, error.is_finite) from None

    if n_threads == 1 or len(starts) < 2:
        for start in starts:
            work(start)
        return result
    futures: list[Future[None]] = [_pool(n_threads).submit(work, start) for start in starts[1:]]
    first: ElementError | None = None
    try:
        work(starts[0])
    except ElementError as error:
        first = error
    for future in futures:
        try:
            future.result()
        except ElementError as error:
            first = first or error
    if first is not None:
        raise first
    return result


def unit_elements(source: DType, target: DType, columns: int) -> int:
    """How many elements `recode` takes at least: whole quant blocks, or rows of `columns` > 0."""
    # 256 where one of the types has blocks: pieces of different types then end alike.
    return columns or (
        UNIT_ELEMENTS if max(source.block_elements, target.block_elements) > 1 else 1
    )


@cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, thread_name_prefix="colibri-recode")


def _bytes_at(dtype: DType, element: int) -> int:
    return element // dtype.block_elements * dtype.block_bytes


def _recode_piece(
    data: NDArray[np.uint8],
    source: DType,
    out: NDArray[np.uint8],
    target: DType,
    columns: int,
    weights: NDArray[np.float32] | None,
) -> None:
    library = native().library
    if library is not None:
        library.convert(data, source, out, target, columns=columns, weights=weights)
    else:
        recode_in_numpy(data, source, out, target, weights)


def recode_in_numpy(
    data: NDArray[np.uint8],
    source: DType,
    out: NDArray[np.uint8],
    target: DType,
    weights: NDArray[np.float32] | None = None,
) -> None:
    """Fill `out` as `NativeLibrary.convert` does, bit for bit.

    Raises:
        ElementError: as there.
    """
    values = decode(data, source)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ElementError(int(bad[0]), is_finite=False)
    if target.is_quantised:
        out[:] = encode_blocks(values, target.name, weights)
        _check_scales(values, out, target)
        return
    if target.name == "f32":
        out[:] = values.view(np.uint8)
        return
    if target.name == "f16":
        with np.errstate(over="ignore"):
            out[:] = half(values).reshape(-1)
        beyond = (out.view("<u2") & 0x7C00) == 0x7C00
    else:
        bits = values.view(np.uint32)
        bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        out[:] = bits.astype("<u2").view(np.uint8)
        beyond = (out.view("<u2") & 0x7F80) == 0x7F80
    if beyond.any():
        raise ElementError(int(beyond.argmax()), is_finite=True)


def _check_scales(values: NDArray[np.float32], out: NDArray[np.uint8], target: DType) -> None:
    if target.name not in _HALF_SCALES:
        return
    blocks = out.reshape(-1, target.block_bytes)
    beyond = (np.abs(values) > _FAR_TOO_LARGE).reshape(-1, target.block_elements).any(axis=1)
    for at in _HALF_SCALES[target.name]:
        beyond |= (blocks[:, at + 1] & 0x7C) == 0x7C
    if beyond.any():
        raise ElementError(int(beyond.argmax()) * target.block_elements, is_finite=True)


def decode(data: NDArray[np.uint8], source: DType) -> NDArray[np.float32]:
    """The numbers in `data`, contiguous bytes of `source`, as float32; flat, in NumPy.

    May share the memory of `data`. `source` is one of `RECODABLE`.
    """
    if source.name == "f32":
        return data.view("<f4")
    if source.name == "f16":
        return data.view("<f2").astype(np.float32)
    if source.name == "bf16":
        # bfloat16 is the upper half of a float32 (Intel, BFLOAT16 numerics definition, 2018).
        bits = data.view("<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return decode_blocks(data.reshape(-1, source.block_bytes), source.name)


def element(data: NDArray[np.uint8], source: DType, index: int) -> float:
    """The number at `index` of `data`."""
    block = index // source.block_elements
    at = block * source.block_bytes
    values = decode(np.array(data[at : at + source.block_bytes]), source)
    return float(values[index % source.block_elements])


def quantise_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """`values`, whose number is a multiple of 32, as Q8_0 quant blocks of 34 bytes.

    Raises:
        ElementError, ValueError: as `recode`.
    """
    flat = np.ascontiguousarray(values, "<f4").reshape(-1)
    return recode(flat.view(np.uint8), DTYPES["f32"], DTYPES["q8_0"])
