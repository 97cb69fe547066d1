"""Writes down how a run's tokens were routed, as it runs."""

from __future__ import annotations

import contextlib
import os
from array import array
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from colibri_format import StorageError

from .backend import Floats
from .trace import COLUMNS, PARQUET_SUFFIX, TracePhase, load_pyarrow

_FLUSH_ROWS: Final = 1 << 16
"""Rows that are held in memory: 64 Ki rows are 2 MiB, and a good row group of Parquet."""


class TraceRecorder:
    """A decoder's observer that writes a trace, Parquet where the name says so, else CSV.

    The file has its name only after `close`; until then the rows, but for the last 65,536, stand
    in `NAME.part`. Positions before `n_prompt` are prefill. The layers of a dense model, which
    route nothing, are left out. A context manager: what was recorded before a failure is kept.

    Raises:
        StorageError: `file-exists` unless `overwrite`; what the kernel said.
        UsageError: `no-pyarrow`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, n_prompt: int = 0, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.n_rows = 0
        self.n_prompt = n_prompt
        self.turn = 0
        self._part = self.path.with_name(self.path.name + ".part")
        self._columns = tuple(array("f" if name == "weight" else "i") for name in COLUMNS)
        if not overwrite and os.path.lexists(self.path):
            raise StorageError(
                "file-exists",
                self.path,
                "exists",
                "a name that is free",
                "remove it or choose another name",
            )
        try:
            self._sink: _CsvSink | _ParquetSink | None = (
                _ParquetSink(self._part) if self.path.suffix == PARQUET_SUFFIX
                else _CsvSink(self._part)
            )  # fmt: skip
        except OSError as error:
            raise StorageError.of(error, self._part, "writing the trace") from error

    def begin_turn(self, n_prompt: int) -> None:
        """What comes is the next run, or the next turn of a conversation, from position 0; its
        first `n_prompt` positions are prefill."""
        self.turn += 1
        self.n_prompt = n_prompt

    def routed(
        self,
        layer: int,
        first_position: int,
        experts: NDArray[np.integer],
        weights: Floats | None,
        predicted: frozenset[int],
    ) -> None:
        """As `RoutingObserver.routed`; the step of a row is its token's position."""
        if weights is None or self._sink is None:
            return
        turns, phases, steps, layers, slots, numbers, shares = self._columns
        n_tokens, top_k = experts.shape
        for token in range(n_tokens):
            position = first_position + token
            is_decode = position >= self.n_prompt
            phase = TracePhase.DECODE if is_decode else TracePhase.PREFILL
            turns.extend([self.turn] * top_k)
            phases.extend([phase] * top_k)
            steps.extend([position] * top_k)
            layers.extend([layer] * top_k)
            slots.extend(range(top_k))
            numbers.extend(experts[token].tolist())
            shares.extend(weights[token].tolist())
        self.n_rows += n_tokens * top_k
        if len(turns) >= _FLUSH_ROWS:
            self._flush()

    def close(self) -> None:
        """Gives the file its name; a second call does nothing."""
        if self._sink is None:
            return
        self._flush()
        try:
            self._sink.close()
            self._part.replace(self.path)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._sink = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _flush(self) -> None:
        if self._sink is None or not self._columns[0]:
            return
        try:
            self._sink.write(self._columns)
        except OSError as error:
            raise self._failed(error) from error
        for column in self._columns:
            del column[:]

    def _failed(self, error: OSError) -> StorageError:
        """The error to raise; nothing more is recorded, and nothing is left of the file."""
        if self._sink is not None:
            self._sink.drop()
            self._sink = None
        with contextlib.suppress(OSError):
            self._part.unlink()
        return StorageError.of(error, self._part, "writing the trace")


class _CsvSink:
    def __init__(self, part: Path) -> None:
        self._file: TextIOWrapper = part.open("w", encoding="utf-8", newline="")
        self._file.write(",".join(COLUMNS) + "\n")

    def write(self, columns: tuple[array[Any], ...]) -> None:
        self._file.writelines(
            f"{turn},{phase},{step},{layer},{slot},{expert},{weight:.6g}\n"
            for turn, phase, step, layer, slot, expert, weight in zip(*columns, strict=True)
        )

    def close(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def drop(self) -> None:
        # What is still buffered may fail to be written, again.
        with contextlib.suppress(OSError):
            self._file.close()


class _ParquetSink:
    def __init__(self, part: Path) -> None:
        self._arrow = load_pyarrow("lib")
        parquet = load_pyarrow("parquet")
        self._schema = self._arrow.schema(
            [
                (name, self._arrow.float32() if name == "weight" else self._arrow.int32())
                for name in COLUMNS
            ]
        )
        # Opened here, so that a name that cannot be written fails as any file does.
        self._file = part.open("wb")
        self._writer = parquet.ParquetWriter(self._file, self._schema)

    def write(self, columns: tuple[array[Any], ...]) -> None:
        arrays = [
            self._arrow.array(np.frombuffer(column, column.typecode).copy()) for column in columns
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        with self._file:
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())

    def drop(self) -> None:
        with contextlib.suppress(OSError, self._arrow.ArrowException):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
