"""Opening and reading a `.colibri` file (spec, section 11)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from .blockindex import BlockIndex, check_index, layouts_of_layers
from .canonical import parse_canonical
from .checksum import checksum, view_bytes
from .errors import FormatCode, FormatError, StorageError, UsageError
from .handles import Expert, Tensor
from .header import (
    COPIED_REGIONS,
    MIN_FILE_SIZE,
    Region,
    Superblock,
    find_unsoundness,
    parse_superblock,
)
from .layout import (
    INDEX_DTYPE,
    PAGE,
    DenseTensor,
    Extent,
    FileEntry,
    Geometry,
    Layout,
    Volume,
    file_seed,
    round_up,
)
from .table_parser import parse_tables
from .tables import MIXED, Tables
from .verify import Damage, verify_file
from .volume import FoundVolume, find_volumes


def open_file(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    volumes: Sequence[str | os.PathLike[str]] | None = (),
) -> Reader:
    """The `.colibri` file `path`, opened and validated; a context manager.

    Everything that does not need the data region is checked now, the data when it is read;
    `verify=False` leaves out the latter. `volumes` names the folders to search for the volumes of
    a striped file, after the file's own; None opens it without them, to look at.

    Raises:
        FormatError: with the code of the first rule that the file breaks.
        StorageError: the kernel refused to open or read it.
    """
    return Reader(path, verify=verify, volumes=volumes)


class Reader:
    """An open file. Every method may be called from any thread; reads are positional.

    `index` is the read-only structured array `[n_layers][n_experts]` of `{offset, size}`,
    `checksums` the read-only `uint64` array beside it; both are views of the file's own bytes.
    `warnings` tells what was damaged and made good from its copy.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        volumes: Sequence[str | os.PathLike[str]] | None = (),
    ) -> None:
        self.path = Path(path)
        self.is_verifying = verify
        self._where = str(self.path)
        self._volume_files: list[FoundVolume] = []
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise StorageError.of(error, self.path, "opening") from error
        try:
            self._open(volumes)
        except BaseException:
            self.close()
            raise

    def _open(self, volumes: Sequence[str | os.PathLike[str]] | None) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError("not-a-file", self.path, "is no regular file", "a file is required")
        self.file_size = status.st_size
        warnings: list[str] = []
        self.superblock = self._read_superblock(warnings)
        self.geometry: Geometry = self.superblock.geometry
        data = {
            region: self._read_region(region, warnings)
            for region in COPIED_REGIONS
            if self.superblock.region(region).length
        }
        self.tables: Tables = parse_tables(
            data[Region.TABLES],
            self.geometry,
            self.data_region,
            self._where,
            self.superblock.incompat,
        )
        shape = (self.geometry.n_layers, self.geometry.n_experts)
        self.index: NDArray[Any] = np.frombuffer(data[Region.INDEX], INDEX_DTYPE).reshape(shape)
        # The same bytes again: a memoryview gives one number in a tenth of NumPy's time.
        self._entries = np.frombuffer(data[Region.INDEX], "<u8").astype(np.uint64, copy=False).data
        self.checksums: NDArray[np.uint64] = np.frombuffer(data[Region.CHECKSUMS], "<u8").reshape(
            shape
        )
        layouts = data.get(Region.EXPERT_LAYOUTS)
        volume_map = data.get(Region.VOLUME_MAP)
        self.block_index = BlockIndex(
            self.index,
            self.checksums,
            layouts_of_layers(self.tables, self.index["size"] != 0)
            if layouts is None
            else np.frombuffer(layouts, "<u2").reshape(shape),
            np.zeros(shape, np.uint16)
            if volume_map is None
            else np.frombuffer(volume_map, "<u2").reshape(shape),
        )
        check_index(self.block_index, self.tables, self.geometry, self.data_region, self._where)
        self.metadata: dict[str, Any] = parse_canonical(data[Region.METADATA], self._where)
        if volumes is not None and self.tables.volumes:
            folders = list(dict.fromkeys([self.path.parent, *map(Path, volumes)]))
            self._volume_files = find_volumes(
                self.tables.volumes, self.superblock.align_log2, folders, self._where
            )
            for file in self._volume_files:
                warnings += file.warnings
        self.warnings = tuple(warnings)
        self.tensors: Mapping[str, DenseTensor] = MappingProxyType(
            {tensor.name: tensor for tensor in self.tables.tensors}
        )
        self.files: Mapping[str, FileEntry] = MappingProxyType(
            {file.name: file for file in self.tables.files}
        )
        self._tensor_numbers = {t.name: n for n, t in enumerate(self.tables.tensors)}
        self._file_numbers = {f.name: n for n, f in enumerate(self.tables.files)}

    def _read_superblock(self, warnings: list[str]) -> Superblock:
        if self.file_size < MIN_FILE_SIZE:
            raise FormatError(
                FormatCode.FILE_TOO_SMALL,
                self._where,
                f"has {self.file_size} bytes",
                f"a .colibri file has at least {MIN_FILE_SIZE}",
                "it is empty, cut short, or no .colibri file",
            )
        head = self.read_at(0, PAGE)
        fault = find_unsoundness(head, self._where)
        if fault is None:
            self._check_size(head)
            tail = self.read_at(self.file_size - PAGE, PAGE)
            tail_fault = find_unsoundness(tail, self._where)
            if tail_fault is not None:
                warnings.append(f"the superblock at the end is damaged ({tail_fault.code})")
            elif tail != head:
                raise FormatError(
                    FormatCode.SUPERBLOCK_CONFLICT,
                    self._where,
                    "the superblocks at its ends are both sound but differ",
                    "they are the same",
                    "the file is a mixture of two: restore it",
                )
            return parse_superblock(head, self._where)
        tail = self.read_at(self.file_size - PAGE, PAGE)
        if find_unsoundness(tail, self._where) is not None or _size_in(tail) != self.file_size:
            raise fault
        warnings.append(f"the superblock at the start is damaged ({fault.code})")
        return parse_superblock(tail, self._where)

    def _check_size(self, page: bytes) -> None:
        required = _size_in(page)
        if self.file_size < required:
            raise FormatError(
                FormatCode.TRUNCATED,
                self._where,
                f"has {self.file_size} bytes",
                f"its superblock says {required}",
                "the file is truncated: copy it again or repack it",
            )
        if self.file_size > required:
            raise FormatError(
                FormatCode.TRAILING_BYTES,
                self._where,
                f"has {self.file_size} bytes",
                f"its superblock says {required}",
                "something was appended to the file",
            )

    def _read_region(self, region: Region, warnings: list[str]) -> bytes:
        head = self.read_region_copy(region, is_tail=False)
        tail = self.read_region_copy(region, is_tail=True)
        data = tail if head is None else head
        if data is None:
            raise FormatError(
                FormatCode.REGION_CHECKSUM,
                f"{self._where}: region {region.name.lower()}",
                "both copies are damaged",
                "one sound copy",
                "repack the file or restore it",
            )
        for copy, place in ((head, "start"), (tail, "end")):
            if copy is None:
                warnings.append(f"the {region.name.lower()} region at the {place} is damaged")
        return data

    def read_region_copy(self, region: Region, *, is_tail: bool) -> bytes | None:
        """One copy of `region`, or None if it is not sound (spec, 11.6)."""
        extent = self.superblock.region(region)
        offset = extent.copy_offset if is_tail else extent.offset
        data = self.read_at(offset, round_up(extent.length, PAGE))
        payload, padding = data[: extent.length], data[extent.length :]
        return payload if checksum(payload) == extent.checksum and not any(padding) else None

    @property
    def uuid(self) -> UUID:
        """Identity of the content: equal for equal files only."""
        return self.superblock.uuid

    @property
    def data_region(self) -> Extent:
        """The extent of the data region."""
        extent = self.superblock.region(Region.DATA)
        return Extent(extent.offset, extent.length)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The distinct layouts of the file."""
        return self.tables.layouts

    def layout(self, layer: int) -> Layout | None:
        """The layout of that layer's blocks; None if the layer has no experts.

        Raises:
            UsageError: `no-such-layer`, or `mixed-layer` where its experts differ: ask
                `expert(...).layout` there.
        """
        self._check_layer(layer)
        number = self.tables.layer_layouts[layer]
        if number == MIXED:
            raise UsageError(
                "mixed-layer",
                f"{self._where}: layer {layer}",
                "its experts differ in layout",
                "the layout of one expert",
            )
        return None if number is None else self.layouts[number]

    def is_mixed(self, layer: int) -> bool:
        """Whether the experts of `layer` differ in layout."""
        self._check_layer(layer)
        return self.tables.layer_layouts[layer] == MIXED

    @property
    def expert_layouts(self) -> NDArray[np.uint16]:
        """Number in `layouts` of each expert's layout, `NO_LAYOUT` where it is absent.

        Shape `(n_layers, n_experts)`, as the index.
        """
        return self.block_index.layouts

    @property
    def index_bytes(self) -> int:
        """Bytes of the index and the arrays beside it, one copy."""
        return sum(extent.length for extent in self.superblock.regions[: Region.TABLES])

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The further files that hold blocks; number 1 stands first."""
        return self.tables.volumes

    @property
    def volume_paths(self) -> tuple[Path, ...]:
        """Where each volume was found; empty if it was opened without them."""
        return tuple(file.path for file in self._volume_files)

    def expert(self, layer: int, expert: int) -> Expert:
        """The block of `(layer, expert)`, not read yet.

        Raises:
            UsageError: `no-such-expert` if it is out of range or absent.
        """
        n_layers, n_experts = self.geometry.n_layers, self.geometry.n_experts
        if 0 <= layer < n_layers and 0 <= expert < n_experts:
            place = 2 * (layer * n_experts + expert)
            size = self._entries[place + 1]
            if size:
                return Expert(self, layer, expert, self._entries[place], size)
        self._check_layer(layer)
        raise UsageError(
            "no-such-expert",
            f"{self._where}: block L{layer}/E{expert}",
            "is absent",
            f"layer {layer} has {int(np.count_nonzero(self.index['size'][layer]))} experts "
            f"of {n_experts}",
        )

    def tensor(self, name: str) -> Tensor:
        """The dense tensor `name`, not read yet.

        Raises:
            UsageError: `no-such-tensor`.
        """
        fact = self.tensors.get(name)
        if fact is None:
            raise UsageError(
                "no-such-tensor",
                f"{self._where}: tensor {name!r}",
                "is not in the file",
                f"it has {len(self.tensors)} dense tensors",
            )
        return Tensor(self, fact, self._tensor_numbers[name])

    def read_file(self, name: str) -> bytes:
        """The embedded file `name`, checked.

        Raises:
            UsageError: `no-such-file`.
            FormatError: `file-checksum`.
        """
        entry = self.files.get(name)
        if entry is None:
            raise UsageError(
                "no-such-file",
                f"{self._where}: embedded file {name!r}",
                "is not in the file",
                f"it has {', '.join(sorted(self.files)) or 'none'}",
            )
        data = self.read_at(entry.offset, entry.size)
        self.check_data(
            data,
            entry.checksum,
            file_seed(self._file_numbers[name]),
            FormatCode.FILE_CHECKSUM,
            f"embedded file {name!r} at {entry.offset:#x}",
        )
        return data

    def layer_pack(self, layer: int) -> Extent:
        """The extent that holds the dense tensors of `layer`; `(0, 0)` if it has none."""
        self._check_layer(layer)
        return Extent(*self.tables.packs[layer].item())

    @property
    def global_pack(self) -> Extent:
        """The extent that holds the dense tensors of no layer."""
        return Extent(*self.tables.packs[self.geometry.n_layers].item())

    def verify(
        self,
        progress: Callable[[int, int], None] | None = None,
        layer: int | None = None,
    ) -> list[Damage]:
        """What is damaged, after reading the whole file, or the blocks and tensors of `layer`.

        `progress` is called with bytes done and bytes in all.
        """
        if layer is not None:
            self._check_layer(layer)
        return verify_file(self, progress, layer)

    def fileno(self, volume: int = 0) -> int:
        """The descriptor of the file (0) or of a volume, valid until `close`.

        Raises:
            UsageError: `no-such-volume`, also when the file was opened without its volumes.
        """
        if volume == 0:
            return self._fd
        if not 1 <= volume <= len(self._volume_files):
            raise UsageError(
                "no-such-volume",
                f"{self._where}: volume {volume}",
                f"{len(self._volume_files)} of {len(self.volumes)} volumes are open",
                "open the file with its volumes",
            )
        return self._volume_files[volume - 1].fd

    def read_at(self, offset: int, size: int, volume: int = 0) -> bytes:
        """Exactly `size` bytes from `offset` of the file, or of a volume.

        Raises:
            StorageError: `short-read` if the file ends before, or the kernel's error.
        """
        try:
            # One copy less than through a buffer, where one read brings it all.
            data = os.pread(self.fileno(volume), size, offset)
        except OSError:
            data = b""
        if len(data) == size:
            return data
        buffer = bytearray(size)
        self.read_at_into(offset, buffer, volume)
        return bytes(buffer)

    def read_at_into(
        self, offset: int, buffer: bytearray | memoryview | NDArray[np.uint8], volume: int = 0
    ) -> None:
        """Fills `buffer` from `offset`; raises as `read_at` does."""
        view = view_bytes(buffer)
        fd = self.fileno(volume)
        path = self._volume_files[volume - 1].path if volume else self.path
        done = 0
        while done < len(view):
            try:
                n = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                raise StorageError.of(error, path, f"reading at {offset + done:#x}") from error
            if n == 0:
                raise StorageError(
                    FormatCode.SHORT_READ,
                    path,
                    f"ended {len(view) - done} bytes early in a read of {len(view)} at {offset:#x}",
                    "it had more bytes when it was opened",
                    "the file was cut short while in use",
                )
            done += n

    def check_data(
        self,
        data: bytes | NDArray[np.uint8] | memoryview,
        expected: int,
        seed: int,
        code: FormatCode,
        place: str,
    ) -> None:
        """Raises FormatError with `code` unless `data` has that checksum, or checks are off."""
        if self.is_verifying:
            self.check_digest(checksum(data, seed), expected, code, place)

    def check_digest(self, actual: int, expected: int, code: FormatCode, place: str) -> None:
        """Raises FormatError with `code` unless the two are the same."""
        if actual != expected:
            raise FormatError(
                code,
                f"{self._where}: {place}",
                f"checksum of its bytes is {actual:#018x}",
                f"{expected:#018x} is recorded",
                "the data is damaged: repack or restore the file",
            )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.geometry.n_layers:
            raise UsageError(
                "no-such-layer",
                f"{self._where}: layer {layer}",
                "is not in the file",
                f"it has layers 0 to {self.geometry.n_layers - 1}",
            )

    def close(self) -> None:
        """Gives the descriptor back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        while self._volume_files:
            os.close(self._volume_files.pop().fd)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = f"{self.geometry.n_layers} layers x {self.geometry.n_experts} experts"
        return f"<colibri_format.Reader {self._where!r}, {shape}>"


def _size_in(page: bytes) -> int:
    """The file_size that a superblock states (spec, section 3)."""
    return int.from_bytes(page[56:64], "little")
