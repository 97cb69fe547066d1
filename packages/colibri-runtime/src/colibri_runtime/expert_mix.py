"""The weighted sum over a layer's experts, the same bits in whatever order they arrive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri_format import Role

from .backend import Backend, FeedForward, Floats, Matrix
from .decoder_errors import ModelError
from .dequant import dequantise
from .steps import Lease


def expert_network(lease: Lease) -> FeedForward:
    """The matrices of a leased block: views into its slot, valid as long as the lease."""
    layout = lease.layout

    def matrix(role: Role) -> Matrix:
        segment = layout.segment(role)
        if segment is None:
            raise ModelError(
                "missing-segment",
                f"L{lease.layer}/E{lease.expert}",
                f"the block has no segment {role.name.lower()}",
                "gate, up and down",
            )
        name = f"L{lease.layer}/E{lease.expert} {role.name.lower()}"
        return Matrix.of_segment(name, segment, lease.segments[role])

    def bias(role: Role) -> Floats | None:
        segment = layout.segment(role)
        if segment is None:
            return None
        values = np.empty((1, segment.shape[0]), np.float32)
        dequantise(lease.segments[role].reshape(1, -1), segment.dtype, values, role.name)
        return values.reshape(-1)

    return FeedForward(
        matrix(Role.GATE),
        matrix(Role.UP),
        matrix(Role.DOWN),
        bias(Role.GATE_BIAS),
        bias(Role.UP_BIAS),
        bias(Role.DOWN_BIAS),
    )


def not_delivered(n_missing: int, n_outputs: int) -> ModelError:
    """What is raised when a store ends before it gave every expert."""
    return ModelError(
        "expert-not-delivered",
        "expert store",
        f"{n_missing} of {n_outputs} outputs are missing after the last block",
        "each expert that was asked for, once",
    )


class ExpertMix:
    """Sum over each token's experts of weight times output.

    `x` is `(n_tokens, hidden)`; `experts` and `weights` are `(n_tokens, top_k)`, best first
    (weights None: all one). Every expert computes the group of tokens that chose it, as it
    arrives; outputs wait in a buffer and are summed by rank, so that neither the order of
    arrival nor what was resident changes a bit.
    """

    def __init__(self, x: Floats, experts: NDArray[np.intp], weights: Floats | None) -> None:
        self.x = x
        self._experts = experts
        self._weights = weights
        n_tokens, top_k = experts.shape
        self._outputs = np.empty((n_tokens, top_k, x.shape[1]), np.float32)
        self._n_pending = experts.size

    def compute(self, lease: Lease, backend: Backend) -> None:
        """The outputs of a leased expert."""
        tokens, ranks = np.nonzero(self._experts == lease.expert)
        group = self.x if len(tokens) == len(self.x) else self.x[tokens]
        self._outputs[tokens, ranks] = backend.feed_forward(group, expert_network(lease))
        self._n_pending -= len(tokens)

    def total(self) -> Floats:
        """The sum, `(n_tokens, hidden)`; the outputs are used up.

        Raises:
            ModelError: `expert-not-delivered` when an expert is still missing.
        """
        if self._n_pending:
            raise not_delivered(self._n_pending, self._experts.size)
        outputs = self._outputs
        if self._weights is not None:
            outputs *= self._weights[:, :, np.newaxis]
        mixed = outputs[:, 0]
        for rank in range(1, outputs.shape[1]):
            mixed += outputs[:, rank]
        return np.ascontiguousarray(mixed)
