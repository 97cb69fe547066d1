"""Tokens a second with everything in memory, alone and beside a process that spins.

    python busy_neighbour.py MODEL.colibri [--rounds 5] [--tokens 12]

Alone and beside take turns; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from colibri_runtime import RunConfig, Runtime

PROMPT = [5, 9, 77]


def rate(decoder, n_tokens):
    decoder.kv_cache.truncate(len(PROMPT))
    logits = decoder.forward([5])
    started = time.perf_counter()
    for _ in range(n_tokens):
        logits = decoder.forward([int(np.argmax(logits))])
    return n_tokens / (time.perf_counter() - started)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args(argv)
    pairs = []
    with Runtime.open(options.model, RunConfig(context=512)) as runtime:
        decoder = runtime.decoder
        decoder.forward(PROMPT)
        rate(decoder, 4 * options.tokens)  # until what is asked for is resident
        for _ in range(options.rounds):
            alone = rate(decoder, options.tokens)
            neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                time.sleep(0.3)
                pairs.append((alone, rate(decoder, options.tokens)))
            finally:
                neighbour.kill()
                neighbour.wait()
    ratios = [beside / alone for alone, beside in pairs]
    print(
        f"alone {statistics.median(a for a, _ in pairs):.1f} tokens/s, beside a process that spins "
        f"{statistics.median(b for _, b in pairs):.1f}: {statistics.median(ratios):.0%} "
        f"({min(ratios):.0%} to {max(ratios):.0%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
