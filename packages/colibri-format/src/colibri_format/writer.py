"""Writing a `.colibri` file: planned first, streamed in, complete or not there (spec, 13)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final
from uuid import UUID

import numpy as np
import xxhash
from numpy.typing import NDArray

from .blockindex import BlockIndex, digest_volume
from .checksum import Buffer, checksum, view_bytes
from .errors import UsageError
from .header import (
    COPIED_REGIONS,
    Incompat,
    Region,
    RegionExtent,
    Superblock,
    encode_superblock,
)
from .layout import PAGE, Volume, block_seed, file_seed, tensor_seed
from .output import OutputFile
from .plan import FilePlan
from .tables import encode_tables
from .volume import VOLUME_SUFFIX, VolumePage, encode_page

_ZEROS: Final = bytes(64)


class Writer:
    """Writes the file that `plan` describes, and its volumes; a context manager, for one thread.

    Blocks, tensors and embedded files come in any order, each exactly once. Leaving the context
    checks that all came, and only then gives the files their names: before that they are
    `NAME.part`, and an exception removes them. With `overwrite` existing files are replaced at
    that moment. Volume n is `STEM.LABEL.colibri-volume` in `volume_folders[n - 1]` (default: the
    folder of `path`).

    Raises:
        UsageError: `written-twice`, `not-written`, `bad-length`, `no-such-expert`,
            `no-such-tensor`, `no-such-file`, `bad-volumes`.
        StorageError: `file-exists`, `output-busy`, `disk-full`, or the kernel's error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: FilePlan,
        *,
        overwrite: bool = False,
        volume_folders: Sequence[str | os.PathLike[str]] | None = None,
    ) -> None:
        self.path = Path(path)
        self.plan = plan
        self._overwrite = overwrite
        folders = [self.path.parent] * len(plan.volumes)
        if volume_folders is not None:
            folders = [Path(folder) for folder in volume_folders]
        if len(folders) != len(plan.volumes):
            raise UsageError(
                "bad-volumes",
                self.path,
                f"{len(folders)} folders for volumes",
                f"{len(plan.volumes)}, one for each volume of the plan",
            )
        self.volume_paths = tuple(
            folder / f"{self.path.stem}.{volume.label}{VOLUME_SUFFIX}"
            for folder, volume in zip(folders, plan.volumes, strict=True)
        )
        self._outputs: list[OutputFile] = []
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
        sizes = [self.plan.file_size, *(volume.file_size for volume in self.plan.volumes)]
        try:
            for path, size in zip((self.path, *self.volume_paths), sizes, strict=True):
                self._outputs.append(OutputFile(path, size, overwrite=self._overwrite))
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._check_complete()
                self._finish()
        finally:
            self._discard()

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
        sink = Sink(output, place, offset, extents, block_seed(layer, expert))
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
        sink = Sink(
            self._outputs[0], f"tensor {name!r}", fact.offset, [(0, fact.size)], tensor_seed(number)
        )
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
            self._outputs[0],
            f"embedded file {name!r}",
            entry.offset,
            [(0, entry.size)],
            file_seed(number),
        )
        sink.write(data)
        self._file_sums[number] = sink.finish()

    def _twice(self, place: str) -> UsageError:
        return UsageError(
            "written-twice", f"{self.path}: {place}", "is already written", "each is written once"
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
        block_index = BlockIndex(
            self.plan.index, self._block_sums, self.plan.expert_layouts, self.plan.block_volumes
        )
        volumes = tuple(
            dataclasses.replace(volume, digest=digest_volume(block_index, n))
            for n, volume in enumerate(self.plan.volumes, 1)
        )
        regions = self._encode_regions(volumes)
        page = self._encode_superblock(regions)
        main = self._outputs[0]
        align_log2 = self.plan.geometry.alignment.bit_length() - 1
        for n, (output, volume) in enumerate(zip(self._outputs[1:], volumes, strict=True), 1):
            volume_page = encode_page(VolumePage(n, volume, align_log2))
            output.write_at(volume.file_size - PAGE, volume_page)
            output.sync()
            output.write_at(0, volume_page)
            output.sync()
        for region, data in regions.items():
            for offset in self.plan.regions[region]:
                main.write_at(offset, data)
        main.write_at(self.plan.file_size - PAGE, page)
        main.sync()
        main.write_at(0, page)
        main.sync()
        # The file that names the others comes last: it never points to what is not there.
        for output in reversed(self._outputs):
            output.publish()

    def _encode_superblock(self, regions: Mapping[Region, bytes]) -> bytes:
        extents = []
        for region in Region:
            offset, copy_offset = self.plan.regions[region]
            data = regions.get(region)
            length = self.plan.region_lengths[region]
            extents.append(RegionExtent(offset, copy_offset, length, checksum(data) if data else 0))
        self._uuid = derive_uuid([regions[r] for r in COPIED_REGIONS if r in regions])
        geometry = self.plan.geometry
        return encode_superblock(
            Superblock(
                self._uuid,
                self.plan.file_size,
                geometry.n_layers,
                geometry.n_experts,
                geometry.alignment.bit_length() - 1,
                tuple(extents),
                int(self.plan.incompat),
            )
        )

    def _encode_regions(self, volumes: tuple[Volume, ...]) -> dict[Region, bytes]:
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
            volumes=volumes,
        )
        regions = {
            Region.INDEX: self.plan.index.tobytes(),
            Region.CHECKSUMS: self._block_sums.astype("<u8").tobytes(),
            Region.TABLES: encode_tables(tables),
            Region.METADATA: self.plan.metadata,
        }
        if self.plan.incompat & Incompat.MIXED_LAYOUTS:
            regions[Region.EXPERT_LAYOUTS] = self.plan.expert_layouts.astype("<u2").tobytes()
        if self.plan.incompat & Incompat.STRIPED:
            regions[Region.VOLUME_MAP] = self.plan.block_volumes.astype("<u2").tobytes()
        return regions

    def _discard(self) -> None:
        for output in self._outputs:
            output.discard()


class Sink:
    """Takes the bytes of one block, tensor or file, in order, in chunks of any size."""

    def __init__(
        self,
        output: OutputFile,
        place: str,
        offset: int,
        extents: Sequence[tuple[int, int]],
        seed: int,
    ) -> None:
        self._output = output
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
            self._output.write_at(self._offset + self._position, piece)
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
            f"{self._output.path}: {self._place}",
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
