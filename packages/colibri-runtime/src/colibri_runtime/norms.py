"""RMSNorm."""

from __future__ import annotations

import numpy as np

from .backend import Floats


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang & Sennrich, 1910.07467).

    `x` is `(..., n) float32`, `weight` `(n,)` or broadcastable to `x`; the result is new.
    """
    scale = np.einsum("...i,...i->...", x, x)[..., np.newaxis]
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    out: Floats = x / scale
    out *= weight
    return out
