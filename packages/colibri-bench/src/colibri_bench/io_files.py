"""Files to read from: a model's blocks, a made-up file, a copy in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import colibri_format
from colibri_format import StorageError, format_size, parse_model
from colibri_runtime.machine import available_bytes

from .io_plan import PAGE, Extent
from .undo import remove_files, undone_if_killed

SHARED_MEMORY: Final = Path("/dev/shm")
_CHUNK_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a model: files by volume, extents by layer, what a token reads at most, and
    what it computes with, dense tensors too."""

    paths: list[Path]
    layers: list[list[Extent]]
    token_bytes: int | None
    computed_bytes: int | None = None

    @property
    def largest(self) -> int:
        """Bytes of the largest block, whole pages."""
        return max(extent.size for layer in self.layers for extent in layer)


def blocks_of(path: Path, volumes: Sequence[Path] = ()) -> Blocks:
    """The expert blocks of a `.colibri` file, whole pages each; `volumes` are folders to look for
    further files of a striped one in.

    Raises:
        StorageError: `no-blocks` when it has none.
    """
    with colibri_format.open(path, volumes=volumes) as reader:
        paths = [path, *reader.volume_paths]
        numbers = reader.block_index.volumes
        layers = []
        for layer, entries in enumerate(reader.index):
            extents = [
                Extent(int(e["offset"]), -(-int(e["size"]) // PAGE) * PAGE,
                       int(numbers[layer, expert]))
                for expert, e in enumerate(entries) if e["size"]
            ]  # fmt: skip
            if extents:
                layers.append(extents)
        # Of an embedding that is not the head as well a token takes one row.
        rows_alone = {"token_embd.weight"} if "output.weight" in reader.tensors else set()
        dense = sum(t.size for name, t in reader.tensors.items() if name not in rows_alone)
        top_k = None
        if colibri_format.MODEL_FILE in reader.files:
            model = parse_model(reader.read_file(colibri_format.MODEL_FILE), str(path))
            top_k = model.moe.top_k if model.moe else 1
    if not layers:
        raise StorageError("no-blocks", path, "has no expert blocks", "a file with experts")
    token = None
    if top_k is not None:
        token = sum(top_k * max(extent.size for extent in layer) for layer in layers)
    return Blocks(paths, layers, token, None if token is None else token + dense)


@contextmanager
def synthetic_file(
    folder: Path, size_bytes: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[Path]:
    """A file of random bytes, removed afterwards.

    Raises:
        StorageError: `disk-full` before anything is written, or what the kernel refused.
    """
    check_room(folder, size_bytes)
    path = folder / f"colibri-io-{os.getpid()}.bin"
    rng = np.random.Generator(np.random.SFC64(1))
    with _own_files([path], "writing a file to read from"):
        try:
            with path.open("r+b", buffering=0) as file:
                for start in range(0, size_bytes, _CHUNK_BYTES):
                    file.write(rng.bytes(min(_CHUNK_BYTES, size_bytes - start)))
                    if progress is not None:
                        progress(min(start + _CHUNK_BYTES, size_bytes), size_bytes)
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError.of(error, path, "writing a file to read from") from error
        yield path


@contextmanager
def copies_in_memory(
    paths: Sequence[Path], extents: Sequence[Extent], folder: Path = SHARED_MEMORY
) -> Iterator[list[Path]]:
    """Copies of the files in tmpfs that hold their `extents`, and holes elsewhere; removed
    afterwards.

    Raises:
        StorageError: `disk-full` where they do not fit, before anything is copied, or what the
            kernel refused.
    """
    check_room(folder, sum(extent.size for extent in extents))
    made = [folder / f"colibri-io-{os.getpid()}-{number}" for number in range(len(paths))]
    with _own_files(made, "copying what is to be read"):
        for number, (path, copy) in enumerate(zip(paths, made, strict=True)):
            of_file = [extent for extent in extents if extent.volume == number]
            try:
                with (
                    path.open("rb", buffering=0) as source,
                    copy.open("r+b", buffering=0) as target,
                ):
                    target.truncate(path.stat().st_size)
                    for extent in of_file:
                        source.seek(extent.offset)
                        target.seek(extent.offset)
                        target.write(source.read(extent.size))
            except OSError as error:
                raise StorageError.of(error, copy, "copying what is to be read") from error
        yield made


@contextmanager
def _own_files(paths: Sequence[Path], what: str) -> Iterator[None]:
    """Makes empty files, none of which was there, and removes them, killed or not.

    Raises:
        StorageError: what the kernel refused.
    """
    made: list[Path] = []
    with ExitStack() as stack:
        try:
            for path in paths:
                try:
                    path.touch(exist_ok=False)
                except OSError as error:
                    raise StorageError.of(error, path, what) from error
                made.append(path)
            stack.enter_context(undone_if_killed(remove_files(made)))
            yield
        finally:
            for path in made:
                path.unlink(missing_ok=True)


def check_room(folder: Path, size_bytes: int) -> None:
    """Nothing, when so much is free; memory counts with a quarter to spare.

    Raises:
        StorageError: `disk-full`, or the folder cannot be asked.
    """
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise StorageError.of(error, folder, "looking for room") from error
    free = status.f_bavail * status.f_frsize
    if folder == SHARED_MEMORY:
        memory = available_bytes()
        free = min(free, int(0.75 * memory)) if memory is not None else free
    if free < size_bytes:
        raise StorageError(
            "disk-full",
            folder,
            f"{format_size(free)} are free",
            f"{format_size(size_bytes)} are needed",
            "take a smaller file or another folder",
        )
