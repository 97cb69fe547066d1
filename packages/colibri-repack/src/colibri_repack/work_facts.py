"""What tells whether unfinished work may be gone on with: tool, options, and the very inputs."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from importlib.metadata import version
from typing import Final

import xxhash

from colibri_format import Resume

from .repack_plan import RepackOptions, RepackPlan
from .sources import Source
from .sources.files import Fingerprint

INPUT: Final = "input "
# They change how the work is done and not one byte of what it gives.
_NOT_FACTS: Final = frozenset({"memory_bytes"})


def resume_of(
    plan: RepackPlan, source: Source, *, restart: bool = False, trust_source: bool = False
) -> Resume:
    """What the writer of `plan`'s file is to compare unfinished work by.

    Devices are left out: their numbers may change when a machine starts again.
    """
    facts = {
        "tool": f"colibri-repack {version('colibri-repack')}",
        "tensors": _digest_of_tensors(source),
        "embedded files": _digest_of_files(plan),
        **_options(plan.options),
    }
    inputs = dict(source.fingerprints)
    if plan.options.imatrix is not None:
        inputs |= plan.options.imatrix.fingerprints
    for number, (path, found) in enumerate(inputs.items()):
        name = path.name.encode("utf-8", "backslashreplace").decode()
        facts[f"{INPUT}{number} {name}"] = _describe(found)
    return Resume(facts, restart=restart, trusted=INPUT if trust_source else None)


def _describe(found: Fingerprint) -> str:
    return (
        f"{found.size} bytes, inode {found.inode}, mtime {found.mtime_ns}, ctime {found.ctime_ns}"
    )


def _options(options: RepackOptions) -> dict[str, str]:
    """Options with plain values; what others do shows in the file's plan."""
    facts = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, Enum):
            value = value.value
        if field.name not in _NOT_FACTS and (value is None or isinstance(value, (str, int))):
            facts[f"option {field.name}"] = str(value)
    return facts


def _digest_of_tensors(source: Source) -> str:
    """Of what the headers say of every tensor."""
    digest = xxhash.xxh3_128()
    for tensor in source.tensors.values():
        where = (tensor.name, tensor.dtype.name, tensor.shape, tensor.file.name, tensor.offset)
        digest.update(repr(where).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _digest_of_files(plan: RepackPlan) -> str:
    digest = xxhash.xxh3_128()
    for file in plan.embedded:
        digest.update(file.read())
    return digest.hexdigest()
