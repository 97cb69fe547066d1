"""Writing a `.colibri` file: planned first, streamed in, complete or not there (spec, 13)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from .checkpoints import Checkpoints, Resume
from .checksum import Buffer
from .ends import FileEnds, encode_ends
from .errors import StorageError, UsageError
from .journal import ItemKind, Journal, JournalRecord, journal_path, read_journal
from .layout import PAGE, block_seed, file_seed, tensor_seed
from .output import OutputFile
from .plan import FilePlan
from .sink import Sink
from .unfinished import Unfinished, find_unfinished, with_plan
from .volume import VOLUME_SUFFIX
from .write_behind import BUFFER_BYTES


class Writer:
    """Writes the file that `plan` describes, and its volumes; a context manager, for one thread.

    Blocks, tensors and embedded files come in any order, each exactly once. Leaving the context
    checks that all came, and only then gives the files their names: before that they are
    `NAME.part`, and an exception removes them. With `overwrite` existing files are replaced at
    that moment. Volume n is `STEM.LABEL.colibri-volume` in `volume_folders[n - 1]` (default: the
    folder of `path`).

    With `resume` a journal stands beside the unfinished file, and an exception leaves both, unless
    nothing was entered or `abandon` was called; a note on the exception says so. A later writer
    with the same plan and facts goes on from there: what `has_block`, `has_tensor` and `has_file`
    know is not to be written again. `buffer_bytes`: size of each of six buffers a file.

    Raises:
        UsageError: `written-twice`, `not-written`, `bad-length`, `no-such-expert`,
            `no-such-tensor`, `no-such-file`, `bad-volumes`.
        StorageError: `file-exists`, `part-exists`, `output-busy`, `disk-full`, `not-a-journal`,
            `unfinished-differs` when unfinished work is of another plan or other facts, or the
            kernel's error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: FilePlan,
        *,
        overwrite: bool = False,
        volume_folders: Sequence[str | os.PathLike[str]] | None = None,
        resume: Resume | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.path = Path(path)
        self.plan = plan
        self.volume_paths = volume_paths(self.path, plan, volume_folders)
        self.notes: tuple[str, ...] = ()
        self._overwrite = overwrite
        self._resume = None if resume is None else with_plan(resume, plan, self.volume_paths)
        self._buffer_bytes = buffer_bytes
        self._outputs: list[OutputFile] = []
        self._checkpoints: Checkpoints | None = None
        self._published: tuple[OutputFile, ...] | None = None
        self._is_abandoned = False
        shape = plan.index.shape
        self._block_sums: NDArray[np.uint64] = np.zeros(shape, np.uint64)
        self._written: NDArray[np.bool_] = np.zeros(shape, np.bool_)
        self._tensors = {tensor.name: n for n, tensor in enumerate(plan.tensors)}
        self._files = {file.name: n for n, file in enumerate(plan.files)}
        self._tensor_sums: dict[int, int] = {}
        self._file_sums: dict[int, int] = {}
        self._starts = _item_starts(plan)
        self._uuid: UUID | None = None

    @property
    def uuid(self) -> UUID:
        """The finished file's identity."""
        if self._uuid is None:
            raise UsageError("not-written", self.path, "is not finished", "leave the context first")
        return self._uuid

    @property
    def io_mode(self) -> tuple[str, str]:
        """How the file is written, `direct` or `buffered`, and what showed it."""
        return self._outputs[0].io_mode

    @property
    def sync_seconds(self) -> float:
        """How long syncs for the journal took, beside the writing."""
        return self._checkpoints.sync_seconds if self._checkpoints else 0.0

    def has_block(self, layer: int, expert: int) -> bool:
        """Whether the block is written, by this writer or an earlier one."""
        return bool(self._written[layer, expert])

    def has_tensor(self, name: str) -> bool:
        """Whether the dense tensor is written."""
        return self._tensors.get(name) in self._tensor_sums

    def has_file(self, name: str) -> bool:
        """Whether the embedded file is written."""
        return self._files.get(name) in self._file_sums

    def abandon(self) -> None:
        """An exception removes the unfinished file and its journal: going on would be no use."""
        self._is_abandoned = True

    def __enter__(self) -> Writer:
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._leave(error)
            return
        try:
            self._check_complete()
            self._finish()
        except BaseException as failure:
            self._leave(failure)
            raise
        self._release()

    def _open(self) -> None:
        sizes = [self.plan.file_size, *(volume.file_size for volume in self.plan.volumes)]
        paths = (self.path, *self.volume_paths)
        # Looked at before there is a lock, only to know whether the names may be taken already.
        early = read_journal(journal_path(self.path))
        may_exist = self._resume is not None and early is not None and early.is_publishing
        for path, size in zip(paths, sizes, strict=True):
            self._outputs.append(
                OutputFile(
                    path,
                    size,
                    overwrite=self._overwrite,
                    may_exist=may_exist,
                    buffer_bytes=self._buffer_bytes,
                )
            )
        found = find_unfinished(self.path, self.plan, self._outputs, self._resume)
        self.notes = found.notes
        self._take_over(found)
        if found.is_publishing:
            self._publish_only()
            return
        if not found.goes_on:
            self._forget()
            for output in self._outputs:
                output.start(is_ours=found.is_ours)
        if self._resume is not None:
            n_items = self.plan.n_blocks + len(self._tensors) + len(self._files) + 1
            kept = found.records if found.goes_on else ()
            journal = Journal(journal_path(self.path), self._resume.facts, kept, n_items)
            try:
                self._checkpoints = Checkpoints(
                    journal,
                    self._outputs,
                    self._resume,
                    first_batch=max((record.batch for record in kept), default=-1) + 1,
                )
            except BaseException:
                journal.close()
                raise

    def _take_over(self, found: Unfinished) -> None:
        for record in found.records:
            if record.kind is ItemKind.BLOCK:
                self._block_sums[record.a, record.b] = record.checksum
                self._written[record.a, record.b] = True
            elif record.kind is ItemKind.TENSOR:
                self._tensor_sums[record.a] = record.checksum
            elif record.kind is ItemKind.FILE:
                self._file_sums[record.a] = record.checksum

    def _forget(self) -> None:
        self._written[:] = False
        self._tensor_sums.clear()
        self._file_sums.clear()

    def _publish_only(self) -> None:
        """Finds every file whole under its first or its last name; nothing is to be written.

        Raises:
            StorageError: `part-missing` for one that is not: the disk of a volume may be away, and
                beginning anew would throw all of the others away.
        """
        to_publish = []
        for output, page in zip(self._outputs, self._encode_ends().pages, strict=True):
            if output.is_whole and output.read_at(0, PAGE) == page:
                to_publish.append(output)
            elif not (output.is_empty and _is_file(output.path, output.size, page)):
                raise StorageError(
                    "part-missing",
                    output.part,
                    "is not there as it was, when all files of the output were whole",
                    f"the file, or {output.path.name}",
                    "bring its disk back and repeat the command, or begin anew (--restart)",
                )
        self._published = tuple(to_publish)

    def _leave(self, error: BaseException) -> None:
        """Keeps what an error leaves, where it can be gone on with; else removes it."""
        checkpoints = self._checkpoints
        try:
            if checkpoints is None:
                if self._published is None:
                    for output in self._outputs:
                        output.discard()
                return
            if not self._is_abandoned:
                checkpoints.rescue()
            checkpoints.close()
            if self._is_abandoned or not (n_kept := checkpoints.journal.n_items):
                for output in self._outputs:
                    output.discard()
                with contextlib.suppress(StorageError):
                    checkpoints.journal.remove()
            else:
                error.add_note(
                    f"{n_kept} of {self._n_items} items are kept in {self._outputs[0].part}: the "
                    "same command goes on from there; to give them up, remove it and "
                    f"{checkpoints.journal.path.name}, or repeat with --restart"
                )
        finally:
            self._release()

    def _release(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints.journal.close()
        for output in self._outputs:
            output.release()

    @contextmanager
    def block(self, layer: int, expert: int) -> Iterator[Sink]:
        """A sink for the payload of `(layer, expert)`: its segments' bytes, in the layout's order.

        Chunks may be of any size; the zero bytes between segments are put in here.
        """
        layout = None
        n_layers, n_experts = self.plan.index.shape
        if 0 <= layer < n_layers and 0 <= expert < n_experts:
            layout = self.plan.layout(layer, expert)
        if layout is None:
            raise UsageError(
                "no-such-expert",
                f"{self.path}: block L{layer}/E{expert}",
                "is not in the plan",
                "an expert that the plan has",
            )
        place = f"block L{layer}/E{expert}"
        if self._written[layer, expert]:
            raise self._twice(place)
        extents = [(segment.offset, segment.size) for segment in layout.segments]
        offset = int(self.plan.index[layer, expert]["offset"])
        output = self._outputs[int(self.plan.block_volumes[layer, expert])]
        sink = Sink(
            output, place, offset, extents, block_seed(layer, expert), self._reach(output, offset)
        )
        yield sink
        self._block_sums[layer, expert] = sink.finish()
        self._written[layer, expert] = True
        self._note(ItemKind.BLOCK, layer, expert, int(self._block_sums[layer, expert]), output)

    @contextmanager
    def tensor(self, name: str) -> Iterator[Sink]:
        """A sink for the bytes of the dense tensor `name`."""
        number = self._tensors.get(name)
        if number is None:
            raise UsageError(
                "no-such-tensor",
                f"{self.path}: tensor {name!r}",
                "is not in the plan",
                "a tensor that the plan has",
            )
        if number in self._tensor_sums:
            raise self._twice(f"tensor {name!r}")
        fact = self.plan.tensors[number]
        sink = Sink(
            self._outputs[0],
            f"tensor {name!r}",
            fact.offset,
            [(0, fact.size)],
            tensor_seed(number),
            self._reach(self._outputs[0], fact.offset),
        )
        yield sink
        self._tensor_sums[number] = sink.finish()
        self._note(ItemKind.TENSOR, number, 0, self._tensor_sums[number], self._outputs[0])

    def write_block(self, layer: int, expert: int, payload: Buffer) -> None:
        """Writes a whole block: its segments' bytes after each other, in the layout's order."""
        with self.block(layer, expert) as sink:
            sink.write(payload)

    def write_tensor(self, name: str, data: Buffer) -> None:
        """Writes a whole dense tensor."""
        with self.tensor(name) as sink:
            sink.write(data)

    def write_file(self, name: str, data: Buffer) -> None:
        """Writes an embedded file."""
        number = self._files.get(name)
        if number is None:
            raise UsageError(
                "no-such-file",
                f"{self.path}: embedded file {name!r}",
                "is not in the plan",
                "a file that the plan has",
            )
        if number in self._file_sums:
            raise self._twice(f"embedded file {name!r}")
        entry = self.plan.files[number]
        sink = Sink(
            self._outputs[0],
            f"embedded file {name!r}",
            entry.offset,
            [(0, entry.size)],
            file_seed(number),
            self._reach(self._outputs[0], entry.offset),
        )
        sink.write(data)
        self._file_sums[number] = sink.finish()
        self._note(ItemKind.FILE, number, 0, self._file_sums[number], self._outputs[0])

    def _note(self, kind: ItemKind, a: int, b: int, value: int, output: OutputFile) -> None:
        if self._checkpoints is not None:
            self._checkpoints.add(kind, a, b, value, output)

    def _reach(self, output: OutputFile, offset: int) -> int:
        """Where the next item after `offset` may start, or the data region ends."""
        starts = self._starts[self._outputs.index(output)]
        return int(starts[np.searchsorted(starts, offset, side="right")])

    def _twice(self, place: str) -> UsageError:
        return UsageError(
            "written-twice", f"{self.path}: {place}", "is already written", "each is written once"
        )

    @property
    def _n_items(self) -> int:
        return self.plan.n_blocks + len(self._tensors) + len(self._files)

    def _missing(self) -> list[str]:
        """What is not written; of blocks only the first ones."""
        missing = [
            f"block L{layer}/E{expert}"
            for layer, expert in np.argwhere((self.plan.index["size"] != 0) & ~self._written)[
                :3
            ].tolist()
        ]
        missing += [f"tensor {n!r}" for n, k in self._tensors.items() if k not in self._tensor_sums]
        missing += [f"file {n!r}" for n, k in self._files.items() if k not in self._file_sums]
        return missing

    def _check_complete(self) -> None:
        if missing := self._missing():
            raise UsageError(
                "not-written",
                self.path,
                f"{', '.join(missing[:5])} did not come",
                "all that the plan has is written",
            )

    def _finish(self) -> None:
        if self._published is None:
            self._write_ends()
        # The file that names the others comes last: it never points to what is not there.
        for output in reversed(self._outputs if self._published is None else self._published):
            output.publish()
        with contextlib.suppress(StorageError):
            # The file is complete; a journal without an unfinished file is passed over.
            if self._checkpoints is not None:
                self._checkpoints.journal.remove()
            elif self._resume is not None:
                journal_path(self.path).unlink(missing_ok=True)

    def _encode_ends(self) -> FileEnds:
        ends = encode_ends(self.plan, self._block_sums, self._tensor_sums, self._file_sums)
        self._uuid = ends.uuid
        return ends

    def _write_ends(self) -> None:
        """Writes what stands around the data; the pages that make files valid come last."""
        if self._checkpoints is not None:
            self._checkpoints.finish()
        ends = self._encode_ends()
        main = self._outputs[0]
        for region, data in ends.regions.items():
            for offset in self.plan.regions[region]:
                main.write_at(offset, data)
        for output, page in zip(self._outputs, ends.pages, strict=True):
            output.write_at(output.size - PAGE, page)
            output.flush()
            output.sync()
        for output, page in zip(reversed(self._outputs), reversed(ends.pages), strict=True):
            output.write_at(0, page)
            output.flush()
            output.sync()
        if self._checkpoints is not None:
            self._checkpoints.journal.append([JournalRecord(ItemKind.PUBLISH, 0, 0, 0, 0)])


def volume_paths(
    path: Path, plan: FilePlan, folders: Sequence[str | os.PathLike[str]] | None
) -> tuple[Path, ...]:
    """Where the volumes of the file `path` stand.

    Raises:
        UsageError: `bad-volumes` unless there is a folder for each volume, or None for all.
    """
    chosen = [path.parent] * len(plan.volumes) if folders is None else [Path(f) for f in folders]
    if len(chosen) != len(plan.volumes):
        raise UsageError(
            "bad-volumes",
            path,
            f"{len(chosen)} folders for volumes",
            f"{len(plan.volumes)}, one for each volume of the plan",
        )
    return tuple(
        folder / f"{path.stem}.{volume.label}{VOLUME_SUFFIX}"
        for folder, volume in zip(chosen, plan.volumes, strict=True)
    )


def _item_starts(plan: FilePlan) -> list[NDArray[np.uint64]]:
    """For each file, sorted: where its items start, and where its data region ends."""
    extents = [plan.data_region, *(volume.data for volume in plan.volumes)]
    starts = []
    for number, extent in enumerate(extents):
        found = [plan.index["offset"][(plan.block_volumes == number) & (plan.index["size"] != 0)]]
        if number == 0:
            offsets = [tensor.offset for tensor in plan.tensors if tensor.size]
            offsets += [file.offset for file in plan.files if file.size]
            found.append(np.array(offsets, np.uint64))
        # An item of no bytes stands at 0, which nothing reaches beyond.
        found.append(np.array([extent.offset + extent.size, 2**63], np.uint64))
        starts.append(np.unique(np.concatenate(found)))
    return starts


def _is_file(path: Path, size: int, page: bytes) -> bool:
    """Whether a file of `size` bytes that starts with `page` has the name `path`."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == size and file.read(PAGE) == page
    except OSError:
        return False
