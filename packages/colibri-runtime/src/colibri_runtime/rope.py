"""Rotary position embedding: frequencies, their scalings, and the turning itself."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import RopeSpec, is_float32

from .backend import Floats
from .decoder_errors import ModelError

# Members that `config.json` keeps beside a scaling's own numbers.
_NAMES: Final = {"type", "rope_type", "rope_theta"}
_MEMBERS: Final[dict[str, tuple[set[str], set[str]]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "attention_factor", "truncate"},
    ),
}


class Rope:
    """Turns queries and keys by their positions (Su et al. 2021, arXiv 2104.09864, eq. 34).

    Frequencies are computed in float64; angles of positions up to 2^24 are exact to float32.

    Args:
        spec: what the model says.
        divisors: `(n_dims / 2,)` numbers that divide the frequencies (tensor
            `rope_freqs.weight`), or None.
        where: file name for messages.

    Raises:
        ModelError: `unsupported-rope-scaling` naming the type or member that is not understood.
    """

    def __init__(
        self, spec: RopeSpec, divisors: Floats | None = None, where: object = "model"
    ) -> None:
        self.n_dims = spec.n_dims
        self.is_interleaved = spec.style == "interleaved"
        self.frequencies, self.magnitude = _frequencies(spec, where)
        if divisors is not None:
            if spec.scaling is not None and _kind(spec.scaling) != "default":
                raise _refuse(
                    where,
                    f"both rope_freqs.weight and scaling {_kind(spec.scaling)!r}",
                    "one of them: each changes the same frequencies",
                )
            self.frequencies = self.frequencies / divisors

    def tables(self, start: int, n_positions: int) -> tuple[Floats, Floats]:
        """Cosines and sines of positions `start` on, each `(n_positions, n_dims / 2) float32`."""
        positions = np.arange(start, start + n_positions, dtype=np.float64)
        angles = positions[:, np.newaxis] * self.frequencies
        return (
            (np.cos(angles) * self.magnitude).astype(np.float32),
            (np.sin(angles) * self.magnitude).astype(np.float32),
        )

    def turn(self, heads: Floats, tables: tuple[Floats, Floats]) -> None:
        """Turns `heads`, `(n_positions, n_heads, head_dim) float32`, in place by `tables`."""
        cosines, sines = (table[:, np.newaxis] for table in tables)
        part = heads[..., : self.n_dims]
        if self.is_interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
        else:
            first, second = part[..., : self.n_dims // 2], part[..., self.n_dims // 2 :]
        turned = first * cosines
        turned -= second * sines
        second *= cosines
        second += first * sines
        first[:] = turned


def _frequencies(spec: RopeSpec, where: object) -> tuple[NDArray[np.float64], float]:
    """Angle a position, for each pair, and the factor on cosines and sines."""
    exponents = np.arange(0, spec.n_dims, 2, dtype=np.float64) / spec.n_dims
    frequencies = float(spec.theta) ** -exponents
    if spec.scaling is None:
        return frequencies, 1.0
    scaling = spec.scaling
    kind = _kind(scaling)
    if kind not in _MEMBERS:
        raise _refuse(where, f"rope scaling {kind!r}", f"one of {', '.join(_MEMBERS)}")
    needed, optional = _MEMBERS[kind]
    members = {name for name, value in scaling.items() if value is not None} - _NAMES
    if kind == "default":
        return frequencies, 1.0
    if missing := needed - members:
        raise _refuse(
            where,
            f"rope scaling {kind!r} without {', '.join(sorted(missing))}",
            f"the members {', '.join(sorted(needed))}",
        )
    if kind == "linear":
        optional = optional | {"original_max_position_embeddings"}
    if unknown := members - needed - optional:
        raise _refuse(
            where,
            f"rope scaling {kind!r} with {', '.join(sorted(unknown))}",
            f"no members but {', '.join(sorted(needed | optional))}",
        )
    for name in members - {"truncate"}:
        value = scaling[name]
        if not is_float32(value) or value <= 0:
            raise _refuse(where, f"rope scaling's {name} is {value!r}", "a positive number")
    try:
        with np.errstate(all="ignore"):
            found, magnitude = _scaled(kind, frequencies, spec, scaling)
    except (ArithmeticError, ValueError) as error:
        raise _refuse(
            where, f"rope scaling {kind!r} cannot be computed ({error})", "numbers of usual size"
        ) from error
    if not (np.isfinite(found).all() and is_float32(magnitude)):
        raise _refuse(
            where, f"rope scaling {kind!r} gives no finite frequencies", "numbers of usual size"
        )
    return found, magnitude


def _scaled(
    kind: str, frequencies: NDArray[np.float64], spec: RopeSpec, scaling: dict[str, Any]
) -> tuple[NDArray[np.float64], float]:
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, spec, scaling)


def _llama3(frequencies: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1's: long waves stretched by `factor`, short ones kept, a linear blend between.

    Source: `apply_scaling` in Meta's llama-models (models/llama3/reference_impl/model.py).
    """
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns >= high
    stretched: NDArray[np.float64] = frequencies / scaling["factor"]
    blended: NDArray[np.float64] = kept * frequencies + (1 - kept) * stretched
    return blended


def _yarn(
    frequencies: NDArray[np.float64], spec: RopeSpec, scaling: dict[str, Any]
) -> tuple[NDArray[np.float64], float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2 and appendix A.2)."""
    factor = float(scaling["factor"])
    length = scaling["original_max_position_embeddings"]

    def dimension(n_turns: float) -> float:
        """The pair that turns `n_turns` times within the original context."""
        return (
            spec.n_dims
            * math.log(length / (n_turns * 2 * math.pi))
            / (2 * math.log(float(spec.theta)))
        )

    low = dimension(scaling.get("beta_fast") or 32.0)
    high = dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.n_dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(spec.n_dims // 2) - low) / (high - low), 0.0, 1.0)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    blended: NDArray[np.float64] = frequencies / factor * ramp + frequencies * (1 - ramp)
    return blended, float(magnitude)


def _kind(scaling: dict[str, Any]) -> str:
    return str(scaling.get("type", scaling.get("rope_type", "without a type")))


def _refuse(where: object, found: str, required: str) -> ModelError:
    return ModelError(
        "unsupported-rope-scaling", where, found, required, "use a checkpoint without this scaling"
    )
