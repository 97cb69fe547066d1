"""Builds csrc/ into a shared library that _native.py loads with ctypes.

The library belongs to no Python version: wheels are py3-none-PLATFORM. Where it cannot be built the
package still installs and quantises in NumPy, slowly; COLIBRI_REQUIRE_NATIVE=1 makes that an error.
"""

import hashlib
import os
import platform
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

HERE = Path(__file__).parent
CSRC = HERE / "csrc"
NATIVE = HERE / "src/colibri_repack/_native.py"
# Bit identity with ggml rests on these: no contraction to FMA, no reordering. They come last, so
# that CFLAGS of the environment cannot undo them. The other two change no result.
FLAGS = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-fno-fast-math",
         "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]  # fmt: skip
SOURCES = ["convert.c", "decode.c", "encode.c", "interleave.c"]
# The same source for each instruction set; which one runs is decided on the machine it runs on.
X86 = {"avx2": ["-mavx2"], "avx512": ["-mavx512f", "-mavx512dq"]}


def build_id():
    """Hash of the C sources, names and bytes."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class BuildNative(build_ext):
    """Compiles without Python's headers and links without its name suffix."""

    def get_ext_filename(self, ext_name):
        suffix = ".dll" if sys.platform == "win32" else ".so"
        return str(Path(*ext_name.split("."))) + suffix

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        output = Path(self.get_ext_fullpath(ext.name))
        output.unlink(missing_ok=True)  # of an earlier build, which must not pass for this one
        try:
            self._build(ext, output)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            self._give_up(output, error)

    def _build(self, ext, output):
        expected = re.search(r'BUILD_ID: Final = "(\w+)"', NATIVE.read_text()).group(1)
        if expected != build_id():
            sys.exit(f'{NATIVE}: BUILD_ID is "{expected}"; csrc/ hashes to "{build_id()}"; '
                     "set it to that")  # fmt: skip
        is_x86 = platform.machine() in ("x86_64", "AMD64") and "arm64" not in os.environ.get(
            "ARCHFLAGS", ""
        )
        jobs = [("base", path, []) for path in SOURCES]
        if is_x86:
            jobs += [(isa, "encode.c", flags) for isa, flags in X86.items()]
        objects = []
        for isa, source, flags in jobs:
            macros = [
                ("COLIBRI_BUILD_ID", f'"{build_id()}"'),
                ("COLIBRI_ENCODE", f"colibri_encode_{isa}"),
            ]
            objects += self.compiler.compile(
                [os.path.relpath(CSRC / source)],
                output_dir=str(Path(self.build_temp) / isa),
                macros=macros,
                depends=ext.depends,
                extra_postargs=FLAGS + flags,
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(output), libraries=[] if sys.platform == "win32" else ["m"]
        )

    def _give_up(self, output, error):
        output.unlink(missing_ok=True)
        text = (
            f"colibri-repack: its C library could not be built: {error}\n"
            "Quantising will run in NumPy, up to 25 times slower. "
            "Install gcc or clang and reinstall."
        )
        if os.environ.get("COLIBRI_REQUIRE_NATIVE") == "1":
            sys.exit(f"{text}\nCOLIBRI_REQUIRE_NATIVE=1 makes this an error.")
        bar = "!" * 78
        sys.stderr.write(f"\n{bar}\n{text}\n{bar}\n\n")


class NativeWheel(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "colibri_repack.libcolibri_repack",
            [f"csrc/{name}" for name in SOURCES],
            depends=sorted(f"csrc/{path.name}" for path in CSRC.glob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
)
