"""Recorded routing: which experts each token chose in each layer, read from CSV or Parquet."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from pathlib import Path
from typing import Any, Final

from colibri_format import FormatError, StorageError, UsageError

COLUMNS: Final = ("turn", "phase", "step", "layer", "slot", "expert", "weight")
"""Of a trace, in the order in which they are written; a reader takes any order and more columns."""
MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 65536
MAX_PICKS: Final = 100_000_000
"""Rows that are read at most: 2 GB of a larger trace would not help to choose a policy."""
PARQUET_SUFFIX: Final = ".parquet"

_BLOCK_BYTES: Final = re.compile(r"#\s*layer=(\d{1,4}) expert_bytes=(\d{1,12})\b")


class TracePhase(IntEnum):
    """What a token was: part of the prompt, or generated."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One layer of one generated token, or of one batch of a prompt.

    `experts`, each once, best first; `weights` are the router's, summed over a batch's tokens.
    `step` is that of the event's first token.
    """

    turn: int
    phase: TracePhase
    step: int
    layer: int
    experts: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one or more runs in the order in which they happened.

    `block_bytes[layer]` where the trace states it, else empty. `n_experts` is the highest number
    met, plus one, unless a caller knows better.
    """

    where: str
    events: tuple[Event, ...]
    n_layers: int
    n_experts: int
    block_bytes: tuple[int, ...] = ()

    @property
    def n_picks(self) -> int:
        """Experts asked for, all events together."""
        return sum(len(event.experts) for event in self.events)

    @property
    def n_blocks(self) -> int:
        """Blocks of the layers that route."""
        return len({event.layer for event in self.events}) * self.n_experts

    def only(self, phase: TracePhase) -> Trace:
        """The events of one phase."""
        events = tuple(event for event in self.events if event.phase is phase)
        return Trace(self.where, events, self.n_layers, self.n_experts, self.block_bytes)


