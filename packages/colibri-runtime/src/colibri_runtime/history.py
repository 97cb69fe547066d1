"""How often each expert was asked for, kept beside a model from one run to the next."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from colibri_format import FormatError, StorageError, UsageError, checksum

from .policy import Key

SUFFIX: Final = ".history"
MAX_BLOCKS: Final = 1 << 24
"""Blocks of a model whose history is kept: with more, 64 MiB and more would be written."""
MAX_EVENTS: Final = 65536.0
"""Events of a layer after which all its counts are halved, so that new habits outweigh old ones."""

_MAGIC: Final = b"\x89CLBHIS\n"
_VERSION: Final = 1
_SEED: Final = 0
# Magic, version, zero, uuid, layers, experts. Then float64 events of each layer, float32 counts
# of each block, layer by layer, and the XXH3-64 of all before; little-endian.
_HEADER: Final = struct.Struct("<8sII16sII")
_CHECKSUM: Final = struct.Struct("<Q")


class History:
    """Counts of asks for the blocks of the model `uuid`, as shares of their layers' events.

    Not thread-safe.

    Raises:
        UsageError: `bad-history` for a model without blocks or with more than 2**24.
    """

    def __init__(self, uuid: UUID, n_layers: int, n_experts: int) -> None:
        if not (n_layers > 0 and n_experts > 0 and n_layers * n_experts <= MAX_BLOCKS):
            raise UsageError(
                "bad-history",
                "history",
                f"{n_layers} layers of {n_experts} experts",
                f"1 to {MAX_BLOCKS} blocks",
            )
        self.uuid = uuid
        self.n_layers = n_layers
        self.n_experts = n_experts
        self._events = [0.0] * n_layers
        self._counts = [[0.0] * n_experts for _ in range(n_layers)]

    @property
    def n_events(self) -> float:
        """Events that were counted, all layers together."""
        return sum(self._events)

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """Counts one event, which asked for each of `experts` once."""
        if self._events[layer] >= MAX_EVENTS:
            self._events[layer] /= 2
            self._counts[layer] = [count / 2 for count in self._counts[layer]]
        self._events[layer] += 1.0
        counts = self._counts[layer]
        for expert in experts:
            counts[expert] += 1.0

    def counts(self) -> NDArray[np.float64]:
        """Asks for each block, `(n_layers, n_experts)`."""
        return np.array(self._counts, np.float64)

    def shares(self) -> dict[Key, float]:
        """The share of its layer's events that asked for a block, of blocks that any did."""
        return {
            (layer, expert): count / self._events[layer]
            for layer, counts in enumerate(self._counts)
            for expert, count in enumerate(counts)
            if count > 0.0
        }

    def hottest(self, n_blocks: int) -> list[Key]:
        """At most `n_blocks` blocks with the highest shares, highest first; to be preloaded."""
        shares = self.shares()
        return sorted(shares, key=lambda key: (-shares[key], key))[: max(n_blocks, 0)]

    def hit_share(self, n_slots: int) -> float | None:
        """The share of asks that hit if the hottest `n_slots` blocks always stayed.

        A policy that follows what is in use at the moment does better. None without any history.
        """
        shares = self._shares_array()
        total = shares.sum()
        if total <= 0.0:
            return None
        return float(np.sort(shares, axis=None)[::-1][: max(n_slots, 0)].sum() / total)

    def hit_share_of(self, quotas: Sequence[int]) -> float | None:
        """As `hit_share`, each layer keeping as many blocks as its quota says.

        Raises:
            UsageError: `bad-quotas` unless there is one for each layer.
        """
        if len(quotas) != self.n_layers:
            raise UsageError(
                "bad-quotas", "history", f"{len(quotas)} quotas", f"one for {self.n_layers} layers"
            )
        shares = self._shares_array()
        total = shares.sum()
        if total <= 0.0:
            return None
        ordered = np.sort(shares, axis=1)[:, ::-1]
        kept = sum(float(row[: max(n, 0)].sum()) for row, n in zip(ordered, quotas, strict=True))
        return kept / float(total)

    def _shares_array(self) -> NDArray[np.float64]:
        events = np.maximum(np.array(self._events), 1.0)
        shares: NDArray[np.float64] = self.counts() / events[:, None]
        return shares


