"""The C library of this package, loaded once; the only module that knows ctypes.

Sources and build: csrc/ and setup.py beside this package's src/. `convert` there takes no lock and
keeps no state, and ctypes lets go of the GIL meanwhile, so any number of threads may call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from dataclasses import dataclass
from enum import IntFlag
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import INTERLEAVE, DType

ABI: Final = 1
# Hash of csrc/, compiled in: a library left over from older sources is refused. setup.py and
# tests/repack/test_native.py say the value when it is due to change.
BUILD_ID: Final = "826c65aa42c97afa"
_NAME: Final = "libcolibri_repack" + (".dll" if sys.platform == "win32" else ".so")
_NO_NATIVE: Final = "COLIBRI_NO_NATIVE"


class Isa(IntFlag):
    """Kernels, all with the same results; bits of enum colibri_isa."""

    BASE = 1
    AVX2 = 2
    AVX512 = 4


class ElementError(Exception):
    """Element `index` cannot be converted; `is_finite` says whether it is the scale's fault."""

    def __init__(self, index: int, is_finite: bool) -> None:
        super().__init__(index)
        self.index = index
        self.is_finite = is_finite


class NativeLibrary:
    """The loaded library, and what it can do on this machine."""

    def __init__(self, path: Path) -> None:
        """Load `path`.

        Raises:
            OSError: it cannot be loaded, or is not the library that belongs to this module.
        """
        library = ctypes.CDLL(str(path))
        try:
            library.colibri_repack_build_id.restype = ctypes.c_char_p
            found = library.colibri_repack_abi(), library.colibri_repack_build_id().decode()
            if found != (ABI, BUILD_ID):
                raise OSError(f"{path} is of other sources: {found}, not {(ABI, BUILD_ID)}")
            library.colibri_repack_isas.restype = ctypes.c_uint32
            self.isas = Isa(library.colibri_repack_isas() & 7)
            self._convert = library.colibri_repack_convert
            self._interleave = library.colibri_repack_interleave
        except AttributeError as error:
            raise OSError(f"{path} is another library: {error}") from error
        self._convert.restype = ctypes.c_int32
        self._convert.argtypes = (
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64,
            ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        self._interleave.restype = ctypes.c_int32
        self._interleave.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p,
            ctypes.c_int32, ctypes.c_int32,
        )  # fmt: skip
        self.best = max(isa for isa in Isa if isa in self.isas)

    def convert(
        self,
        source: NDArray[np.uint8],
        source_dtype: DType,
        target: NDArray[np.uint8],
        target_dtype: DType,
        *,
        columns: int,
        weights: NDArray[np.float32] | None = None,
        isa: Isa | None = None,
    ) -> None:
        """Fill `target` with the elements of `source`, both contiguous and of whole quant blocks.

        Raises:
            ElementError: a number is not finite, or one does not fit the target's type.
            ValueError: sizes, types or kernels that cannot be.
        """
        n = source.size // source_dtype.block_bytes * source_dtype.block_elements
        n_blocks, rest = divmod(n, target_dtype.block_elements)
        is_whole = source.size % source_dtype.block_bytes == rest == 0
        if not is_whole or target.size != n_blocks * target_dtype.block_bytes:
            raise ValueError(f"{source.size} bytes of {source_dtype.name} to {target.size}")
        if not (source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable):
            raise ValueError("arrays must be contiguous, the target writeable")
        if weights is not None and (weights.shape != (columns,) or weights.dtype != np.float32):
            raise ValueError(f"{weights.shape} {weights.dtype} weights for {columns} columns")
        kept = None if weights is None else np.ascontiguousarray(weights)
        bad = ctypes.c_int64(-1)
        code = self._convert(
            source.ctypes.data,
            -1 if source_dtype.ggml_id is None else source_dtype.ggml_id,
            target.ctypes.data,
            -1 if target_dtype.ggml_id is None else target_dtype.ggml_id,
            n,
            columns,
            None if kept is None else kept.ctypes.data,
            isa or self.best,
            ctypes.byref(bad),
        )
        if code in (-errno.EDOM, -errno.ERANGE):
            raise ElementError(bad.value, code == -errno.ERANGE)
        if code:
            raise ValueError(f"{source_dtype.name} to {target_dtype.name}: {os.strerror(-code)}")

    def interleave(
        self,
        source: NDArray[np.uint8],
        target: NDArray[np.uint8],
        dtype: DType,
        n_blocks: int,
        *,
        is_back: bool = False,
    ) -> None:
        """Fill `target` with whole groups of 16 rows of `source`, interleaved or plain again.

        Rows have `n_blocks` quant blocks of `dtype`; both arrays are contiguous (spec, section 9).

        Raises:
            ValueError: sizes or types that cannot be.
        """
        n_groups, rest = divmod(source.size, INTERLEAVE * n_blocks * dtype.block_bytes)
        if rest or target.size != source.size:
            raise ValueError(f"{source.size} bytes of {dtype.name} to {target.size}")
        if not (source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable):
            raise ValueError("arrays must be contiguous, the target writeable")
        units = bytes(dtype.units)
        code = self._interleave(
            source.ctypes.data, target.ctypes.data, n_groups, n_blocks, units, len(units), is_back
        )
        if code:
            raise ValueError(f"interleaving {dtype.name}: {os.strerror(-code)}")


@dataclass(frozen=True, slots=True)
class Native:
    """The library, or why there is none."""

    library: NativeLibrary | None
    reason: str = ""


@cache
def native() -> Native:
    """What was loaded when this was first called."""
    return load(Path(__file__).with_name(_NAME))


def load(path: Path) -> Native:
    """The library at `path`, unless the environment forbids it or it cannot be used."""
    if os.environ.get(_NO_NATIVE) == "1":
        return Native(None, f"{_NO_NATIVE}=1")
    if not path.exists():
        return Native(None, f"{path} was not built: install gcc or clang and reinstall")
    try:
        return Native(NativeLibrary(path))
    except OSError as error:
        return Native(None, f"{error}: reinstall")
