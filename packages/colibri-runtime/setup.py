"""Builds csrc/ into a shared library that _native.py loads with ctypes.

The library belongs to no Python version: wheels are py3-none-PLATFORM. Where it cannot be built the
package still installs and computes in NumPy, slowly; COLIBRI_REQUIRE_NATIVE=1 makes that an error.
"""

import hashlib
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

HERE = Path(__file__).parent
CSRC = HERE / "csrc"
# Results are the same for every build: no contraction to FMA but where the source says so, no
# reordering. They come last, so that CFLAGS of the environment cannot undo them.
FLAGS = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-fno-fast-math",
         "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]  # fmt: skip
# Sources in csrc/isa/ are compiled once plain and once for each of these; which runs is decided
# where it runs. By the macro that a compiler for such processors defines, with ours.
ISAS = {
    "__x86_64__": ("COLIBRI_X86", {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq",
                   "-mavx512vl", "-mavx512vnni"],
    }),
    "__aarch64__": ("COLIBRI_ARM", {
        "neon": ["-DCOLIBRI_NEON=1"],
        "dotprod": ["-DCOLIBRI_NEON=1", "-march=armv8.2-a+dotprod"],
    }),
}  # fmt: skip


def build_id():
    """Hash of the C sources, names and bytes; _native.py computes the same in a checkout."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.rglob("*.[ch]")):
        name = path.relative_to(CSRC).as_posix().encode()
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def target_of(compiler):
    """Our macro and the sets of ISAS for what `compiler` makes code for.

    It is asked itself, as it may be a cross compiler. Where it does not answer for one processor,
    (None, {}): plain C alone. So it is with several -arch at once, the default of python.org's
    builds for macOS; ARCHFLAGS="-arch arm64" names one.
    """
    command = [*getattr(compiler, "compiler_so", ["cc"]), "-dM", "-E", "-x", "c", os.devnull]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, {}  # a compiler that is not there will be missed when it is to compile
    macros = {line.split()[1] for line in answer.splitlines() if line.startswith("#define ")}
    return next((found for macro, found in ISAS.items() if macro in macros), (None, {}))


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
        # Sanitizers and the like; last, so that they win.
        extra = shlex.split(os.environ.get("COLIBRI_CFLAGS", ""))
        common = [("COLIBRI_BUILD_ID", f'"{build_id()}"')]
        macro, found = target_of(self.compiler)
        if macro:
            common.append((macro, "1"))
        isas = {"base": [], **found}
        jobs = [("", path, []) for path in sorted(CSRC.glob("*.c"))]
        jobs += [
            (isa, path, flags)
            for isa, flags in isas.items()
            for path in sorted((CSRC / "isa").glob("*.c"))
        ]

        def compile_one(job):
            isa, path, flags = job
            return self.compiler.compile(
                [os.path.relpath(path)],
                output_dir=str(Path(self.build_temp) / (isa or "plain")),
                macros=[*common, ("COLIBRI_ISA_NAME", isa)] if isa else common,
                depends=ext.depends,
                extra_postargs=FLAGS + flags + extra,
            )

        # The folders first: distutils remembers those it made, which is not safe for threads.
        for isa, _, _ in jobs:
            for folder in ("csrc", "csrc/isa"):
                self.mkpath(str(Path(self.build_temp) / (isa or "plain") / folder))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for found in pool.map(compile_one, jobs) for name in found]
        output.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects,
            str(output),
            libraries=[] if sys.platform == "win32" else ["m"],
            extra_postargs=["-pthread", *extra],
        )

    def _give_up(self, output, error):
        output.unlink(missing_ok=True)
        text = (
            f"colibri-runtime: its C library could not be built: {error}\n"
            "Models will be computed in NumPy, many times slower. Install gcc or clang and "
            "reinstall."
        )
        if os.environ.get("COLIBRI_REQUIRE_NATIVE") == "1":
            sys.exit(f"{text}\nCOLIBRI_REQUIRE_NATIVE=1 makes this an error.")
        bar = "!" * 78
        sys.stderr.write(f"\n{bar}\n{text}\n{bar}\n\n")


class NativeWheel(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def relative(pattern):
    return sorted(path.relative_to(HERE).as_posix() for path in CSRC.rglob(pattern))


setup(
    ext_modules=[
        Extension(
            "colibri_runtime.libcolibri_runtime",
            relative("*.c"),
            depends=relative("*.h"),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
)
