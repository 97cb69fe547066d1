"""Products in C: the calls of csrc/matmul.h and experts.h, and the thread team they run on."""

from __future__ import annotations

import errno
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from colibri_format import ColibriError, DType

from ._native import Isa, NativeLibrary

# struct colibri_matrix, colibri_product, colibri_expert and colibri_expert_io; addresses as
# integers, 0 for NULL.
MATRIX: Final = np.dtype(
    [("data", "u8"), ("rows", "i8"), ("columns", "i8"), ("type", "i4"), ("row_interleave", "i4")]
)
PRODUCT: Final = np.dtype(
    [("matrix", MATRIX), ("x", "u8"), ("x_stride", "i8"), ("out", "u8"), ("out_stride", "i8"),
     ("bias", "u8"), ("n_tokens", "i8")]
)  # fmt: skip
EXPERT: Final = np.dtype(
    [("gate", MATRIX), ("up", MATRIX), ("down", MATRIX), ("gate_bias", "u8"), ("up_bias", "u8"),
     ("down_bias", "u8"), ("tokens", "u8"), ("places", "u8"), ("n_tokens", "i8")]
)  # fmt: skip
EXPERT_IO: Final = np.dtype(
    [("x", "u8"), ("x_stride", "i8"), ("n_tokens", "i8"), ("out", "u8"), ("out_stride", "i8"),
     ("n_places", "i8")]
)  # fmt: skip

Records = NDArray[np.void]
_ALIGNMENT: Final = 64


class KernelError(ColibriError, ValueError):
    """The C library refused a call."""


class NativeKernels:
    """A thread team and the functions that compute on it. One caller at a time.

    Records hold addresses only: whoever fills them keeps the arrays alive during the call.
    `isas` are the instruction sets it may use, all of the machine's by default.
    """

    def __init__(
        self,
        library: NativeLibrary,
        *,
        n_threads: int = 1,
        isas: Isa | None = None,
        spin_ns: int = -1,
    ) -> None:
        """Start `n_threads - 1` threads; `spin_ns` is how long an idle one spins, -1 the default.

        Raises:
            KernelError: `no-team`, the number of threads is impossible or the system refuses them.
        """
        self._team = 0
        self.isas = int(library.isas if isas is None else isas & library.isas) | Isa.BASE
        f = library.function
        self._destroy = f("colibri_team_destroy", "i32", "ptr")
        self._has_kernel = f("colibri_has_kernel", "i32", "u32", "i32", "i32")
        self._matmul = f("colibri_matmul", "i32", "ptr", "u32", "ptr", "i32", "ptr", "i64")
        self._matmul_workspace = f("colibri_matmul_workspace", "i64", "u32", "ptr", "i32")
        self._experts = f("colibri_experts", "i32", "ptr", "u32", "ptr", "i32", "ptr", "ptr", "i64")
        self._experts_workspace = f("colibri_experts_workspace", "i64", "u32", "ptr", "i32", "ptr")
        team = np.zeros(1, np.uint64)
        create = f("colibri_team_create", "i32", "i32", "i64", "ptr")
        code = create(n_threads, spin_ns, team.ctypes.data)
        if code:
            raise KernelError(
                "no-team",
                f"a team of {n_threads} threads",
                f"the library says {errno.errorcode.get(-code, code)}",
                "1 to 256 threads that the system grants",
                "ask for fewer",
            )
        self._team = int(team[0])
        self.n_threads = n_threads

    @property
    def team_address(self) -> int:
        """Of the team, for calls of the library that compute on it; 0 when closed."""
        return self._team

    def has_kernel(self, dtype: DType, row_interleave: int = 0) -> bool:
        """Whether products with matrices of `dtype` so stored can be computed."""
        if dtype.ggml_id is None:
            return False
        return bool(self._has_kernel(self.isas, dtype.ggml_id, row_interleave))

    def matmul_workspace(self, products: Records) -> int:
        """Bytes of workspace that `matmul` needs; KernelError as `matmul` raises."""
        return self._check(self._matmul_workspace(self.isas, products.ctypes.data, len(products)))

    def matmul(self, products: Records, workspace: NDArray[np.uint8]) -> None:
        """Compute `products`, records of PRODUCT, in one hand-over.

        Raises:
            KernelError: `bad-product` for a matrix, stride or workspace that the library refuses.
        """
        self._check(
            self._matmul(
                self._team,
                self.isas,
                products.ctypes.data,
                len(products),
                workspace.ctypes.data,
                workspace.size,
            )
        )

    def experts_workspace(self, experts: Records, io: Records) -> int:
        """Bytes of workspace that `experts` needs; KernelError as `experts` raises."""
        return self._check(
            self._experts_workspace(self.isas, experts.ctypes.data, len(experts), io.ctypes.data)
        )

    def experts(self, experts: Records, io: Records, workspace: NDArray[np.uint8]) -> None:
        """Compute `experts`, records of EXPERT, with the one record `io` of EXPERT_IO.

        Raises:
            KernelError: `bad-product` as above, and for a token or place out of range.
        """
        self._check(
            self._experts(
                self._team,
                self.isas,
                experts.ctypes.data,
                len(experts),
                io.ctypes.data,
                workspace.ctypes.data,
                workspace.size,
            )
        )

    def close(self) -> None:
        """End the threads; again does nothing."""
        team, self._team = self._team, 0
        if team:
            self._destroy(team)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _check(code: Any) -> int:
        if code >= 0:
            return int(code)
        raise KernelError(
            "bad-product",
            "a call of the C library",
            f"it answers {errno.errorcode.get(-code, code)}",
            "matrices that have a kernel, and arrays of their sizes",
            "report this: the caller passed what the header forbids",
        )


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """`size` bytes, uninitialised, that start at a multiple of 64."""
    held = np.empty(size + _ALIGNMENT, np.uint8)
    start = -held.ctypes.data % _ALIGNMENT
    return held[start : start + size]
