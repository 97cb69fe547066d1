"""A recorded routing trace: which experts each token went to, layer by layer."""

from __future__ import annotations

import csv
import importlib
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from numpy.typing import NDArray

from colibri_format import StorageError

from .errors import SourceError

# What is used of the columns turn, phase, step, layer, slot, expert, weight.
_COLUMNS: Final = ("turn", "phase", "step", "layer", "expert")
_PARQUET: Final = b"PAR1"
_BATCH: Final = 65_536
_LONGEST_LINE: Final = 65_536
PER_CHOICE_BYTES: Final = 180
"""Measured: columns, and what sorts tokens, at their peak."""
_REMEDY: Final = "record it again, or leave out --order"


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """Choices in order of the trace: three int64 arrays of the same length; `name` is its file's.

    Choices with the same `token` (turn, phase and step) and `layer` were made together.
    """

    token: NDArray[np.int64]
    layer: NDArray[np.int64]
    expert: NDArray[np.int64]
    name: str = ""

    @property
    def n_tokens(self) -> int:
        """How many tokens were routed."""
        return int(self.token.max(initial=-1)) + 1


def read_trace(path: Path) -> RoutingTrace:
    """The trace in the CSV or Parquet file `path`; which it is, its first bytes tell.

    CSV has a line that names the columns; lines that begin with `#` are passed over. Further
    columns are ignored. Takes `PER_CHOICE_BYTES` a choice while it reads.

    Raises:
        SourceError: `bad-trace` for missing columns, a value that is no whole number from 0 on, or
            a trace without choices, a line without end; `missing-pyarrow` for Parquet without that
            library.
        StorageError: `not-a-file` for a pipe or device, or the kernel refused to open or read it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            # To open a pipe waits for its writer, and a device may have no end.
            raise StorageError("not-a-file", path, "is no regular file", "a trace", _REMEDY)
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
        columns = _read_parquet(path) if is_parquet else _read_csv(path)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError.of(error, path, "reading the trace") from error
    if not len(columns[0]):
        raise SourceError("bad-trace", path, "has no choices", "some", _REMEDY)
    if min(int(column.min()) for column in columns) < 0:
        raise SourceError("bad-trace", path, "has a number below 0", "numbers from 0 on", _REMEDY)
    turn, phase, step, layer, expert = columns
    _, token = np.unique(np.stack([turn, phase, step]), axis=1, return_inverse=True)
    name = path.name.encode("utf-8", "replace").decode()
    return RoutingTrace(token.reshape(-1).astype(np.int64), layer, expert, name)


def _read_csv(path: Path) -> list[NDArray[np.int64]]:
    # Spreadsheets write a byte order mark, which is no part of a column's name.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = csv.reader(line for line in _lines(path, file) if not line.startswith("#"))
        try:
            places = _places(path, next(lines, []))
            return _columns(path, lines, places)
        except csv.Error as error:
            raise SourceError(
                "bad-trace", path, f"is no CSV ({error})", "CSV or Parquet"
            ) from error


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of `file`; what has no end is no line."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise SourceError("bad-trace", path, f"has a line of over {_LONGEST_LINE} signs",
                              "one choice a line", _REMEDY)  # fmt: skip
        yield line


def _columns(path: Path, lines: Iterator[list[str]], places: list[int]) -> list[NDArray[np.int64]]:
    columns = [array("q") for _ in places]
    number = 0
    while batch := list(islice(lines, _BATCH)):
        for row in batch:
            number += 1
            try:
                values = [int(row[place]) for place in places]
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
            except (ValueError, IndexError, OverflowError):
                if row:
                    raise SourceError(
                        "bad-trace",
                        f"{path}: choice {number}",
                        f"is {','.join(row)[:60]!r}",
                        f"whole numbers in the columns {', '.join(_COLUMNS)}",
                        _REMEDY,
                    ) from None
    return [np.frombuffer(column, np.int64) for column in columns]


def _places(path: Path, names: Sequence[str]) -> list[int]:
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise SourceError("bad-trace", path, f"has no column {missing[0]!r}",
                          f"columns {', '.join(_COLUMNS)}", _REMEDY)  # fmt: skip
    return [list(names).index(name) for name in _COLUMNS]


def _read_parquet(path: Path) -> list[NDArray[np.int64]]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise SourceError(
            "missing-pyarrow",
            path,
            "is Parquet",
            "the library pyarrow to read it",
            "pip install 'colibri-repack[parquet]', or give the trace as CSV",
        ) from error
    try:
        table: Any = parquet.ParquetFile(str(path))
        _places(path, table.schema_arrow.names)
        table = table.read(columns=list(_COLUMNS))
        found: Iterable[Any] = (table.column(name).cast(arrow.int64()) for name in _COLUMNS)
        columns = [column.to_numpy() for column in found]
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0][:80]
        raise SourceError(
            "bad-trace",
            path,
            f"cannot be read ({reason})",
            f"whole numbers in the columns {', '.join(_COLUMNS)}",
            _REMEDY,
        ) from error
    if any(column.dtype != np.int64 for column in columns):
        raise SourceError("bad-trace", path, "has empty fields", "whole numbers", _REMEDY)
    return columns
