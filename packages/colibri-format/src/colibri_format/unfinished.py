"""What an earlier writer left unfinished, and whether a writer may go on with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from .checkpoints import Resume
from .errors import StorageError
from .journal import (
    VERSION_FACT,
    FoundJournal,
    ItemKind,
    JournalRecord,
    journal_path,
    read_journal,
)
from .layout import block_seed, file_seed, tensor_seed
from .output import OutputFile
from .plan import FilePlan
from .tables import encode_tables

_NO_JOURNAL: Final = "the unfinished file has no journal that tells what is in it: begun anew"
_NO_FILE: Final = "the unfinished file that the journal tells of is gone: begun anew"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Items that need not be written again; with `is_publishing`, only names are to be given.

    With `is_ours` a journal says that the unfinished files are those of a writer. `notes` say in
    words why nothing, or not everything, could be kept.
    """

    goes_on: bool = False
    is_ours: bool = False
    is_publishing: bool = False
    records: tuple[JournalRecord, ...] = ()
    notes: tuple[str, ...] = ()


def find_unfinished(
    path: Path, plan: FilePlan, outputs: Sequence[OutputFile], resume: Resume | None
) -> Unfinished:
    """What may be gone on with of the unfinished file of `path`, all of whose files are locked.

    The items that became durable last are read and compared with their checksums: were the disk to
    acknowledge what it then loses, they would be the ones. If one differs, all are read, and those
    that differ are left out.

    Raises:
        StorageError: `unfinished-differs` when the work was begun with another plan or other
            facts; `part-exists` when there is a journal and no `resume`; `not-a-journal`; or the
            kernel's refusal.
    """
    journal = read_journal(journal_path(path))
    is_there = any(not output.is_empty for output in outputs)
    if resume is not None and resume.restart:
        return Unfinished(is_ours=journal is not None)
    if journal is None:
        is_resumed = resume is not None and is_there
        return Unfinished(notes=(_NO_JOURNAL,) if is_resumed else ())
    if resume is None:
        if not is_there:
            return Unfinished()
        raise StorageError(
            "part-exists",
            outputs[0].part,
            "is unfinished work that can be gone on with",
            "its name free",
            f"repeat the command that began it, or remove it and {journal_path(path).name}",
        )
    if not is_there and not journal.is_publishing:
        return Unfinished(notes=(_NO_FILE,) if journal.records else ())
    if journal.facts is None:
        note = "the journal of the unfinished file is damaged: begun anew"
        return Unfinished(is_ours=True, notes=(note,))
    if set(journal.facts) == {VERSION_FACT} and is_there:
        raise _differs(path, outputs[0], [f"its journal is of {journal.facts[VERSION_FACT]}"])
    if differences := resume.differences(journal.facts):
        if not is_there:
            return Unfinished()
        raise _differs(path, outputs[0], differences)
    records = tuple(_known(journal, plan))
    if journal.is_publishing:
        return Unfinished(is_ours=True, is_publishing=True, records=records)
    if not all(output.is_whole for output in outputs):
        note = "a part of the unfinished work is gone: begun anew"
        return Unfinished(is_ours=True, notes=(note,))
    return _verified(records, plan, outputs)


def with_plan(resume: Resume, plan: FilePlan, volumes: Sequence[Path]) -> Resume:
    """`resume` with facts more: a digest of everything that `plan` says, and where volumes go."""
    digest = xxhash.xxh3_128()
    for data in (
        repr((plan.geometry, plan.file_size, plan.incompat)).encode(),
        encode_tables(plan.tables),
        plan.metadata,
        plan.index.tobytes(),
        plan.expert_layouts.tobytes(),
        plan.block_volumes.tobytes(),
    ):
        digest.update(data)
    facts = {**resume.facts, "plan": digest.hexdigest()}
    for number, path in enumerate(volumes, 1):
        folder = str(path.parent.absolute()).encode("utf-8", "backslashreplace").decode()
        facts[f"volume {number}"] = folder
    return dataclasses.replace(resume, facts=facts)


def _differs(path: Path, output: OutputFile, differences: list[str]) -> StorageError:
    more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
    return StorageError(
        "unfinished-differs",
        output.part,
        f"is unfinished work of another kind ({'; '.join(differences[:4])}{more})",
        "the source and the options that it was begun with",
        f"repeat it with those, choose another name than {path.name}, or begin anew (--restart)",
    )


def _known(journal: FoundJournal, plan: FilePlan) -> Iterable[JournalRecord]:
    """The records of items that the plan has, each item once."""
    n_layers, n_experts = plan.index.shape
    limits = {ItemKind.TENSOR: len(plan.tensors), ItemKind.FILE: len(plan.files)}
    latest = {}
    for record in journal.records:
        if record.kind is ItemKind.BLOCK:
            is_known = record.a < n_layers and record.b < n_experts
            is_known = is_known and plan.index["size"][record.a, record.b] != 0
        else:
            is_known = record.a < limits.get(record.kind, 0)
        if is_known:
            latest[record.kind, record.a, record.b] = record
    return latest.values()


def _verified(
    records: Sequence[JournalRecord], plan: FilePlan, outputs: Sequence[OutputFile]
) -> Unfinished:
    last = max((record.batch for record in records), default=0)
    if all(_is_sound(record, plan, outputs) for record in records if record.batch == last):
        return Unfinished(goes_on=True, records=tuple(records))
    sound = tuple(record for record in records if _is_sound(record, plan, outputs))
    note = (
        f"{len(records) - len(sound)} of {len(records)} items of the unfinished file are not what "
        "its journal says: they are written again"
    )
    return Unfinished(goes_on=True, records=sound, notes=(note,))


def _is_sound(record: JournalRecord, plan: FilePlan, outputs: Sequence[OutputFile]) -> bool:
    output = outputs[0]
    if record.kind is ItemKind.BLOCK:
        offset, size = (int(x) for x in plan.index[record.a, record.b].tolist())
        output = outputs[int(plan.block_volumes[record.a, record.b])]
        seed = block_seed(record.a, record.b)
    elif record.kind is ItemKind.TENSOR:
        tensor = plan.tensors[record.a]
        offset, size, seed = tensor.offset, tensor.size, tensor_seed(record.a)
    else:
        file = plan.files[record.a]
        offset, size, seed = file.offset, file.size, file_seed(record.a)
    digest = xxhash.xxh3_64(seed=seed)
    for piece in output.stream(offset, size):
        digest.update(piece)
    return digest.intdigest() == record.checksum
