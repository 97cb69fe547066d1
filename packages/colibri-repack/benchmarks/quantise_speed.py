"""BF16 to quants: this package beside ggml, the same rows, the same number of threads, interleaved.

python quantise_speed.py [--library PATH] [--threads 2] [--rounds 7] [TYPE ...]

PATH is a shared library that exports `ggml_quantize_chunk`; the default is that of the wheel
xllamacpp. ggml gets float32 that was decoded by `ggml_bf16_to_fp32_row` within its measured time,
by the same threads, as llama.cpp's quantiser does it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from colibri_format import DTYPES
from colibri_repack import recode
from colibri_repack.recode import engine_name

ROWS, COLUMNS = 2048, 2048
DEFAULT = ("q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", default=DEFAULT)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    path = arguments.library
    if path is None:
        spec = importlib.util.find_spec("xllamacpp")
        path = next(Path(spec.origin).parent.glob("xllamacpp*.so"))
    ggml = ctypes.CDLL(str(path))
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    ggml.ggml_quantize_chunk.argtypes = (ctypes.c_int, pointer, pointer, size, size, size, pointer)
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_bf16_to_fp32_row.argtypes = (pointer, pointer, size)
    ggml.ggml_bf16_to_fp32_row.restype = None
    values = (np.random.default_rng(1).standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    source = (values.view(np.uint32) >> 16).astype(np.uint16)
    pool = ThreadPoolExecutor(arguments.threads)
    share = ROWS // arguments.threads
    floats = np.empty((ROWS, COLUMNS), np.float32)

    def theirs(name: str, out: np.ndarray) -> None:
        dtype = DTYPES[name]

        def work(thread: int) -> None:
            first = thread * share
            at = floats.ctypes.data + 4 * first * COLUMNS
            ggml.ggml_bf16_to_fp32_row(
                source.ctypes.data + 2 * first * COLUMNS, at, share * COLUMNS
            )
            ggml.ggml_quantize_chunk(
                dtype.ggml_id,
                at,
                out.ctypes.data + first * dtype.row_bytes(COLUMNS),
                0,
                share,
                COLUMNS,
                None,
            )

        list(pool.map(work, range(arguments.threads)))

    print(f"{ROWS} x {COLUMNS} BF16, {arguments.threads} threads, {engine_name()}; MB/s of BF16,")
    print(f"median of {arguments.rounds} interleaved rounds (least to most)")
    for name in arguments.types:
        out = np.zeros(DTYPES[name].size_bytes(source.shape), np.uint8)
        seconds: dict[str, list[float]] = {"own": [], "ggml": []}
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            own = recode(
                source.view(np.uint8).reshape(-1),
                DTYPES["bf16"],
                DTYPES[name],
                n_threads=arguments.threads,
            )
            middle = time.perf_counter()
            theirs(name, out)
            seconds["own"].append(middle - start)
            seconds["ggml"].append(time.perf_counter() - middle)
        assert (own == out).all()
        rates = {key: [source.nbytes / 1e6 / s for s in took] for key, took in seconds.items()}
        own_rate, ggml_rate = (statistics.median(rates[key]) for key in ("own", "ggml"))
        spread = {key: f"{min(r):.0f} to {max(r):.0f}" for key, r in rates.items()}
        print(
            f"{name:6} own {own_rate:6.0f} ({spread['own']})  ggml {ggml_rate:6.0f} "
            f"({spread['ggml']})  {own_rate / ggml_rate:.2f} times"
        )


if __name__ == "__main__":
    main()
