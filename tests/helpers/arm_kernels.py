"""Products through the library emulated for aarch64, called as NativeKernels is."""

from __future__ import annotations

import ctypes
import platform
from typing import Any, Final, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import DTYPES, DType
from colibri_runtime._native import Isa
from colibri_runtime.native_kernels import aligned_bytes

from .arm_emulator import ArmLibrary

ARM_ISAS: Final = [
    pytest.param(isa, marks=[] if platform.machine() in ("aarch64", "arm64") else pytest.mark.arm)
    for isa in (Isa.NEON, Isa.DOTPROD)
]
"""Parameters of tests: emulated, and marked so, where this is no such processor."""

_DTYPES: Final = {dtype.ggml_id: dtype for dtype in DTYPES.values()}

Records = NDArray[np.void]


class ArmKernels:
    """What tests of products use of NativeKernels: arguments and results are copied over."""

    def __init__(self, library: ArmLibrary, *, isas: Isa, n_threads: int = 1) -> None:
        self._library = library
        self._team = 0
        if n_threads > 1:
            made = np.zeros(1, np.uint64)
            there = library.place(made)
            assert library.call("colibri_team_create", n_threads, -1, there) == 0
            self._team = int(library.read(there, made)[0])
        self.isas = int(isas & library.isas | Isa.BASE)

    def has_kernel(self, dtype: DType, row_interleave: int = 0) -> bool:
        """Whether products with matrices of `dtype` so stored can be computed."""
        call = self._library.call
        return bool(call("colibri_has_kernel", self.isas, dtype.ggml_id, row_interleave))

    def matmul_workspace(self, products: Records) -> int:
        """0: `matmul` brings its own."""
        return 0 * len(products)

    def matmul(self, products: Records, workspace: NDArray[np.uint8]) -> None:
        """Compute `products` one after the other.

        A matrix ends where memory does, so that reading past it is a fault, if it does not begin
        at a multiple of 64.
        """
        assert workspace.size == 0
        for product in products:
            self._multiply(product)

    def _multiply(self, product: np.void) -> None:
        library, matrix, n_tokens = self._library, product["matrix"], int(product["n_tokens"])
        dtype, rows = _DTYPES[int(matrix["type"])], int(matrix["rows"])
        n_bytes = rows * int(matrix["columns"]) // dtype.block_elements * dtype.block_bytes
        out = _floats(product["out"], n_tokens * int(product["out_stride"]))
        x = _floats(product["x"], n_tokens * int(product["x_stride"]))
        there = product.copy()
        data = _memory(matrix["data"], n_bytes)
        there["matrix"]["data"] = library.place(data, like=int(matrix["data"]), at_end=True)
        there["x"] = library.place(x, like=int(product["x"]))
        there["out"] = library.place(out, like=int(product["out"]))
        if product["bias"]:
            there["bias"] = library.place(_floats(product["bias"], rows))
        records = library.place(there)
        size = int(library.call("colibri_matmul_workspace", self.isas, records, 1, returns="<i8"))
        workspace = library.place(aligned_bytes(size))
        status = library.call("colibri_matmul", self._team, self.isas, records, 1, workspace, size)
        assert status == 0, status
        out[:] = library.read(int(there["out"]), out)
        library.clear()

    def close(self) -> None:
        """End the threads; the library is another's."""
        team, self._team = self._team, 0
        if team:
            self._library.call("colibri_team_destroy", team)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory(address: Any, size: int) -> NDArray[np.uint8]:
    """The bytes of this process at `address`, not copied."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), np.uint8)


def _floats(address: Any, n: int) -> NDArray[np.float32]:
    return _memory(address, 4 * n).view(np.float32)
