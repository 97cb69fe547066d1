"""The C library of this package, loaded once; the only module that knows ctypes.

Sources and build: csrc/ and setup.py beside this package's src/. Modules that use the library name
a function and its signature; what it does, and which threads may call it, its header says. ctypes
lets go of the GIL during a call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from functools import cache
from pathlib import Path
from typing import Any, Final

ABI: Final = 1
_NAME: Final = "libcolibri_runtime" + (".dll" if sys.platform == "win32" else ".so")
_NO_NATIVE: Final = "COLIBRI_NO_NATIVE"
_SOURCES: Final = Path(__file__).parents[2] / "csrc"
_TYPES: Final = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "ptr": ctypes.c_void_p,
    "str": ctypes.c_char_p,
}


class Isa(IntFlag):
    """Instruction sets, bits of enum colibri_isa. AVX512 includes VNNI, DOTPROD NEON."""

    BASE = 1
    AVX2 = 2
    AVX512 = 4
    NEON = 8
    DOTPROD = 16


_KNOWN_ISAS: Final = sum(Isa)


class NativeLibrary:
    """The loaded library, and the instruction sets that it has for this machine."""

    def __init__(self, path: Path, build_id: str | None) -> None:
        """Load `path`; `build_id` is the hash its sources must have, None where they are unknown.

        Raises:
            OSError: it cannot be loaded, or is not the library that belongs to this module.
        """
        self.path = path
        self._library = ctypes.CDLL(str(path))
        try:
            abi = self.function("colibri_runtime_abi", "i32")()
            found = self.function("colibri_runtime_build_id", "str")().decode()
            self.isas = Isa(self.function("colibri_runtime_isas", "u32")() & _KNOWN_ISAS)
        except AttributeError as error:
            raise OSError(f"{path} is another library: {error}") from error
        if abi != ABI or build_id not in (None, found):
            raise OSError(f"{path} is of other sources: {(abi, found)}, not {(ABI, build_id)}")
        self.best = max(isa for isa in Isa if isa in self.isas)

    def function(self, name: str, returns: str, *arguments: str) -> Callable[..., Any]:
        """The function `name`; types are i32, i64, u32, u64, f32, ptr (an address) and str."""
        found = getattr(self._library, name)
        found.restype = _TYPES[returns]
        found.argtypes = tuple(_TYPES[argument] for argument in arguments)
        call: Callable[..., Any] = found
        return call


@dataclass(frozen=True, slots=True)
class Native:
    """The library, or why there is none."""

    library: NativeLibrary | None
    reason: str = ""


@cache
def native() -> Native:
    """What was loaded when this was first called."""
    return load(Path(__file__).with_name(_NAME))


def load(path: Path, sources: Path = _SOURCES) -> Native:
    """The library at `path`, unless the environment forbids it or it cannot be used."""
    if os.environ.get(_NO_NATIVE) == "1":
        return Native(None, f"{_NO_NATIVE}=1")
    if not path.exists():
        return Native(None, f"{path} was not built: install gcc or clang and reinstall")
    try:
        return Native(NativeLibrary(path, sources_id(sources)))
    except OSError as error:
        return Native(None, f"{error}: reinstall")


def sources_id(sources: Path) -> str | None:
    """The build id of a library made from `sources`; None where there are none.

    In a checkout a library left over from older sources is refused by this. An installed package
    has no sources beside it, and its library came in the same wheel as this module.
    """
    paths = sorted(sources.rglob("*.[ch]")) if sources.is_dir() else []
    if not paths:
        return None
    digest = hashlib.sha256()
    for path in paths:
        name = path.relative_to(sources).as_posix().encode()
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
