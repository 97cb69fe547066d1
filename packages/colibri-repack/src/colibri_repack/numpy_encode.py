"""Encoders in NumPy, for machines without the C library: slow, and bit for bit the same.

Layouts and roundings are those of csrc/blocks32.h and csrc/blocks256.h, which name their sources.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .numpy_search import (
    Fit,
    Floats,
    RangeGrid,
    fit_positive,
    largest,
    nearest,
    ordered_sum,
    search_q3,
    search_range,
    search_scale,
)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.integer[Any]]

_FIFTH: Final = ("q5_0", "q5_1")
_RANGE: Final = ("q4_1", "q5_1")
_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)  # twice the values, as ggml has them
_BELOW_HALF: Final = np.float32(0.49999997)


def encode_blocks(values: Floats, name: str, weights: Floats | None) -> Bytes:
    """`values`, whole rows `(n_rows, n_columns)` if `weights` `(n_columns,)` are given, as `name`.

    `name` is a quantised type; values are finite.
    """
    with np.errstate(all="ignore"):
        if name.endswith("_k"):
            return _encode_256(values, name, weights)
        if name == "q8_0":
            return _encode_q8_0(values)
        if name == "mxfp4":
            return _encode_mxfp4(values)
        if weights is not None:
            return _encode_weighted(values, name, weights)
        return (_encode_range if name in _RANGE else _encode_symmetric)(values, name in _FIFTH)


def half(values: Floats) -> Bytes:
    """float16 bytes `(..., 2)`."""
    return np.ascontiguousarray(values.astype("<f2")[..., None]).view(np.uint8)


def _rounded_half(values: Floats) -> Floats:
    return values.astype("<f2").astype(np.float32)


def _truncated(values: Floats) -> NDArray[np.int8]:
    """Low bytes of the integers; out of range 0, as of x86's 0x80000000."""
    fits = (values >= -(2.0**31)) & (values < 2.0**31)
    return np.where(fits, values, np.float32(0)).astype(np.int32).astype(np.int8)


def _inverse(values: Floats) -> Floats:
    return np.where(values != 0, np.float32(1) / values, np.float32(0))


def _nibbles(level: Ints, has_fifth: bool) -> list[Ints]:
    """`level` `(n_blocks, 32)`: the fifth bits if there are, and 16 bytes of nibbles."""
    low = level & 15
    parts: list[Ints] = [low[:, :16] | low[:, 16:] << 4]
    if has_fifth:
        parts.insert(0, np.packbits(level >> 4 & 1, axis=1, bitorder="little"))
    return parts


def _join(*parts: Ints) -> Bytes:
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=1).reshape(-1)


def _encode_symmetric(values: Floats, has_fifth: bool) -> Bytes:
    x = values.reshape(-1, 32)
    middle = 16 if has_fifth else 8
    d = largest(x.T) / np.float32(-middle)
    level = _truncated(x * _inverse(d)[:, None] + np.float32(middle + 0.5))
    top = np.int8(2 * middle - 1)
    return _join(half(d), *_nibbles(np.minimum(level, top).view(np.uint8), has_fifth))


def _encode_range(values: Floats, has_fifth: bool) -> Bytes:
    x = values.reshape(-1, 32)
    low = x.min(axis=1)
    first = np.take_along_axis(x, (x == low[:, None]).argmax(1)[:, None], 1)[:, 0]
    low = np.where(low == 0, first, low)
    d = (x.max(axis=1) - low) / np.float32(31 if has_fifth else 15)
    level = _truncated((x - low[:, None]) * _inverse(d)[:, None] + np.float32(0.5))
    if not has_fifth:
        level = np.minimum(level, 15)
    return _join(half(d), half(low), *_nibbles(level.astype(np.uint8), has_fifth))


def _encode_q8_0(values: Floats) -> Bytes:
    x = values.reshape(-1, 32)
    d = np.abs(x).max(axis=1) / np.float32(127)
    scaled = x * _inverse(d)[:, None]
    level = _truncated(scaled + np.copysign(_BELOW_HALF, scaled))
    return _join(half(d), level.view(np.uint8))


def _encode_mxfp4(values: Floats) -> Bytes:
    x = values.reshape(-1, 32)
    most = np.abs(x).max(axis=1)
    logarithm = np.log2(most.astype(np.float64)).astype(np.float32)
    exponent = np.where(most > 0, np.floor(logarithm) + 125, 0).clip(0, 254).astype(np.int32)
    bits = np.where(exponent < 2, 0x00200000 << exponent.clip(0, 1), (exponent - 1) << 23)
    unit = bits.astype(np.int32).view(np.float32)
    size = np.abs(x)
    best, level = size.copy(), np.zeros(x.shape, np.uint8)
    for index in range(1, 8):
        error = np.abs(_E2M1[index] * unit[:, None] - size)
        level = np.where(error < best, np.uint8(index), level)
        best = np.minimum(error, best)
    level = np.where((level > 0) & (x < 0), level + np.uint8(8), level)
    return _join(exponent.astype(np.uint8)[:, None], *_nibbles(level, False))


