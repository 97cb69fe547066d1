"""What reading blocks in pieces gives: the rate of small fetches, by length of a piece.

    python read_pieces.py [--folder /tmp] [--mib 3.5] [--group 3] [--pieces 0,1024,4096]

Blocks of `--mib` MiB stand in one file of 3 GiB; the store reads all of them once, in random order,
`--group` at a time, each fetch after the one before, so the time from the last byte of a fetch to
its lease counts each time. Lengths of pieces (KiB; 0: whole blocks) take turns, the order turned by
one each round; ratios are to the first within the round. The page cache is emptied of the file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from synthetic_blocks import Blocks, forget

import colibri_runtime.disk_choice as choice
from colibri_runtime import RunConfig
from colibri_runtime.blocks import BlockTable
from colibri_runtime.opening import open_pool
from colibri_runtime.pool_plan import plan_pool, pool_cost


def rate(blocks, size, group, seed, piece_kib):
    """Bytes a second."""
    choice.DEFAULT_PIECE_BYTES = 1024 * piece_kib
    n_experts = blocks.block_index.entries.shape[1]
    plan = plan_pool(
        pool_cost(max(4, 2 * group), size),
        BlockTable([blocks]).census(),
        top_k=group,
        prefetch_depth=0,
    )
    forget(blocks.path)
    with open_pool([blocks], plan, RunConfig(prefetch_depth=0)) as store:
        order = np.random.default_rng(seed).permutation(n_experts)
        started = time.perf_counter()
        n_read = 0
        for first in range(0, n_experts - group, group):
            with store.fetch(0, order[first : first + group].tolist()) as fetch:
                while leases := fetch.take():
                    n_read += len(leases)
        return n_read * size / (time.perf_counter() - started)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=float, default=3.5)
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--pieces", default="0,1024,4096")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(argv)
    size = int(options.mib * 2**20) // 4096 * 4096
    path = options.folder / f"read_pieces.{size}.blocks"
    blocks = Blocks(path, 1, max(4 * options.group, 3 * 2**30 // size), size)
    pieces = [int(text) for text in options.pieces.split(",")]
    rates = {piece: [] for piece in pieces}
    try:
        for number in range(options.rounds):
            turn = number % len(pieces)
            for piece in pieces[turn:] + pieces[:turn]:
                rates[piece].append(rate(blocks, size, options.group, number, piece))
    finally:
        path.unlink()
    for piece, found in rates.items():
        ratios = sorted(a / b for a, b in zip(found, rates[pieces[0]], strict=True))
        print(
            f"{piece or 'whole':>6} KiB  {statistics.median(found) / 1e9:.2f} GB/s  of the first "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
