"""Results of a benchmark on disk: one JSON file that says all, and its rows as Parquet."""

from __future__ import annotations

import datetime
import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from colibri_format import StorageError, format_size

from .errors import BenchError
from .result_rows import find_fault

VERSION: Final = 1
_MOST_BYTES: Final = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a benchmark of one kind found.

    `rows` are flat: one dictionary a figure, equal keys. `notes` are sentences for people: cache
    state, what was refused, what the figures do not say. `is_complete` is False after an
    interrupt. `extra` holds what is no table.
    """

    kind: str
    command: Sequence[str]
    machine: dict[str, Any]
    rows: Sequence[dict[str, Any]]
    notes: Sequence[str] = ()
    is_complete: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    made_at: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {
            "colibri_bench": VERSION,
            "kind": self.kind,
            "made_at": self.made_at or now,
            "command": list(self.command),
            "is_complete": self.is_complete,
            "machine": self.machine,
            "notes": list(self.notes),
            "rows": list(self.rows),
            "extra": self.extra,
        }


def save_results(results: Results, folder: Path) -> list[Path]:
    """Writes `KIND.json`, and `KIND.parquet` where pyarrow is installed; the files written.

    Each replaces an earlier one of its name, and only when it is complete.

    Raises:
        StorageError: what the kernel refused.
    """
    target = folder / f"{results.kind}.json"
    text = json.dumps(results.as_dict(), indent=1, ensure_ascii=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(target, text.encode())
    except OSError as error:
        raise StorageError.of(error, target, "writing results") from error
    table = _save_table(results, folder)
    return [target] if table is None else [target, table]


class ResultKeeper:
    """Saves results again and again as a measurement goes on, into `folder` if there is one.

    A save that fails ends no measurement: `tell` is told at once, and `finish` raises it when the
    figures have been shown.

    Raises:
        StorageError: the folder cannot be made or written to: told before anything is measured.
    """

    def __init__(self, folder: Path | None, tell: Callable[[str], object]) -> None:
        self._folder = folder
        self._tell = tell
        self._error: StorageError | None = None
        if folder is None:
            return
        probe = folder / f".colibri-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StorageError.of(error, folder, "writing results") from error

    def save(self, results: Results) -> None:
        """Writes them; what fails is told, and forgotten if a later save succeeds."""
        if self._folder is None:
            return
        try:
            save_results(results, self._folder)
        except StorageError as error:
            self._tell(f"not saved: {error}")
            self._error = error
        else:
            self._error = None

    def finish(self) -> None:
        """Raises what kept the last save from succeeding."""
        if self._error is not None:
            raise self._error


def _save_table(results: Results, folder: Path) -> Path | None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None
    target = folder / f"{results.kind}.parquet"
    part = target.with_name(f"{target.name}.part")
    table = pyarrow.Table.from_pylist(list(results.rows))
    about = {k: v for k, v in results.as_dict().items() if k != "rows"}
    table = table.replace_schema_metadata({"colibri_bench": json.dumps(about)})
    try:
        pyarrow.parquet.write_table(table, part)
        part.replace(target)
    except OSError as error:
        raise StorageError.of(error, target, "writing results") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def load_results(path: Path) -> Results:
    """What `save_results` wrote.

    Raises:
        BenchError: `bad-results` when the file is something else.
        StorageError: it cannot be read.
    """
    try:
        if not path.is_file() and path.exists():
            raise IsADirectoryError(errno.EISDIR, "not a regular file", str(path))
        size = path.stat().st_size
        text = path.read_bytes() if size <= _MOST_BYTES else b""
    except OSError as error:
        raise StorageError.of(error, path, "reading results") from error
    if size > _MOST_BYTES:
        raise _bad(path, f"has {format_size(size)}; results have far less")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"is no JSON: {str(error)[:80]}") from error
    if not isinstance(record, dict) or "colibri_bench" not in record:
        raise _bad(path, "does not say that it holds results of colibri bench")
    if record["colibri_bench"] != VERSION:
        raise _bad(
            path, f"is of version {str(record['colibri_bench'])[:20]}; this program knows {VERSION}"
        )
    rows, extra = record.get("rows", []), record.get("extra", {})
    if fault := find_fault(record.get("kind"), rows, extra):
        raise _bad(path, fault)
    for name, kind in (("machine", dict), ("command", list), ("notes", list)):
        if not isinstance(record.get(name, kind()), kind):
            raise _bad(path, f"its {name} is no {'object' if kind is dict else 'list'}")
    return Results(
        kind=record["kind"],
        command=[str(part) for part in record.get("command", [])],
        machine=record.get("machine", {}),
        rows=rows,
        notes=[str(note) for note in record.get("notes", [])],
        is_complete=bool(record.get("is_complete", True)),
        extra=extra,
        made_at=str(record.get("made_at", "")),
    )


def _replace(target: Path, data: bytes) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _bad(path: Path, found: str) -> BenchError:
    return BenchError("bad-results", path, found, "a result file of colibri bench", "measure again")
