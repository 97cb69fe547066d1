"""Calls of one instruction set's table of struct colibri_ops, here or emulated for aarch64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_runtime._native import Isa

from .arm_emulator import CSRC, ArmLibrary
from .kernel_calls import runtime_library

_NAMES: Final = ("rms_norm", "add", "combine", "softmax", "dot", "to_half", "prepare", "attend")
ATTENTION: Final = np.dtype(
    [("n_heads", "<i4"), ("n_kv_heads", "<i4"), ("head_dim", "<i4"), ("is_f16", "<i4"),
     ("capacity", "<i8"), ("window", "<i8"), ("first", "<i8"), ("keys", "<u8"), ("values", "<u8"),
     ("queries", "<u8"), ("out", "<u8")]
)  # fmt: skip
HEADS: Final = np.dtype(
    [("head_dim", "<i4"), ("n_dims", "<i4"), ("is_interleaved", "<i4"), ("norm_size", "<i4"),
     ("eps", "<f4"), ("clip", "<f4")]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Struct:
    """A pointer to a record of `dtype`; fields that are arrays become their addresses."""

    dtype: np.dtype[Any]
    fields: dict[str, Any]

    def placed(self, place: Callable[[NDArray[Any]], int]) -> NDArray[np.void]:
        record = np.zeros(1, self.dtype)
        for name, value in self.fields.items():
            record[name] = place(value) if isinstance(value, np.ndarray) else value
        return record


class Ops(Protocol):
    """The operations of ops.h: arrays and Structs are pointers, None NULL, floats float32."""

    def __call__(self, name: str, *arguments: Any, returns: str = "<i4") -> Any:
        """What the operation returns; what it writes is in the arrays after."""


class ArmOps:
    """Those of the emulated library."""

    def __init__(self, library: ArmLibrary, isa: Isa) -> None:
        self._library = library
        table = int(library.call("colibri_ops_of", isa, returns="<i8"))
        self._pointers = library.read(table, np.zeros(len(_NAMES), "<u8"))

    def __call__(self, name: str, *arguments: Any, returns: str = "<i4") -> Any:
        library, floats, ints = self._library, [], []
        placed: list[tuple[int, NDArray[Any]]] = []

        def place(array: NDArray[Any]) -> int:
            placed.append((library.place(array), array))
            return placed[-1][0]

        for argument in arguments:
            if isinstance(argument, float):
                floats.append(argument)
            elif isinstance(argument, Struct):
                ints.append(library.place(argument.placed(place)))
            elif isinstance(argument, np.ndarray):
                ints.append(place(argument))
            else:
                ints.append(int(argument or 0))
        address = int(self._pointers[_NAMES.index(name)])
        found = library.call(address, *ints, floats=floats, returns=returns)
        for there, array in placed:
            array[...] = library.read(there, array)
        library.clear()
        return found


class Avx2Ops:
    """Those of AVX2, compiled into `folder`."""

    def __init__(self, folder: Path) -> None:
        if Isa.AVX2 not in runtime_library().isas or shutil.which("cc") is None:
            pytest.skip("this machine lacks AVX2 or a compiler")
        path = folder / "ops_avx2.so"
        subprocess.run(
            ["cc", "-std=c11", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-mavx2", "-mfma",
             "-mf16c", "-DCOLIBRI_ISA_NAME=avx2", "-DCOLIBRI_X86=1", "-o", str(path),
             str(CSRC / "isa" / "ops_isa.c"), "-lm"],
            check=True,
        )  # fmt: skip
        self._library = ctypes.CDLL(str(path))
        self._library.colibri_ops_avx2.restype = ctypes.POINTER(ctypes.c_void_p)
        self._pointers = self._library.colibri_ops_avx2()

    def __call__(self, name: str, *arguments: Any, returns: str = "<i4") -> Any:
        types, values, held = [], [], []
        for argument in arguments:
            kind: Any = ctypes.c_int64
            value = argument
            if isinstance(argument, float):
                kind = ctypes.c_float
            elif isinstance(argument, Struct):
                held.append(argument.placed(lambda array: array.ctypes.data))
                value = held[-1].ctypes.data
            elif isinstance(argument, np.ndarray):
                value = argument.ctypes.data
            types.append(kind)
            values.append(value or 0)
        result = ctypes.c_float if returns == "<f4" else ctypes.c_int32
        function = ctypes.CFUNCTYPE(result, *types)
        return function(self._pointers[_NAMES.index(name)])(*values)
