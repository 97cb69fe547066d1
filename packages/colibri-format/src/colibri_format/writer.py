"""Writing a `.colibri` file: planned first, streamed in, complete or not there (spec, 13)."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final
from uuid import UUID

import numpy as np
import xxhash
from numpy.typing import NDArray

from .checksum import Buffer, checksum, view_bytes
from .errors import StorageError, UsageError
from .header import COPIED_REGIONS, Region, RegionExtent, Superblock, encode_superblock
from .layout import PAGE, block_seed, file_seed, tensor_seed
from .plan import FilePlan
from .tables import encode_tables

_ZEROS: Final = bytes(64)


class Writer:
    """Writes the file that `plan` describes; a context manager, for one thread.

    Blocks, tensors and embedded files come in any order, each exactly once. Leaving the context
    checks that all came, and only then gives the file its name: before that it is `NAME.part`,
    and an exception removes it. With `overwrite` an existing file is replaced at that moment.

    Raises:
        UsageError: `written-twice`, `not-written`, `bad-length`, `no-such-expert`,
            `no-such-tensor`, `no-such-file`.
        StorageError: `file-exists`, `output-busy`, `disk-full`, or the kernel's error.
    """

    def __init__(
        self, path: str | os.PathLike[str], plan: FilePlan, *, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.plan = plan
        self._overwrite = overwrite
        self._part = self.path.with_name(self.path.name + ".part")
        self._fd = -1
        shape = plan.index.shape
        self._block_sums: NDArray[np.uint64] = np.zeros(shape, np.uint64)
        self._written: NDArray[np.bool_] = np.zeros(shape, np.bool_)
        self._tensors = {tensor.name: n for n, tensor in enumerate(plan.tensors)}
        self._files = {file.name: n for n, file in enumerate(plan.files)}
        self._tensor_sums: dict[int, int] = {}
        self._file_sums: dict[int, int] = {}
        self._uuid: UUID | None = None

    @property
    def uuid(self) -> UUID:
        """The finished file's identity."""
        if self._uuid is None:
            raise UsageError("not-written", self.path, "is not finished", "leave the context first")
        return self._uuid

    def __enter__(self) -> Writer:
        if self.path.is_dir():
            raise StorageError("is-a-directory", self.path, "is a folder", "a file name")
        self._check_absent()
        try:
            self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError.of(error, self._part, "creating") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise StorageError(
                "output-busy",
                self._part,
                "another process is writing it",
                "one writer at a time",
                errno=error.errno,
            ) from error
        try:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, self.plan.file_size)
        except OSError as error:
            self._discard()
            raise StorageError.of(error, self._part, "setting the size of") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._check_complete()
            self._finish()
        except OSError as failure:
            self._discard()
            if isinstance(failure, StorageError):
                raise
            raise StorageError.of(failure, self._part, "finishing") from failure
        except BaseException:
            self._discard()
            raise

    @contextmanager
    def block(self, layer: int, expert: int) -> Iterator[Sink]:
        """A sink for the payload of `(layer, expert)`: its segments' bytes, in the layout's order.

        Chunks may be of any size; the zero bytes between segments are put in here.
        """
        layout = None
        if 0 <= layer < self.plan.geometry.n_layers:
            layout = self.plan.layout(layer)
        is_present = 0 <= expert < self.plan.geometry.n_experts
        if layout is None or not is_present or not self.plan.index[layer, expert]["size"]:
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
        sink = Sink(self, place, offset, extents, block_seed(layer, expert))
        yield sink
        self._block_sums[layer, expert] = sink.finish()
        self._written[layer, expert] = True

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
        sink = Sink(self, f"tensor {name!r}", fact.offset, [(0, fact.size)], tensor_seed(number))
        yield sink
        self._tensor_sums[number] = sink.finish()

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
            self, f"embedded file {name!r}", entry.offset, [(0, entry.size)], file_seed(number)
        )
        sink.write(data)
        self._file_sums[number] = sink.finish()

    def _twice(self, place: str) -> UsageError:
        return UsageError(
            "written-twice", f"{self.path}: {place}", "is already written", "each is written once"
        )

    def _check_absent(self) -> None:
        if not self._overwrite and self.path.exists():
            raise StorageError(
                "file-exists",
                self.path,
                "exists already",
                "a new name is required",
                "choose another name or ask to overwrite",
            )

    def _check_complete(self) -> None:
        missing = [
            f"block L{layer}/E{expert}"
            for layer, expert in np.argwhere((self.plan.index["size"] != 0) & ~self._written)[
                :3
            ].tolist()
        ]
        missing += [f"tensor {n!r}" for n, k in self._tensors.items() if k not in self._tensor_sums]
        missing += [f"file {n!r}" for n, k in self._files.items() if k not in self._file_sums]
        if missing:
            raise UsageError(
                "not-written",
                self.path,
                f"{', '.join(missing[:5])} did not come",
                "all that the plan has is written",
            )

    def _finish(self) -> None:
        regions = self._encode_regions()
        extents = []
        for region in Region:
            offset, copy_offset = self.plan.regions[region]
            data = regions.get(region)
            length = self.plan.region_lengths[region]
            extents.append(RegionExtent(offset, copy_offset, length, checksum(data) if data else 0))
        geometry = self.plan.geometry
        self._uuid = derive_uuid([regions[r] for r in COPIED_REGIONS if r in regions])
        page = encode_superblock(
            Superblock(
                self._uuid,
                self.plan.file_size,
                geometry.n_layers,
                geometry.n_experts,
                geometry.alignment.bit_length() - 1,
                tuple(extents),
            )
        )
        for region, data in regions.items():
            for offset in self.plan.regions[region]:
                self.write_at(offset, data)
        self.write_at(self.plan.file_size - PAGE, page)
        os.fsync(self._fd)
        self.write_at(0, page)
        os.fsync(self._fd)
        self._give_name()

    def _give_name(self) -> None:
        if self._overwrite:
            self._part.replace(self.path)
        else:
            # link refuses an existing name, where rename would silently replace what came
            # between the check at the start and now.
            try:
                os.link(self._part, self.path)
            except FileExistsError:
                self._check_absent()
                raise
            except OSError:
                # File systems without hard links.
                self._check_absent()
                self._part.replace(self.path)
            else:
                self._part.unlink()
        os.close(self._fd)
        self._fd = -1
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _encode_regions(self) -> dict[Region, bytes]:
        tables = dataclasses.replace(
            self.plan.tables,
            tensors=tuple(
                dataclasses.replace(tensor, checksum=self._tensor_sums[n])
                for n, tensor in enumerate(self.plan.tensors)
            ),
            files=tuple(
                dataclasses.replace(file, checksum=self._file_sums[n])
                for n, file in enumerate(self.plan.files)
            ),
        )
        return {
            Region.INDEX: self.plan.index.tobytes(),
            Region.CHECKSUMS: self._block_sums.astype("<u8").tobytes(),
            Region.TABLES: encode_tables(tables),
            Region.METADATA: self.plan.metadata,
        }

    def _discard(self) -> None:
        if self._fd >= 0:
            self._part.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes all of `data` at `offset` of the unfinished file; for the sinks."""
        view = view_bytes(data)
        while len(view):
            try:
                n = os.pwrite(self._fd, view, offset)
            except OSError as error:
                raise StorageError.of(
                    error, self._part, f"writing at {offset:#x}", "the unfinished file is removed"
                ) from error
            view = view[n:]
            offset += n


class Sink:
    """Takes the bytes of one block, tensor or file, in order, in chunks of any size."""

    def __init__(
        self,
        writer: Writer,
        place: str,
        offset: int,
        extents: Sequence[tuple[int, int]],
        seed: int,
    ) -> None:
        self._writer = writer
        self._place = place
        self._offset = offset
        self._extents = list(extents)
        self._required = sum(size for _, size in extents)
        self._received = 0
        self._position = 0
        self._number = 0
        self._digest = xxhash.xxh3_64(seed=seed)

    def write(self, data: Buffer) -> None:
        """Appends `data`.

        Raises:
            UsageError: `bad-length` if more comes than the plan has room for.
        """
        view = view_bytes(data)
        self._received += len(view)
        if self._received > self._required:
            raise self._bad_length()
        while len(view):
            start, size = self._extents[self._number]
            end = start + size
            if self._position < start:
                self._digest.update(_ZEROS[: start - self._position])
                self._position = start
            piece = view[: end - self._position]
            self._digest.update(piece)
            self._writer.write_at(self._offset + self._position, piece)
            self._position += len(piece)
            view = view[len(piece) :]
            if self._position == end:
                self._number += 1

    def finish(self) -> int:
        """The XXH3-64 of all that came; UsageError `bad-length` if something is missing."""
        if self._received != self._required:
            raise self._bad_length()
        return self._digest.intdigest()

    def _bad_length(self) -> UsageError:
        return UsageError(
            "bad-length",
            f"{self._writer.path}: {self._place}",
            f"{self._received} bytes came",
            f"the plan has {self._required}",
        )


def derive_uuid(regions: Sequence[bytes]) -> UUID:
    """The UUID of the content that these regions, in order of their numbers, tell of (spec, 13)."""
    digest = xxhash.xxh3_128()
    for data in regions:
        digest.update(data)
    number = int.from_bytes(digest.digest(), "big")
    number = number & ~(0xF << 76) | 8 << 76
    number = number & ~(0x3 << 62) | 2 << 62
    return UUID(int=number)
