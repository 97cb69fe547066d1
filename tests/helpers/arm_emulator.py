"""The C library of colibri_runtime for aarch64, run under qemu-user.

`make test-arm` builds the library with its own setup.py and a cross compiler, and names the folder
of the objects in COLIBRI_ARM_OBJECTS; here they are linked with arm_server.c.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_runtime._native import Isa

COMPILER: Final = "aarch64-linux-gnu-gcc"
EMULATOR: Final = "qemu-aarch64"
CSRC: Final = Path(__file__).parents[2] / "packages/colibri-runtime/csrc"
_FIND, _WRITE, _READ, _CALL, _CALL_FLOAT = range(5)
_REQUEST: Final = np.dtype(
    [("what", "<u8"), ("address", "<u8"), ("size", "<u8"), ("ints", "<i8", 10),
     ("floats", "<f4", 2)]
)  # fmt: skip
_GUARD: Final = np.full(64, 0xA5, np.uint8)

Bytes = NDArray[np.uint8]


def build_server(folder: Path) -> Path:
    """The program to emulate, linked in `folder`; a skip that says what is missing."""
    objects = os.environ.get("COLIBRI_ARM_OBJECTS")
    if not objects:
        pytest.skip("the library was not built for aarch64: make test-arm does it")
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    server = folder / "arm_server"
    subprocess.run(
        [COMPILER, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-pthread",
         "-I", str(CSRC), "-o", str(server), str(Path(__file__).with_name("arm_server.c")),
         *map(str, sorted(Path(objects).rglob("*.o"))), "-lm"],
        check=True,
    )  # fmt: skip
    return server


class ArmLibrary:
    """The emulated library: its instruction sets, its functions, and memory for their arguments.

    What `place` hands out is free again after `clear`.
    """

    def __init__(self, server: Path, processor: str = "max") -> None:
        """Start the server on one of the processors that `qemu-aarch64 -cpu help` lists."""
        command = [EMULATOR, "-cpu", processor, str(server)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1 << 20
        )
        self._addresses: dict[str, int] = {}
        self._guards: list[int] = []
        self._begin = int(self.call("arena_begin", returns="<i8"))
        self._end = int(self.call("arena_end", returns="<i8"))
        self._next = self._begin
        self.isas = Isa(int(self.call("colibri_runtime_isas")))

    def close(self) -> None:
        """End the server; raises where it failed."""
        self._process.communicate()
        assert self._process.returncode == 0, self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, name: str) -> int:
        """Address of a function that arm_server.c names."""
        if name not in self._addresses:
            request = np.zeros(1, _REQUEST)
            request["what"], request["size"] = _FIND, len(name)
            self._send(request, name.encode())
            self._addresses[name] = int(self._receive(8).view("<u8")[0])
            assert self._addresses[name], f"{name} is not served"
        return self._addresses[name]

    def call(
        self,
        function: str | int,
        *arguments: int,
        floats: Sequence[float] = (),
        returns: str = "<i4",
    ) -> Any:
        """What the function, a name or an address, returns, as NumPy's type `returns`.

        `floats` are its float arguments, the others are integers and addresses.
        """
        request = np.zeros(1, _REQUEST)
        request["what"] = _CALL_FLOAT if returns == "<f4" else _CALL
        request["address"] = self.find(function) if isinstance(function, str) else function
        request["ints"][0, : len(arguments)] = arguments
        request["floats"][0, : len(floats)] = floats
        self._send(request)
        return self._receive(8).view(returns)[0]

    def place(self, array: NDArray[Any], *, like: int = 0, at_end: bool = False) -> int:
        """Address of a copy of `array`: as far from a multiple of 64 as the address `like`.

        With `at_end` it is the last before memory that cannot be touched, one at a time; where
        `like` is a multiple of 64 there is a gap of less than that between.
        """
        held = np.ascontiguousarray(array)
        if at_end:
            address = self._end - held.nbytes
            address -= (address - like) % 64 if like % 64 == 0 else 0
        else:
            address = -(-self._next // 64) * 64 + like % 64
            self._next = address + held.nbytes + len(_GUARD)
        assert self._begin <= address <= self._end - held.nbytes
        self.write(address, held)
        if not at_end:
            self.write(address + held.nbytes, _GUARD)
            self._guards.append(address + held.nbytes)
        return address

    def clear(self) -> None:
        """Take back what was placed; raises where something was written behind any of it."""
        for guard in self._guards:
            assert (self.read(guard, _GUARD) == _GUARD).all(), "written past the end of an array"
        self._guards.clear()
        self._next = self._begin

    def write(self, address: int, array: NDArray[Any]) -> None:
        """Copy `array` to `address`."""
        request = np.zeros(1, _REQUEST)
        request["what"], request["address"], request["size"] = _WRITE, address, array.nbytes
        self._send(request, np.ascontiguousarray(array).tobytes())

    def read(self, address: int, like: NDArray[Any]) -> NDArray[Any]:
        """What is at `address`, in the shape and type of `like`."""
        request = np.zeros(1, _REQUEST)
        request["what"], request["address"], request["size"] = _READ, address, like.nbytes
        self._send(request)
        return self._receive(like.nbytes).view(like.dtype).reshape(like.shape)

    def _send(self, request: NDArray[np.void], payload: bytes = b"") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(request.tobytes() + payload)

    def _receive(self, size: int) -> Bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.flush()
        found = self._process.stdout.read(size)
        if len(found) != size:
            raise OSError(f"the emulated library is gone: {self._process.wait()}")
        return np.frombuffer(found, np.uint8).copy()