def _encode_weighted(values: Floats, name: str, weights: Floats) -> Bytes:
    n_columns = len(weights)
    rows = values.reshape(-1, n_columns)
    sigma2 = ordered_sum((rows * rows).T) / np.float32(n_columns)
    w = weights * np.sqrt(sigma2[:, None] + rows * rows)
    x, w = (np.ascontiguousarray(a.reshape(-1, 32).T) for a in (rows, w))
    has_fifth = name in _FIFTH
    if name in _RANGE:
        fit = search_range(x, w, RangeGrid(31 if has_fifth else 15, -0.9, 0.05, 36))
        scales = [half(fit.scale), half(-fit.minimum)]
    else:
        fit = search_scale(x, w, 16 if has_fifth else 8)
        scales = [half(fit.scale)]
    return _join(*scales, *_nibbles(fit.level.T.astype(np.uint8), has_fifth))


def _encode_256(values: Floats, name: str, weights: Floats | None) -> Bytes:
    x = values.reshape(-1, 256)
    w = None
    if weights is not None:
        w = np.broadcast_to(weights, (values.size // len(weights), len(weights))).reshape(-1, 256)
        if name != "q6_k":
            factor = np.float32(1 if name == "q2_k" else 2)
            sigma2 = factor * ordered_sum((x * x).T) / np.float32(256)
            w = w * np.sqrt(sigma2[:, None] + x * x)
    if name == "q2_k":
        return _encode_q2_k(x, w)
    if name == "q3_k":
        return _encode_q3_k(x, w)
    if name == "q6_k":
        return _encode_q6_k(x, w)
    return _encode_q45_k(x, w, name == "q5_k")


def _columns(blocks: Floats, size: int) -> Floats:
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def _levels(blocks: Floats, d: Floats, m: Floats | None, low: int, high: int, fit: Fit) -> Bytes:
    """`(n_blocks, 256)` levels from 0 under stored scales `(n_blocks, n_groups)`.

    Where a scale is 0 the levels of the search stay.
    """
    n_blocks, n_groups = d.shape
    x = blocks.reshape(n_blocks, n_groups, -1)
    raised = x if m is None else x + m[:, :, None]
    level = np.clip(nearest(raised / d[:, :, None]), low, high) - low
    searched = fit.level.T.reshape(x.shape)
    chosen = np.where((d != 0)[:, :, None], level, searched)
    return chosen.reshape(n_blocks, 256).astype(np.uint8)


def _pairs(level: Ints) -> Ints:
    l = level.reshape(-1, 2, 4, 32)  # noqa: E741
    packed = l[:, :, 0] | l[:, :, 1] << 2 | l[:, :, 2] << 4 | l[:, :, 3] << 6
    return packed.reshape(-1, 64)


def _step(scales: Floats, top: int) -> tuple[Floats, NDArray[np.int32]]:
    """The largest scale over `top`, and every scale in that unit; of none above 0, zeros."""
    most = np.maximum(scales.max(axis=1), np.float32(0))
    inverse = np.where(most > 0, np.float32(top) / most, np.float32(0))
    return most / np.float32(top), nearest(inverse[:, None] * scales)


def _encode_q2_k(x: Floats, w: Floats | None) -> Bytes:
    columns = _columns(x, 16)
    if w is None:
        fit = search_range(columns, np.abs(columns), RangeGrid(3, -0.5, 0.1, 15, is_absolute=True))
    else:
        fit = search_range(columns, _columns(w, 16), RangeGrid(3, -0.9, 0.05, 36))
    scale, minimum, weight = (a.reshape(-1, 16) for a in (fit.scale, fit.minimum, fit.weight_sum))
    if w is None:
        (d, ls), (m, lm) = _step(scale, 15), _step(minimum, 15)
        scales: Ints = (ls | lm << 4).astype(np.uint8)
    else:
        d, low = fit_positive(scale.T, weight.T, 15)
        m, high = fit_positive(minimum.T, weight.T, 15)
        scales = (low | high << 4).T
    level = _levels(
        x,
        _rounded_half(d)[:, None] * (scales & 15).astype(np.float32),
        _rounded_half(m)[:, None] * (scales >> 4).astype(np.float32),
        0,
        3,
        fit,
    )
    return _join(np.ascontiguousarray(scales), _pairs(level), half(d), half(m))


def _encode_q3_k(x: Floats, w: Floats | None) -> Bytes:
    columns = _columns(x, 16)
    if w is None:
        fit = search_q3(columns)
        scale = fit.scale.reshape(-1, 16)
        most = largest(scale.T)
        inverse = np.float32(-32) / most
        d = np.where(most != 0, np.float32(1) / inverse, np.float32(0))
        wrapped = nearest(inverse[:, None] * scale).astype(np.int8).astype(np.int32)
        stored = np.where((most != 0)[:, None], np.clip(wrapped, -32, 31) + 32, 0)
    else:
        fit = search_scale(columns, _columns(w, 16), 4)
        outer = search_scale(_columns(fit.scale, 16), _columns(fit.weight_sum, 16), 32)
        d, stored = outer.scale, outer.level.T
    low = stored & 15
    high = (stored >> 4).reshape(-1, 4, 4)
    scales = np.concatenate(
        [low[:, :8] | low[:, 8:] << 4,
         high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6], axis=1
    ).astype(np.uint8)  # fmt: skip
    dl = _rounded_half(d)[:, None] * (stored - 32).astype(np.float32)
    level = _levels(x, dl, None, -4, 3, fit)
    mask = np.packbits(level.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little")
    return _join(mask.reshape(-1, 32), _pairs(level & 3), scales, half(d))


def _encode_q45_k(x: Floats, w: Floats | None, has_fifth: bool) -> Bytes:
    columns = _columns(x, 32)
    top = 31 if has_fifth else 15
    if w is None:
        mean = np.sqrt(ordered_sum(columns * columns) / np.float32(32))
        grid = RangeGrid(top, -0.5 if has_fifth else -1.0, 0.1, 15 if has_fifth else 20)
        fit = search_range(columns, mean + np.abs(columns), grid)
    else:
        fit = search_range(columns, _columns(w, 32), RangeGrid(top, -0.9, 0.05, 36))
    scale, minimum, weight = (a.reshape(-1, 8) for a in (fit.scale, fit.minimum, fit.weight_sum))
    if w is None:
        (d, wide_s), (m, wide_m) = _step(scale, 63), _step(minimum, 63)
        ls, lm = wide_s.astype(np.uint8), wide_m.astype(np.uint8)
    else:
        d, ls = fit_positive(scale.T, weight.T, 63)
        m, lm = fit_positive(minimum.T, weight.T, 63)
        ls, lm = ls.T, lm.T
    if w is None or has_fifth:
        ls, lm = np.minimum(ls, 63), np.minimum(lm, 63)
    scales = np.concatenate(
        [ls[:, :4] | ls[:, 4:] >> 4 << 6,
         lm[:, :4] | lm[:, 4:] >> 4 << 6,
         (ls[:, 4:] & 15) | (lm[:, 4:] & 15) << 4], axis=1
    )  # fmt: skip
    s = np.concatenate([scales[:, :4] & 63, scales[:, 8:] & 15 | scales[:, :4] >> 6 << 4], axis=1)
    o = np.concatenate([scales[:, 4:8] & 63, scales[:, 8:] >> 4 | scales[:, 4:8] >> 6 << 4], axis=1)
    level = _levels(
        x,
        _rounded_half(d)[:, None] * s.astype(np.float32),
        _rounded_half(m)[:, None] * o.astype(np.float32),
        0,
        top,
        fit,
    )
    parts: list[Ints] = [half(d), half(m), scales]
    if has_fifth:
        fifth = np.packbits(level.reshape(-1, 8, 32) >> 4, axis=1, bitorder="little")
        parts.append(fifth.reshape(-1, 32))
    pairs = (level & 15).reshape(-1, 4, 2, 32)
    return _join(*parts, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128))


def _encode_q6_k(x: Floats, w: Floats | None) -> Bytes:
    columns = _columns(x, 16)
    fit = search_scale(columns, columns * columns if w is None else _columns(w, 16), 32)
    scale = fit.scale.reshape(-1, 16)
    most = largest(scale.T)
    inverse = np.float32(-128) / most
    d = np.float32(1) / inverse
    stored = np.minimum(nearest(inverse[:, None] * scale), 127).astype(np.int8)
    level = _levels(x, _rounded_half(d)[:, None] * stored.astype(np.float32), None, -32, 31, fit)
    l = level.reshape(-1, 2, 4, 32)  # noqa: E741
    low = (l[:, :, :2] & 15) | (l[:, :, 2:] & 15) << 4
    h = l >> 4
    high = h[:, :, 0] | h[:, :, 1] << 2 | h[:, :, 2] << 4 | h[:, :, 3] << 6
    packed = np.concatenate(
        [low.reshape(-1, 128), high.reshape(-1, 64), stored.view(np.uint8), half(d)], axis=1
    )
    packed[np.abs(most) < np.float32(1e-15)] = 0
    return packed.reshape(-1)
