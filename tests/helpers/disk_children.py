"""What children of tests do with disk engines; every function returns what JSON can carry."""

from __future__ import annotations

import os
from dataclasses import asdict

import numpy as np

from colibri_format import ColibriError
from colibri_runtime.blocks import block_slot_bytes
from colibri_runtime.disk_choice import open_engine
from colibri_runtime.disk_files import BlockFile
from colibri_runtime.pool import Pool

from .blocks import make_source, small_layout
from .rings import read_of
from .sandbox import forbid, limit_pinned_memory, or_skip


def read_all(engine, source, pool):
    """Errors of reading every block of `source`; blocks with wrong bytes count as `wrong`."""
    keys = sorted(source.payload)
    for slot, key in enumerate(keys):
        engine.submit(read_of(source, pool, key, slot))
    done = []
    while len(done) < len(keys):
        done += engine.wait()
    errors = []
    for read in done:
        if read.error is not None:
            errors.append(getattr(read.error, "code", repr(read.error)))
        elif not np.array_equal(read.buffer[: read.size], source.payload[read.layer, read.expert]):
            errors.append("wrong")
    return errors


def open_one(name, source, pool, **options):
    """An engine of one file, proven with its first block; the pool's memory is its arena."""
    probe = read_of(source, pool, min(source.payload))
    base = pool.slot(0).base
    return open_engine(
        name,
        [BlockFile(source.path, probe, source.file_size)],
        arena=base.reshape(-1),
        **options,
    )


def read_under(path, name, forbidden=None, pins=True):
    """The report and the errors of an engine in a sandbox, or the code of why there is none."""
    source = make_source(path, layouts=[small_layout()] * 2, n_experts=3)
    pool = Pool(len(source.payload), block_slot_bytes(source))
    if forbidden:
        or_skip(forbid, {int(number): error for number, error in forbidden.items()})
    if not pins:
        or_skip(limit_pinned_memory)
    try:
        engine = open_one(name, source, pool)
    except ColibriError as error:
        return {"code": error.code, "errno": error.errno, "message": str(error)}
    errors = read_all(engine, source, pool)
    report = asdict(engine.report())
    engine.close()
    return {"report": report, "errors": errors}


def leave_in_the_middle(path, name):
    """Ends the process while reads are in flight."""
    source = make_source(path, layouts=[small_layout()] * 2, n_experts=3)
    pool = Pool(len(source.payload), block_slot_bytes(source))
    engine = open_one(name, source, pool)
    for slot, key in enumerate(sorted(source.payload)):
        engine.submit(read_of(source, pool, key, slot))
    engine.flush()
    print("[]", flush=True)
    os._exit(0)
