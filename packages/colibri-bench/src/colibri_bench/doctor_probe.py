"""Looks at the machine: short measurements, and what the system tells."""

from __future__ import annotations

import platform
import re
import resource
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from colibri_format import ColibriError
from colibri_runtime._native import native
from colibri_runtime.disk_queue import default_depth
from colibri_runtime.machine import available_bytes

from .doctor_plan import Probe
from .io_files import Blocks, synthetic_file
from .io_plan import Extent, Way, plan_blocks, share_out
from .io_run import read_extents
from .io_slots import SlotRotation
from .leftovers import find_leftovers
from .machine_facts import describe_disk, describe_machine
from .memory_rate import memory_rate
from .page_cache import drop_caches

_MADE_BYTES: Final = 256 * 2**20
_BLOCK_BYTES: Final = 2**20
_PIECE_BYTES: Final = 64 * 2**20
_ENGINES: Final = ("uring", "aio", "threads")


def probe_machine(blocks: Blocks | None, folder: Path, *, seconds: float = 2.0) -> Probe:
    """Measures for about `seconds`; without blocks, on a file made in `folder` and removed."""
    with ExitStack() as stack:
        if blocks is None:
            path = stack.enter_context(synthetic_file(folder, _MADE_BYTES))
            blocks = Blocks([path], plan_blocks(_MADE_BYTES, _BLOCK_BYTES), None)
        depth = default_depth(blocks.largest)
        slots = SlotRotation(blocks.largest, depth)
        stack.callback(slots.close)
        engines = {name: _refusal(name, blocks, slots) for name in _ENGINES}
        chosen = next((name for name in _ENGINES if not engines[name]), "threads")
        rate = _disk_rate(Way(chosen, depth), blocks, slots, seconds)
        disk = describe_disk(blocks.paths[0])
    facts = describe_machine()
    found = native()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Probe(
        kernel=platform.release(),
        engines=engines,
        file_system=disk.file_system,
        is_rotational=disk.is_rotational,
        disk_bytes_per_s=rate,
        memory_bytes_per_s=memory_rate(facts.n_cpus),
        available_bytes=available_bytes(),
        huge_pages=_huge_pages(),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        n_cpus=facts.n_cpus,
        cpu=facts.cpu,
        native=found.reason if found.library is None else "",
        isa="" if found.library is None else found.library.best.name or "",
        leftovers=tuple(str(path) for path in find_leftovers(folder)),
    )


def _refusal(engine: str, blocks: Blocks, slots: SlotRotation) -> str:
    """Empty if the engine reads a block directly, else why not."""
    extent = blocks.layers[0][0]
    try:
        timed = read_extents(Way(engine, 1), blocks.paths, [extent], slots)
    except (ColibriError, OSError) as error:
        return str(error)
    return "" if timed.mode == "direct" else timed.reason or "reads through the page cache"


def _disk_rate(way: Way, blocks: Blocks, slots: SlotRotation, seconds: float) -> float | None:
    """Bytes a second over different blocks until the time is up or all were read."""
    pieces = _pieces(blocks)
    drop_caches(*blocks.paths)
    n_bytes, spent = 0, 0.0
    started = time.perf_counter()
    for piece in pieces:
        timed = read_extents(way, blocks.paths, piece, slots)
        n_bytes += timed.n_bytes
        spent += timed.seconds
        if time.perf_counter() - started > seconds:
            break
    return n_bytes / spent if spent else None


def _pieces(blocks: Blocks) -> list[list[Extent]]:
    """All blocks in random order within layers, in pieces of some 64 MiB."""
    share = share_out(blocks.layers, 1, 2**62, seed=1)[0]
    n = max(1, _PIECE_BYTES // blocks.largest)
    return [share[start : start + n] for start in range(0, len(share), n)]


def _huge_pages(root: Path = Path("/")) -> str | None:
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    match = re.search(r"\[(\w+)\]", text)
    return match.group(1) if match else None
