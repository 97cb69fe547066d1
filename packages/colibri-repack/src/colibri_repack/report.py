"""What a repack did, or would do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from .convert import Converted
from .facts import FileFacts, facts_of_plan
from .repack_plan import RepackPlan
from .time_estimate import Estimate


@dataclass(frozen=True, slots=True)
class RepackReport:
    """The output's facts and how the work went; `seconds` is None when only planned."""

    source: Path
    output: Path
    quant: str
    facts: FileFacts
    payload_bytes: int
    peak_memory_bytes: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    converted: Converted | None = None
    seconds: float | None = None
    estimate: Estimate | None = None

    @property
    def uuid(self) -> UUID | None:
        """The output's identity, None when only planned."""
        return self.converted.uuid if self.converted else None

    @classmethod
    def of(
        cls,
        plan: RepackPlan,
        source: Path,
        output: Path,
        *,
        converted: Converted | None = None,
        seconds: float | None = None,
        estimate: Estimate | None = None,
    ) -> RepackReport:
        """The report on `plan`, carried out in `seconds` or not at all."""
        checkpoint = plan.checkpoint
        return cls(
            source=source,
            output=output,
            quant=plan.options.quant.value,
            facts=facts_of_plan(plan.file, checkpoint.top_k, checkpoint.family.name),
            payload_bytes=plan.payload_bytes,
            peak_memory_bytes=plan.peak_memory_bytes,
            notes=plan.notes + (converted.notes if converted else ()),
            warnings=plan.warnings,
            converted=converted,
            seconds=seconds,
            estimate=estimate,
        )

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes of output written in a second, None when only planned."""
        if not self.seconds:
            return None
        resumed = self.converted.resumed_bytes if self.converted else 0
        return (self.payload_bytes - resumed) / self.seconds

    def to_record(self) -> dict[str, Any]:
        """As JSON-ready values; the file's facts are members of the same object."""
        return {
            "source": str(self.source),
            "output": str(self.output),
            "uuid": None if self.uuid is None else str(self.uuid),
            "quantisation": self.quant,
            **self.facts.to_record(),
            "payload_bytes": self.payload_bytes,
            "peak_memory_estimate_bytes": self.peak_memory_bytes,
            "seconds": self.seconds,
            "bytes_per_second": self.bytes_per_second,
            **self._io_record(),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def _io_record(self) -> dict[str, Any]:
        done = self.converted
        if done is None:
            found = self.estimate
            return {
                "seconds_estimate": None if found is None else found.seconds,
                "seconds_estimate_from": None if found is None else found.basis,
            }
        return {
            "resumed_bytes": done.resumed_bytes,
            "read_mode": {"mode": done.read_mode[0], "reason": done.read_mode[1]},
            "write_mode": {"mode": done.write_mode[0], "reason": done.write_mode[1]},
            "journal_sync_seconds": done.sync_seconds,
        }
