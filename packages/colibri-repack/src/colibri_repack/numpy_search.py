"""Searches for the scales of groups of weights in NumPy: csrc/search.h, all groups side by side.

Arrays are `(n, n_groups)` float32, one column a group, so that sums run over the first axis in the
order that ggml adds in; the results are bit for bit those of the C code. Groups that make
infinities or NaN on the way do the same there, so callers silence NumPy's warnings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Levels = NDArray[np.int32]

TINY: Final = np.float32(1e-15)
_ZERO: Final = np.float32(0)
_ONE: Final = np.float32(1)


@dataclass(frozen=True, slots=True)
class Fit:
    """Scale and minimum of each group `(n_groups,)`, and the levels behind them `(n, n_groups)`."""

    scale: Floats
    minimum: Floats
    level: Levels
    weight_sum: Floats


@dataclass(frozen=True, slots=True)
class RangeGrid:
    """Inverse scales (first + step * i + top) / range for i up to n_steps; `top`: highest level."""

    top: int
    first: float
    step: float
    n_steps: int
    is_absolute: bool = False


def nearest(values: Floats) -> Levels:
    """The nearest integers as `nearest` of csrc/lanes.h, beyond 2^22 its arbitrary ones too."""
    bits = (values + np.float32(12582912)).view(np.int32)
    return (bits & 0x007FFFFF) - 0x00400000


def ordered_sum(terms: Floats) -> Floats:
    """Sums over the first axis, term after term in float32."""
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


def search_range(x: Floats, w: Floats, grid: RangeGrid) -> Fit:
    """Fits x by scale * level - minimum (ggml-quants.c, make_qkx2_quants and make_qkx3_quants)."""
    low, high = x.min(axis=0), x.max(axis=0)
    # Of zeros of both signs the first counts, and C's comparisons keep it.
    low = np.where(low == 0, np.take_along_axis(x, (x == low).argmax(0)[None], 0)[0], low)
    low = np.where(low > 0, _ZERO, low)
    is_flat = high == low
    flat_low = low
    weight_sum = ordered_sum(w)
    x_sum = ordered_sum(w * x)

    def levels(inverse: Floats, base: Floats) -> Levels:
        return np.clip(nearest(inverse * (x - base)), 0, grid.top)

    def error(scale: Floats, level: Floats, base: Floats) -> Floats:
        difference = scale * level + base - x
        cost = np.abs(difference) if grid.is_absolute else difference * difference
        return ordered_sum(w * cost)

    inverse = np.float32(grid.top) / (high - low)
    scale = _ONE / inverse
    best = levels(inverse, low)
    best_error = error(scale, best.astype(np.float32), low)
    for step in range(grid.n_steps + 1):
        start = np.float32(grid.first) + np.float32(grid.step) * np.float32(step)
        level = levels((start + np.float32(grid.top)) / (high - low), low)
        l = level.astype(np.float32)  # noqa: E741
        weighted = w * l
        l_sum = ordered_sum(weighted)
        l2_sum = ordered_sum(weighted * l)
        xl_sum = ordered_sum(weighted * x)
        determinant = weight_sum * l2_sum - l_sum * l_sum
        fitted: Floats = np.divide(l2_sum * x_sum - l_sum * xl_sum, determinant)
        slope: Floats = np.divide(weight_sum * xl_sum - x_sum * l_sum, determinant)
        slope = np.where(fitted > 0, xl_sum / l2_sum, slope)
        fitted = np.where(fitted > 0, _ZERO, fitted)
        this_error = error(slope, l, fitted)
        is_better = (determinant > 0) & (this_error < best_error)
        best_error = np.where(is_better, this_error, best_error)
        best = np.where(is_better, level, best)
        scale = np.where(is_better, slope, scale)
        low = np.where(is_better, fitted, low)
    return Fit(
        np.where(is_flat, _ZERO, scale),
        -np.where(is_flat, flat_low, low),
        np.where(is_flat, 0, best),
        weight_sum,
    )


def largest(x: Floats) -> Floats:
    """The first element of the largest magnitude of each group."""
    # Plus 0, so that of zeros only it is +0, as in C, where the search starts from it.
    found: Floats = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], 0)[0]
    return found + _ZERO


def search_scale(x: Floats, w: Floats, half: int) -> Fit:
    """Fits x by scale * (level - half) (ggml-quants.c, make_qx_quants); all zero: level 0."""
    most = largest(x)
    is_zero = np.abs(most) < TINY
    scale = gain = level = None
    for shift in (0, *range(-9, 0), *range(1, 10)):
        inverse = -(np.float32(half) + np.float32(0.1) * np.float32(shift)) / most
        tried = np.clip(nearest(inverse * x), -half, half - 1)
        l = tried.astype(np.float32)  # noqa: E741
        xl_sum, l2_sum = ordered_sum(w * x * l), ordered_sum(w * l * l)
        if scale is None or gain is None or level is None:
            scale = np.where(l2_sum != 0, xl_sum / l2_sum, _ZERO)
            gain, level = scale * xl_sum, tried
            continue
        is_better = (l2_sum > 0) & (xl_sum * xl_sum > gain * l2_sum)
        scale = np.where(is_better, xl_sum / l2_sum, scale)
        gain = np.where(is_better, scale * xl_sum, gain)
        level = np.where(is_better, tried, level)
    assert scale is not None and level is not None
    return Fit(
        np.where(is_zero, _ZERO, scale),
        np.zeros_like(most),
        np.where(is_zero, 0, level + half),
        ordered_sum(w),
    )


def search_q3(x: Floats) -> Fit:
    """Fits x by scale * (level - 4), then moves single levels (ggml-quants.c, make_q3_quants)."""
    most = largest(x)
    is_zero = np.abs(most) < TINY
    level = np.clip(nearest(np.float32(-4) / most * x), -4, 3).astype(np.float32)
    w = x * x
    xl_sum, l2_sum = ordered_sum(w * x * level), ordered_sum(w * level * level)
    for _ in range(5):
        is_changed = False
        for i in range(len(x)):
            xl = xl_sum - w[i] * x[i] * level[i]
            l2 = l2_sum - w[i] * level[i] * level[i]
            moved = np.clip(nearest(x[i] * l2 / xl), -4, 3).astype(np.float32)
            is_better = (xl > 0) & (moved != level[i]) & ~is_zero
            xl = xl + w[i] * x[i] * moved
            l2 = l2 + w[i] * moved * moved
            is_better &= (l2 > 0) & (xl * xl * l2_sum > xl_sum * xl_sum * l2)
            level[i] = np.where(is_better, moved, level[i])
            xl_sum = np.where(is_better, xl, xl_sum)
            l2_sum = np.where(is_better, l2, l2_sum)
            is_changed |= bool(is_better.any())
        if not is_changed:
            break
    scale = np.where((l2_sum > 0) & ~is_zero, xl_sum / l2_sum, _ZERO)
    stored = np.where(is_zero, 0, level.astype(np.int32) + 4)
    return Fit(scale, np.zeros_like(scale), stored, np.zeros_like(scale))


def fit_positive(x: Floats, w: Floats, top: int) -> tuple[Floats, NDArray[np.uint8]]:
    """d and levels 0..top with x about d * level (ggml-quants.c, make_qp_quants).

    `x` and `w` are `(n, n_groups)`. Levels of negative x wrap at 256, as ggml's bytes do.
    """
    high = np.maximum(x.max(axis=0), _ZERO)
    is_zero = high < TINY
    inverse = np.float32(top) / high

    def error(inverse: Floats, level: NDArray[np.float32]) -> Floats:
        difference = x - _ONE / inverse * level
        return ordered_sum(w * difference * difference)

    best_error = error(inverse, nearest(inverse * x).astype(np.uint8).astype(np.float32))
    for shift in (*range(-4, 0), *range(1, 5)):
        tried = (np.float32(0.1) * np.float32(shift) + np.float32(top)) / high
        this_error = error(tried, np.minimum(nearest(tried * x), top).astype(np.float32))
        is_better = this_error < best_error
        best_error = np.where(is_better, this_error, best_error)
        inverse = np.where(is_better, tried, inverse)
    first = np.minimum(nearest(inverse * x), top)
    l = first.astype(np.float32)  # noqa: E741
    xl_sum, l2_sum = ordered_sum(w * x * l), ordered_sum(w * l * l)
    level = first.astype(np.uint8)
    for _ in range(5):
        is_changed = False
        for i in range(len(x)):
            old = level[i].astype(np.float32)
            xl = xl_sum - w[i] * x[i] * old
            l2 = l2_sum - w[i] * old * old
            moved = np.minimum(nearest(x[i] * l2 / xl), top)
            is_better = (xl > 0) & (l2 > 0) & (moved != level[i])
            new = moved.astype(np.float32)
            xl = xl + w[i] * x[i] * new
            l2 = l2 + w[i] * new * new
            is_better &= xl * xl * l2_sum > xl_sum * xl_sum * l2
            level[i] = np.where(is_better, moved.astype(np.uint8), level[i])
            xl_sum = np.where(is_better, xl, xl_sum)
            l2_sum = np.where(is_better, l2, l2_sum)
            is_changed |= bool(is_better.any())
        if not is_changed:
            break
    d = np.where((l2_sum > 0) & ~is_zero, xl_sum / l2_sum, _ZERO)
    return d, np.where(is_zero, np.uint8(0), level)