def make_trace(events: Iterable[Event], where: str = "trace") -> Trace:
    """A trace of `events`."""
    kept = tuple(events)
    n_layers = max((event.layer for event in kept), default=-1) + 1
    n_experts = max((max(event.experts) for event in kept if event.experts), default=-1) + 1
    return Trace(where, kept, n_layers, n_experts)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The trace in a Parquet file (named `*.parquet`) or a CSV file.

    Rows of a generated token's layer, and consecutive rows of one layer of a prompt, form one
    event. Lines of a CSV that begin with `#` are skipped but for `# layer=L expert_bytes=N`.

    Raises:
        FormatError: `trace-columns` when one is missing, `trace-value` for one that is no number
            or out of bounds, `trace-duplicate` for an expert named twice by a token,
            `trace-empty`, `trace-size` above 100 million rows, `trace-encoding`.
        UsageError: `no-pyarrow`.
        StorageError: what the kernel said.
    """
    file = Path(path)
    block_bytes: dict[int, int] = {}
    try:
        if file.suffix == PARQUET_SUFFIX:
            events = tuple(_events(_parquet_rows(file), str(file)))
        else:
            with file.open(encoding="utf-8", newline="") as lines:
                events = tuple(_events(_csv_rows(lines, str(file), block_bytes), str(file)))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError.of(error, file, "reading the trace") from error
    except UnicodeDecodeError as error:
        raise FormatError(
            "trace-encoding", file, f"byte {error.start} is not UTF-8", "a CSV file"
        ) from error
    if not events:
        raise FormatError("trace-empty", file, "has no rows", "at least one")
    trace = make_trace(events, str(file))
    sizes = tuple(block_bytes.get(layer, 0) for layer in range(trace.n_layers))
    return Trace(trace.where, events, trace.n_layers, trace.n_experts, sizes if any(sizes) else ())


_Row = tuple[int, int, int, int, int, int, float]


def _csv_rows(lines: Iterable[str], where: str, block_bytes: dict[int, int]) -> Iterator[_Row]:
    n_line = 0

    def data() -> Iterator[str]:
        nonlocal n_line
        for line in lines:
            n_line += 1
            if not line.startswith("#"):
                yield line
            elif (match := _BLOCK_BYTES.match(line)) is not None:
                block_bytes[int(match[1])] = int(match[2])

    try:
        rows = csv.reader(data(), strict=True)
        header = next(rows, [])
        places = _places([name.strip() for name in header], where)
        turn, phase, step, layer, slot, expert, weight = places
        for row in rows:
            if not row:
                continue
            yield (
                int(row[turn]), int(row[phase]), int(row[step]), int(row[layer]),
                int(row[slot]), int(row[expert]), float(row[weight]),
            )  # fmt: skip
    except (ValueError, IndexError, csv.Error) as error:
        if isinstance(error, (FormatError, UnicodeDecodeError)):
            raise
        raise FormatError(
            "trace-value", f"{where}:{n_line}", str(error), "a number in each column"
        ) from error


def _parquet_rows(file: Path) -> Iterator[_Row]:
    parquet = load_pyarrow("parquet")
    lib = load_pyarrow("lib")
    try:
        with parquet.ParquetFile(file) as table:
            _places(table.schema_arrow.names, str(file))
            for batch in table.iter_batches(columns=list(COLUMNS)):
                columns = [batch.column(name).to_pylist() for name in COLUMNS]
                yield from zip(*columns, strict=True)
    except lib.ArrowException as error:
        if isinstance(error, OSError):
            raise
        raise FormatError(
            "trace-value", file, str(error).split("\n", 1)[0], "a Parquet table of numbers"
        ) from error


def load_pyarrow(name: str) -> Any:
    """The module `pyarrow.NAME`.

    Raises:
        UsageError: `no-pyarrow`.
    """
    try:
        import importlib

        return importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise UsageError(
            "no-pyarrow",
            "Parquet traces",
            "the package pyarrow is not installed",
            "pyarrow",
            "pip install 'colibri-runtime[trace]', or use CSV",
        ) from error


def _places(header: Sequence[str], where: str) -> tuple[int, ...]:
    missing = [name for name in COLUMNS if header.count(name) != 1]
    if missing:
        raise FormatError(
            "trace-columns",
            where,
            f"the columns {', '.join(missing)} are missing or named twice",
            f"one each of {', '.join(COLUMNS)}",
        )
    return tuple(header.index(name) for name in COLUMNS)


def _events(rows: Iterable[_Row], where: str) -> Iterator[Event]:
    """Rows, in file order, as events in order of their first row."""
    group: tuple[int, ...] = ()
    picked: dict[int, float] = {}
    tokens: set[tuple[int, int]] = set()
    first_step = 0
    phase = TracePhase.DECODE
    for number, row in enumerate(rows):
        turn, kind, step, layer, _, expert, weight = _checked(row, number, where)
        # A prompt's batch reads each expert once, so its tokens are one event.
        key = (turn, kind, layer) if kind == TracePhase.PREFILL else (turn, kind, layer, step)
        if key != group:
            if picked:
                yield _event(group, phase, first_step, picked)
            group, picked, first_step, phase = key, {}, step, TracePhase(kind)
            tokens = set()
        if (step, expert) in tokens:
            raise FormatError(
                "trace-duplicate",
                f"{where}: row {number}",
                f"turn {turn}, step {step}, layer {layer} names expert {expert} twice",
                "each expert once a token",
            )
        tokens.add((step, expert))
        picked[expert] = picked.get(expert, 0.0) + weight
    if picked:
        yield _event(group, phase, first_step, picked)


def _event(group: tuple[int, ...], phase: TracePhase, step: int, picked: dict[int, float]) -> Event:
    return Event(group[0], phase, step, group[2], tuple(picked), tuple(picked.values()))


def _checked(row: _Row, number: int, where: str) -> _Row:
    if number >= MAX_PICKS:
        raise FormatError(
            "trace-size", where, f"more than {MAX_PICKS} rows", "a shorter trace", "cut it"
        )
    # A null of a Parquet table arrives as None, which compares with nothing.
    is_number = all(isinstance(value, int) for value in row[:6]) and isinstance(
        row[6], (int, float)
    )
    if not is_number or not (
        row[0] >= 0
        and 0 <= row[1] <= 1
        and row[2] >= 0
        and 0 <= row[3] < MAX_LAYERS
        and row[4] >= 0
        and 0 <= row[5] < MAX_EXPERTS
        and row[6] >= 0
        and isfinite(row[6])
    ):
        raise FormatError(
            "trace-value",
            f"{where}: row {number}",
            ", ".join(f"{name} {value}" for name, value in zip(COLUMNS, row, strict=True)),
            f"whole numbers from 0, phase 0 or 1, layer below {MAX_LAYERS}, expert below "
            f"{MAX_EXPERTS}, a finite weight from 0",
        )
    return row
