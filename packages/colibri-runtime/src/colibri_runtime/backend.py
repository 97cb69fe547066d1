"""What a backend must compute, and how one is found by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType, Segment, UsageError

from ._native import native

BACKEND_GROUP: Final = "colibri.backends"

AUTO: Final = "auto"
"""Takes the place of a backend's name where the best there is shall compute."""

Floats = NDArray[np.float32]


class _Facts(Protocol):
    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def row_interleave(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix as stored: `shape` is `(rows, columns)`, a row makes one output.

    `data` is the raw bytes, one-dimensional uint8, read-only to a backend and owned by whoever
    made this (a slot of the store, the arena of dense weights). `name` is for messages.
    """

    name: str
    dtype: DType
    shape: tuple[int, int]
    data: NDArray[np.uint8]
    row_interleave: int = 0

    @classmethod
    def of_segment(cls, name: str, segment: Segment, data: NDArray[np.uint8]) -> Matrix:
        """The matrix that `segment` describes and whose bytes are `data`."""
        rows, columns = segment.shape
        return cls(name, segment.dtype, (rows, columns), data, segment.row_interleave)

    @classmethod
    def of_facts(cls, name: str, facts: _Facts) -> Matrix:
        """A matrix whose bytes are not there, for planning."""
        rows, columns = facts.shape
        return cls(name, facts.dtype, (rows, columns), np.empty(0, np.uint8), facts.row_interleave)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The matrices of a gated feed-forward network, and its biases (float32) where it has any."""

    gate: Matrix
    up: Matrix
    down: Matrix
    gate_bias: Floats | None = None
    up_bias: Floats | None = None
    down_bias: Floats | None = None


@runtime_checkable
class Backend(Protocol):
    """Computes with stored weights. Not thread-safe: it may own a workspace.

    The same arguments give the same bits, wherever they lie in memory and whatever was computed
    before. Activations are float32 and C-contiguous.
    """

    name: str
    workspace_bytes: int
    """Memory a call may use beside its arguments and its result, for rows of usual length."""

    def check(self, matrix_name: str, dtype: DType, where: object) -> None:
        """Nothing, when the backend computes with `dtype`; else ModelError `unsupported-dtype`."""

    def matmul(self, x: Floats, weight: Matrix) -> Floats:
        """`x @ weight.T`: `(n_tokens, columns)` to `(n_tokens, rows)`."""

    def rows(self, weight: Matrix, ids: NDArray[np.intp]) -> Floats:
        """The rows `ids` of the weight, `(len(ids), columns)`."""

    def feed_forward(self, x: Floats, network: FeedForward) -> Floats:
        """`down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202): `(n_tokens, hidden)`."""


def backend_names() -> tuple[str, ...]:
    """Names of the backends that installed packages register, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=BACKEND_GROUP)}))


def load_backend(name: str = AUTO, options: Mapping[str, object] | None = None) -> Backend:
    """A new backend of the class registered as `name`; `options` are its keyword arguments.

    `auto` is `native` where its library can be loaded, else `numpy`, whose `notes` say why.

    Raises:
        UsageError: `unknown-backend` listing those there are, `bad-backend` when what is
            registered cannot be imported or does not offer the methods of `Backend`.
    """
    if name == AUTO:
        from .native_backend import NativeBackend
        from .numpy_backend import NumpyBackend

        reason = native().reason
        if native().library is not None:
            return NativeBackend(**(options or {}))  # type: ignore[arg-type]
        return NumpyBackend(notes=(f"computed in NumPy, many times slower: {reason}",))
    entry = next((e for e in entry_points(group=BACKEND_GROUP) if e.name == name), None)
    if entry is None:
        raise UsageError(
            "unknown-backend",
            f"backend {name!r}",
            "no installed package registers it",
            f"one of: {', '.join((AUTO, *backend_names()))}",
        )
    try:
        made = entry.load()(**(options or {}))
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(
            "bad-backend",
            f"backend {name!r}",
            f"{entry.value} cannot be loaded ({error})",
            "an importable class that takes the options given",
            "reinstall the package that registers it",
        ) from error
    if not isinstance(made, Backend):
        raise UsageError(
            "bad-backend",
            f"backend {name!r}",
            f"{entry.value} makes a {type(made).__name__} that lacks methods of a backend",
            "the attributes of colibri_runtime.backend.Backend",
        )
    return made