def history_path(model: str | os.PathLike[str]) -> Path:
    """Where the history of a model's file stands unless told otherwise: beside it."""
    path = Path(model)
    return path.with_name(path.name + SUFFIX)


def history_bytes(n_layers: int, n_experts: int) -> int:
    """The exact size of a history file."""
    return _HEADER.size + 8 * n_layers + 4 * n_layers * n_experts + _CHECKSUM.size


def read_history(
    path: str | os.PathLike[str], *, uuid: UUID, n_layers: int, n_experts: int
) -> History:
    """The history in a file, which must be that of the model described.

    Reads no more bytes than the history of such a model has.

    Raises:
        FormatError: `history-magic`, `history-version`, `history-uuid`, `history-geometry`,
            `history-size`, `history-checksum`, `history-value`.
        StorageError: what the kernel said.
    """
    history = History(uuid, n_layers, n_experts)
    size = history_bytes(n_layers, n_experts)
    try:
        with open(path, "rb") as file:
            data = file.read(size + 1)
    except OSError as error:
        raise StorageError.of(error, path, "reading the history") from error
    _check(data, size, path, history)
    place = _HEADER.size
    events = np.frombuffer(data, "<f8", n_layers, place)
    counts = np.frombuffer(data, "<f4", n_layers * n_experts, place + 8 * n_layers)
    table = counts.reshape(n_layers, n_experts).astype(np.float64)
    # A count may exceed its events by what rounding to 32 bits adds.
    limit = events * (1 + 1e-6)
    if not (
        np.isfinite(events).all()
        and (events >= 0).all()
        and (events <= MAX_EVENTS).all()
        and np.isfinite(table).all()
        and (table >= 0).all()
        and (table <= limit[:, None]).all()
    ):
        raise _refusal("history-value", path, "counts are negative or exceed their events")
    history._events = events.tolist()
    history._counts = table.tolist()
    return history


def write_history(path: str | os.PathLike[str], history: History) -> None:
    """Gives `path` the history, whole or not at all: an older one stays until then.

    Raises:
        StorageError: what the kernel said; nothing is left behind.
    """
    target = Path(path)
    body = b"".join(
        (
            _HEADER.pack(
                _MAGIC, _VERSION, 0, history.uuid.bytes, history.n_layers, history.n_experts
            ),
            np.array(history._events, "<f8").tobytes(),
            np.array(history._counts, "<f4").tobytes(),
        )
    )
    data = body + _CHECKSUM.pack(checksum(body, _SEED))
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise StorageError.of(error, target, "writing the history") from error
    part = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        part.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise StorageError.of(error, target, "writing the history") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(data: bytes, size: int, path: str | os.PathLike[str], history: History) -> None:
    if data[: len(_MAGIC)] != _MAGIC:
        raise _refusal("history-magic", path, "does not begin as a history does")
    if len(data) < _HEADER.size:
        raise _refusal("history-size", path, f"ends after {len(data)} bytes")
    _, version, reserved, uuid, n_layers, n_experts = _HEADER.unpack_from(data)
    if version != _VERSION or reserved:
        raise _refusal("history-version", path, f"is of version {version}, {_VERSION} is known")
    if uuid != history.uuid.bytes:
        raise _refusal(
            "history-uuid", path, f"is of the model {UUID(bytes=uuid)}, not {history.uuid}"
        )
    if (n_layers, n_experts) != (history.n_layers, history.n_experts):
        raise _refusal(
            "history-geometry",
            path,
            f"counts {n_layers} layers of {n_experts} experts, the model has "
            f"{history.n_layers} of {history.n_experts}",
        )
    if len(data) != size:
        raise _refusal("history-size", path, f"has not the {size} bytes of such a history")
    (expected,) = _CHECKSUM.unpack_from(data, size - _CHECKSUM.size)
    if checksum(data[: size - _CHECKSUM.size], _SEED) != expected:
        raise _refusal("history-checksum", path, "was damaged: its checksum differs")


def _refusal(code: str, path: str | os.PathLike[str], found: str) -> FormatError:
    return FormatError(
        code,
        path,
        found,
        "the history that colibri wrote for this very model",
        "remove the file; a new one is begun",
    )
