"""How fast stored matrices are multiplied, beside the memory they are read from and beside ggml.

`python kernel_speed.py [--types q8_0,q4_0] [--tokens 1,4,8] [--threads 1,2] [--mib 1024]
[--rounds 5] [--isa avx512] [--json]`; ggml's arms need the wheel xllamacpp. Each form of a type is
`--mib` of matrices of 1024 x 2048, larger than any cache, and one pass multiplies all of them, 8
a call as a layer's experts would be; GB/s counts weight bytes. Arms take turns within a round, and
medians and extremes over the rounds are printed. What memory gives is shown by reading the same
bytes in one thread: `read N` in N sequences of addresses in turn (read_memory.c, built for this
processor), `max` with NumPy's maximum of 64-bit integers, `sdot` with BLAS's dot product. `ggml` is
a graph of mul_mat nodes on its CPU backend, `ggml r` the same after its own weight repacking, which
it has for some types only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES, DType, interleave
from colibri_runtime._native import Isa, native
from colibri_runtime.native_kernels import PRODUCT, NativeKernels, aligned_bytes

ROWS, COLUMNS, A_CALL = 1024, 2048, 8
TYPES = "q8_0,q4_0,q4_1,q5_0,q5_1,mxfp4,q2_k,q3_k,q4_k,q5_k,q6_k,f16,bf16,f32"
# Where quant blocks keep half floats (ggml-common.h).
HALVES = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
Bytes = NDArray[np.uint8]


def random_matrix(dtype: DType) -> Bytes:
    """One matrix of valid bytes; subnormal or infinite scales would slow arithmetic down."""
    rng = np.random.default_rng(1)
    if not dtype.is_quantised:
        values = rng.standard_normal(ROWS * COLUMNS).astype(np.float32)
        if dtype.name == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype({"f32": np.float32, "f16": np.float16}[dtype.name]).view(np.uint8)
    n_blocks = ROWS * COLUMNS // dtype.block_elements
    blocks = rng.integers(0, 256, (n_blocks, dtype.block_bytes), dtype=np.uint8)
    if dtype.name == "mxfp4":
        blocks[:, 0] = rng.integers(110, 130, n_blocks)
    for offset in HALVES.get(dtype.name, ()):
        scales = rng.uniform(0.001, 0.02, (n_blocks, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(-1)


def repeated(matrix: Bytes, n: int) -> Bytes:
    out = aligned_bytes(matrix.size * n)
    out.reshape(n, -1)[:] = matrix
    return out


def our_arm(
    kernels: NativeKernels, data: Bytes, dtype: DType, n: int, form: int, n_tokens: int
) -> Callable[[], None]:
    x = np.random.default_rng(2).standard_normal((n_tokens, COLUMNS)).astype(np.float32)
    out = np.zeros((n, n_tokens, ROWS), np.float32)
    products = np.zeros(n, PRODUCT)
    matrices = products["matrix"]
    matrices["data"] = data.ctypes.data + np.arange(n) * (data.size // n)
    matrices["rows"], matrices["columns"] = ROWS, COLUMNS
    matrices["type"], matrices["row_interleave"] = dtype.ggml_id, form
    products["x"], products["x_stride"], products["n_tokens"] = x.ctypes.data, COLUMNS, n_tokens
    products["out"] = out.ctypes.data + np.arange(n) * out[0].nbytes
    products["out_stride"] = ROWS
    calls = [products[start : start + A_CALL] for start in range(0, n, A_CALL)]
    workspace = aligned_bytes(kernels.matmul_workspace(calls[0]))

    def run(held: object = (x, out, data)) -> None:
        for call in calls:
            kernels.matmul(call, workspace)

    return run


class Ggml:
    """ggml's CPU backend, through the C functions that xllamacpp exports."""

    class Parameters(ctypes.Structure):
        _fields_ = (
            ("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p),
            ("no_alloc", ctypes.c_bool),
        )  # fmt: skip

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        # It names every matrix that it repacks.
        self._silence = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda *_: None
        )
        self.call("ggml_log_set", self._silence, None)
        self.backend = self.pointer("ggml_backend_cpu_init")

    def call(self, name: str, *arguments: object) -> int:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int
        return int(function(*arguments))

    def pointer(self, name: str, *arguments: object) -> ctypes.c_void_p:
        function = getattr(self._library, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def context(self, n_tensors: int) -> ctypes.c_void_p:
        size = 1024 * (n_tensors + 1000)
        return self.pointer("ggml_init", self.Parameters(size, None, True))

    def matrix(self, context: ctypes.c_void_p, kind: int, n: int, rows: int) -> ctypes.c_void_p:
        n_rows = ctypes.c_int64(rows)
        return self.pointer("ggml_new_tensor_2d", context, kind, ctypes.c_int64(n), n_rows)

    def fill(self, tensor: ctypes.c_void_p, address: int, size: int) -> None:
        self.call(
            "ggml_backend_tensor_set", tensor, ctypes.c_void_p(address), ctypes.c_size_t(0),
            ctypes.c_size_t(size),
        )  # fmt: skip


class GgmlWeights:
    """Matrices as ggml's tensors: of the same memory, or repacked; `buffer` None if it cannot."""

    def __init__(self, ggml: Ggml, data: Bytes, dtype: DType, n: int, repacks: bool) -> None:
        assert dtype.ggml_id is not None
        self._ggml, self._context = ggml, ggml.context(n)
        matrices = [ggml.matrix(self._context, dtype.ggml_id, COLUMNS, ROWS) for _ in range(n)]
        step = data.size // n
        if repacks:
            kind = ggml.pointer("_Z35ggml_backend_cpu_repack_buffer_typev")
            self.buffer = ggml.pointer(
                "ggml_backend_alloc_ctx_tensors_from_buft", self._context, kind
            )
            # Field `extra` of ggml_tensor, before 8 bytes of padding at its end; NULL where ggml
            # has no repacking for the type, and filling such a tensor would crash.
            end = ggml.call("ggml_tensor_overhead") - 32
            extra = (matrices[0].value or 0) + end - 16
            if not ctypes.c_void_p.from_address(extra).value:
                ggml.call("ggml_backend_buffer_free", self.buffer)
                self.buffer, matrices = ctypes.c_void_p(None), []
            for number, matrix in enumerate(matrices):
                ggml.fill(matrix, data.ctypes.data + number * step, step)
        else:
            start = ctypes.c_void_p(data.ctypes.data)
            size = ctypes.c_size_t(data.size)
            self.buffer = ggml.pointer("ggml_backend_cpu_buffer_from_ptr", start, size)
            for number, matrix in enumerate(matrices):
                place = ctypes.c_void_p(data.ctypes.data + number * step)
                ggml.call("ggml_backend_tensor_alloc", self.buffer, matrix, place)
        self._matrices = matrices

    def arm(self, n_tokens: int, n_threads: int) -> Callable[[], None]:
        ggml, n = self._ggml, len(self._matrices)
        context, held = ggml.context(n + 8), ggml.context(4 * n)
        x = ggml.matrix(context, 0, COLUMNS, n_tokens)
        nodes = [ggml.pointer("ggml_mul_mat", context, matrix, x) for matrix in self._matrices]
        ggml.pointer("ggml_backend_alloc_ctx_tensors", context, ggml.backend)
        acts = np.random.default_rng(2).standard_normal((n_tokens, COLUMNS)).astype(np.float32)
        ggml.fill(x, acts.ctypes.data, acts.nbytes)
        graph = ggml.pointer("ggml_new_graph_custom", held, ctypes.c_size_t(2 * n + 8), False)
        for node in nodes:
            ggml.call("ggml_build_forward_expand", graph, node)

        def run() -> None:
            ggml.call("ggml_backend_cpu_set_n_threads", ggml.backend, n_threads)
            status = ggml.call("ggml_backend_graph_compute", ggml.backend, graph)
            if status != 0:
                raise RuntimeError(f"ggml answers {status}")

        return run

    def close(self) -> None:
        if self.buffer:
            self._ggml.call("ggml_backend_buffer_free", self.buffer)
        self._ggml.call("ggml_free", self._context)


def reader() -> Callable[[int, int, int], int] | None:
    """read_memory.c, where there is a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "read_memory.so"
        source = Path(__file__).with_name("read_memory.c")
        options = ["-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-Wno-psabi"]
        try:
            subprocess.run(["cc", *options, "-o", str(out), str(source)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no `read` arms: {error}", file=sys.stderr)
            return None
        function = ctypes.CDLL(str(out)).read_memory
    function.restype = ctypes.c_uint64
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    return function


def memory_arms(
    data: Bytes, read: Callable[[int, int, int], int] | None
) -> dict[str, Callable[[], object]]:
    """Ways to read all of `data` in one thread."""
    start = -data.ctypes.data % 64
    arms: dict[str, Callable[[], object]] = {}
    if read is not None:
        for n in (1, 4):
            arms[f"read {n}"] = partial(read, data.ctypes.data + start, data.size - start, n)
    floats = np.ones(1 << 18, np.float32)
    pieces = [
        data[start : start + floats.nbytes].view(np.float32)
        for start in range(0, data.size - floats.nbytes + 1, floats.nbytes)
    ]

    def dot() -> None:
        with np.errstate(all="ignore"):
            for piece in pieces:
                np.dot(piece, floats)

    return arms | {"max": lambda: np.max(data[: data.size // 8 * 8].view(np.int64)), "sdot": dot}


def measure(
    arms: dict[str, Callable[[], object]], sizes: dict[str, int], rounds: int
) -> dict[str, list[float]]:
    """GB/s of each arm in each round; one round before, untimed."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            seconds = time.perf_counter() - start
            if turn:
                found[name].append(sizes[name] / seconds / 1e9)
    return found


def results(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    library = native().library
    if library is None:
        sys.exit(f"no C library: {native().reason}")
    isas = library.isas if options.isa is None else Isa[options.isa.upper()]
    read = reader()
    ggml = None
    try:
        import xllamacpp

        ggml = Ggml(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")))
    except ImportError:
        print("no xllamacpp: ggml is left out", file=sys.stderr)
    team = {n: NativeKernels(library, n_threads=n, isas=isas) for n in options.threads}
    for name in options.types:
        dtype = DTYPES[name]
        matrix = random_matrix(dtype)
        n = max(A_CALL, (options.mib << 20) // matrix.size // A_CALL * A_CALL)
        plain = repeated(matrix, n)
        packed = None
        if team[options.threads[0]].has_kernel(dtype, 16):
            packed = repeated(interleave(matrix, dtype, (ROWS, COLUMNS)), n)
        theirs = {}
        if ggml is not None:
            theirs["ggml"] = GgmlWeights(ggml, plain, dtype, n, False)
            theirs["ggml r"] = GgmlWeights(ggml, plain, dtype, n, True)
            if not theirs["ggml r"].buffer:
                theirs.pop("ggml r").close()
        for n_threads in options.threads:
            for n_tokens in options.tokens:
                arms = memory_arms(plain, read)
                if team[n_threads].has_kernel(dtype):
                    arms["plain"] = our_arm(team[n_threads], plain, dtype, n, 0, n_tokens)
                if packed is not None:
                    arms["x16"] = our_arm(team[n_threads], packed, dtype, n, 16, n_tokens)
                for label, weights in theirs.items():
                    arms[label] = weights.arm(n_tokens, n_threads)
                found = measure(arms, dict.fromkeys(arms, plain.size), options.rounds)
                yield {"type": name, "threads": n_threads, "tokens": n_tokens, "gb_s": found}
        for weights in theirs.values():
            weights.close()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", type=lambda text: text.split(","), default=TYPES.split(","))
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 8])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", choices=[isa.name.lower() for isa in Isa])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for result in results(options):
        if options.json:
            print(json.dumps(result), flush=True)
            continue
        found = result["gb_s"]
        assert isinstance(found, dict)
        cells = "  ".join(
            f"{arm} {statistics.median(rates):5.1f} [{min(rates):.1f}..{max(rates):.1f}]"
            for arm, rates in found.items()
        )
        print(f"{result['type']:5} {result['threads']}t x{result['tokens']}: {cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
