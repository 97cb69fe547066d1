"""How a repack stays within its memory: sizes and numbers of buffers, decided before any is made.

Memory is what the process has resident, interpreter included. Buffers are few and large: disks
want large requests, and a worker that reads, decodes and encodes a whole tile needs no other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from colibri_format import format_size, round_up
from colibri_format.page_memory import page_memory_bytes
from colibri_format.write_behind import N_BUFFERS, N_THREADS

from .errors import MemoryBudgetError
from .plan_advice import index_advice

DEFAULT_MEMORY: Final = 512 * 2**20
# Measured, rounded up: interpreter, NumPy, modules and the arrays of a conversion; the entry, slice
# and job of a tensor.
WORKING_BYTES: Final = 64 * 2**20
PER_PART_BYTES: Final = 2048
PIECES: Final = 32
"""Slices, or parts of them, that one tile holds at most."""
PAGE: Final = 4096
_MIB: Final = 2**20
_LEAST_PARTS: Final = 2  # an expert has up and down
_INDEX_BYTES: Final = 24  # of an expert: extent and checksum
_TILES: Final = (4 * _MIB, 2 * _MIB, _MIB)
_SMALL_TILES: Final = (_MIB // 2, _MIB // 4)
_WRITE_BUFFER: Final = 4 * _MIB
_DECODING_TILES: Final = 4  # codes, decoded numbers, and the arrays in between
# Of a thread: its stack, what malloc keeps for it.
_PER_THREAD: Final = _MIB


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a repack cannot do without.

    `fixed_bytes` are there whatever the buffers are. `least_tile_bytes` is the longest row that
    cannot be cut. `worker_bytes` are arrays that a thread makes beside its buffers.
    """

    fixed_bytes: int
    n_files: int = 1
    is_recoding: bool = False
    is_decoding: bool = False
    is_interleaving: bool = False
    least_tile_bytes: int = 0
    worker_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Buffers within a budget: `n_tiles` results of `tile_bytes`, made by `n_workers` threads.

    While one result is written the others are read ahead. Each output file has `N_BUFFERS`
    of `write_buffer_bytes`. `total_bytes` is the peak, never above `budget_bytes`.
    """

    budget_bytes: int
    total_bytes: int
    tile_bytes: int
    n_workers: int
    n_tiles: int
    write_buffer_bytes: int


def check_metadata(budget_bytes: int, n_layers: int, n_experts: int) -> None:
    """Raise if the plan alone, of so many layers with experts, is more than `budget_bytes`.

    To be asked before it is made: that takes the memory, and descriptions may say any number.

    Raises:
        MemoryBudgetError: `budget-too-small`.
    """
    n = n_layers * n_experts
    least = -(-(WORKING_BYTES + _LEAST_PARTS * PER_PART_BYTES * n) // _MIB)
    if least * _MIB <= budget_bytes:
        return
    advice = index_advice(_INDEX_BYTES * n, n_layers, n_experts)
    raise MemoryBudgetError(
        "budget-too-small",
        "repack",
        f"a memory budget of {format_size(budget_bytes)} ({budget_bytes} bytes) for {n_layers} "
        f"layers of {n_experts} experts",
        f"more than {least}M for the model's metadata alone",
        advice or f"repack with --memory {2 * least}M",
    )


def plan_memory(budget_bytes: int, needs: MemoryNeeds, n_cores: int) -> MemoryPlan:
    """The largest buffers and the most threads within `budget_bytes`.

    One worker more than cores: while one waits for the disk the others compute.

    Raises:
        MemoryBudgetError: `budget-too-small`, naming the smallest that works.
    """
    most = n_cores + 1
    choices = [(tile, most) for tile in _TILES]
    choices += [(_TILES[-1], n) for n in range(most - 1, 1, -1)]
    choices += [(tile, 2) for tile in _SMALL_TILES] + [(_SMALL_TILES[-1], 1)]
    for tile, n_workers in choices:
        plan = _planned(budget_bytes, needs, tile, n_workers)
        if plan.total_bytes <= budget_bytes:
            return plan
    # The last choice is the smallest; in whole MiB, as people name budgets.
    least = -(-plan.total_bytes // _MIB) * _MIB
    raise MemoryBudgetError(
        "budget-too-small",
        "repack",
        f"a memory budget of {format_size(budget_bytes)} ({budget_bytes} bytes)",
        f"at least {least // _MIB}M ({least} bytes), of which "
        f"{format_size(needs.fixed_bytes)} are for the program and the model's metadata",
        f"repack with --memory {least // _MIB}M or more",
    )


def _planned(budget: int, needs: MemoryNeeds, tile: int, n_workers: int) -> MemoryPlan:
    tile = max(tile, needs.least_tile_bytes)
    buffer = tile_buffer_bytes(tile)
    n_tiles = n_workers + 1
    worker = _PER_THREAD + needs.worker_bytes
    worker += buffer * (needs.is_recoding + needs.is_interleaving)
    worker += _DECODING_TILES * tile * needs.is_decoding
    write_buffer = min(_WRITE_BUFFER, round_up(tile, PAGE))
    total = (
        needs.fixed_bytes
        + n_tiles * buffer
        + n_workers * worker
        + needs.n_files * (N_BUFFERS * page_memory_bytes(write_buffer) + N_THREADS * _PER_THREAD)
    )
    return MemoryPlan(budget, total, tile, n_workers, n_tiles, write_buffer)


def tile_buffer_bytes(tile_bytes: int) -> int:
    """Memory of one tile: direct reads want each piece as far from a page as in its file."""
    return page_memory_bytes(tile_bytes + (PIECES + 1) * PAGE)
