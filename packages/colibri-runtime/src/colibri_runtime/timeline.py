"""When reads, waits and computing of each pass began and ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .backend import Floats
from .disk import BlockRead, DiskEngine, IoReport
from .disk_files import OpenFile
from .steps import Lease, Routing, Steps

KEPT_PASSES: Final = 256


class SpanKind(StrEnum):
    """What a span of time was spent on; a read goes on beside the others, which exclude each
    other as they are the computing thread's."""

    READ = "read"
    WAIT = "wait"
    CHECK = "check"
    ATTENTION = "attention"
    ROUTER = "router"
    EXPERTS = "experts"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Span:
    """From `start_ns` to `end_ns` by the timeline's clock.

    `layer` is the store's number; -1 outside the layers (embedding and output head). Of a read,
    `submit_ns` is when the engine was given it and `start_ns` when its first request went to the
    kernel; it ends when the engine noticed the end of the last one; `is_prefetch` says that it was
    given ahead of demand, even if demand came before it ended. Of the others `expert` is -1.
    """

    kind: SpanKind
    layer: int
    start_ns: int
    end_ns: int
    expert: int = -1
    submit_ns: int = 0
    n_bytes: int = 0
    is_prefetch: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: from the embedding of its tokens to their logits; in decoding one token."""

    n_tokens: int
    start_ns: int
    end_ns: int
    spans: tuple[Span, ...]


class Timeline:
    """Writes down what a store's engine and a decoder's steps do, the last `n_kept` passes.

    `engine` and `steps` give what is to be used in place of the ones that are passed in: nothing
    is measured, and nothing costs time, where they are not. A store whose bookkeeping is in C
    writes reads and waits down itself, for `follow`. One thread computes. A read belongs to the
    pass in which it came back, though it may have begun in the one before. Spans stand in the order
    in which they ended.
    """

    def __init__(
        self,
        *,
        n_kept: int = KEPT_PASSES,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.passes: deque[Pass] = deque(maxlen=n_kept)
        self.clock = clock
        self.layer = -1
        self._spans: list[Span] = []
        self._followed: list[Callable[[], list[Span]]] = []
        self._n_tokens = 0
        self._start_ns = 0

    def engine(self, engine: DiskEngine) -> DiskEngine:
        """`engine`, whose reads, waits and checks are written down."""
        return _TimedEngine(engine, self)

    def steps(self, steps: Steps) -> Steps:
        """`steps`, each of which is written down."""
        return _TimedSteps(steps, self)

    def follow(self, spans: Callable[[], list[Span]]) -> None:
        """Takes in, at the end of each pass, what `spans` gives: what ended since it was called."""
        self._followed.append(spans)

    def begin(self, n_tokens: int) -> None:
        """A pass begins; one that was broken off is forgotten."""
        for forget in self._followed:
            forget()
        self._spans.clear()
        self._n_tokens = n_tokens
        self._start_ns = self.clock()
        self.layer = -1

    def end(self) -> None:
        """The pass has ended, if one had begun."""
        for followed in self._followed:
            self._spans += followed()
        if self._n_tokens:
            spans = tuple(sorted(self._spans, key=attrgetter("end_ns")))
            self.passes.append(Pass(self._n_tokens, self._start_ns, self.clock(), spans))
        self._spans.clear()
        self._n_tokens = 0

    def add(self, span: Span) -> None:
        """Something that has ended; outside a pass it is forgotten."""
        if self._n_tokens:
            self._spans.append(span)

    def spent(self, kind: SpanKind, start_ns: int) -> None:
        """The computing thread did `kind` from `start_ns` until now."""
        self.add(Span(kind, self.layer, start_ns, self.clock()))


class _TimedEngine:
    """A disk engine that tells a timeline; all else is the engine's own."""

    def __init__(self, engine: DiskEngine, timeline: Timeline) -> None:
        self._engine = engine
        self._timeline = timeline
        self._submitted: dict[int, tuple[int, bool]] = {}
        # Engines with threads of their own check there, beside the computing thread.
        self._checks_here = engine.report().n_threads == 0

    def submit(self, read: BlockRead) -> None:
        # Promoted reads are prefetches no more when they come back.
        self._submitted[id(read)] = (self._timeline.clock(), read.is_prefetch)
        self._engine.submit(read)

    def flush(self) -> None:
        self._engine.flush()

    def promote(self, read: BlockRead) -> None:
        self._engine.promote(read)

    def cancel(self, read: BlockRead) -> bool:
        is_cancelled = self._engine.cancel(read)
        if is_cancelled:
            self._submitted.pop(id(read), None)
        return is_cancelled

    def poll(self) -> list[BlockRead]:
        return self._note(self._engine.poll(), None)

    def wait(self) -> list[BlockRead]:
        start_ns = self._timeline.clock()
        return self._note(self._engine.wait(), start_ns)

    def add_file(self, file: OpenFile) -> int:
        return self._engine.add_file(file)

    def report(self) -> IoReport:
        return self._engine.report()

    def close(self) -> None:
        self._submitted.clear()
        self._engine.close()

    def _note(self, reads: list[BlockRead], waited_from_ns: int | None) -> list[BlockRead]:
        """Enters what came back, and how the time since `waited_from_ns`, if any, was spent."""
        if not reads and waited_from_ns is None:
            return reads
        timeline = self._timeline
        now = timeline.clock()
        # A queue engine checks what has come just before it gives it back.
        check_ns = sum(read.checksum_ns for read in reads) if self._checks_here else 0
        if waited_from_ns is not None:
            check_ns = min(check_ns, now - waited_from_ns)
            timeline.add(Span(SpanKind.WAIT, timeline.layer, waited_from_ns, now - check_ns))
        if check_ns:
            timeline.add(Span(SpanKind.CHECK, timeline.layer, now - check_ns, now))
        for read in reads:
            end_ns = read.ended_ns or now
            start_ns = end_ns - read.read_ns
            known = self._submitted.pop(id(read), (start_ns, read.is_prefetch))
            timeline.add(
                Span(
                    SpanKind.READ,
                    read.tag,
                    start_ns,
                    end_ns,
                    read.expert,
                    known[0],
                    read.n_bytes,
                    known[1],
                )
            )
        return reads


class _TimedSteps:
    """Steps that tell a timeline."""

    def __init__(self, steps: Steps, timeline: Timeline) -> None:
        self._steps = steps
        self._timeline = timeline

    def begin(self, ids: NDArray[np.intp]) -> None:
        self._timeline.begin(len(ids))
        start_ns = self._timeline.clock()
        self._steps.begin(ids)
        self._timeline.spent(SpanKind.DENSE, start_ns)

    def attention(self, layer: int) -> None:
        self._timeline.layer = layer
        start_ns = self._timeline.clock()
        self._steps.attention(layer)
        self._timeline.spent(SpanKind.ATTENTION, start_ns)

    def dense(self, layer: int) -> None:
        start_ns = self._timeline.clock()
        self._steps.dense(layer)
        self._timeline.spent(SpanKind.DENSE, start_ns)

    def route(self, layer: int) -> Routing:
        start_ns = self._timeline.clock()
        routing = self._steps.route(layer)
        self._timeline.spent(SpanKind.ROUTER, start_ns)
        return routing

    def predict(self, layer: int) -> Sequence[int]:
        start_ns = self._timeline.clock()
        experts = self._steps.predict(layer)
        self._timeline.spent(SpanKind.ROUTER, start_ns)
        return experts

    def shared(self, layer: int) -> None:
        start_ns = self._timeline.clock()
        self._steps.shared(layer)
        self._timeline.spent(SpanKind.DENSE, start_ns)

    def experts(self, layer: int, leases: Sequence[Lease]) -> None:
        start_ns = self._timeline.clock()
        self._steps.experts(layer, leases)
        self._timeline.spent(SpanKind.EXPERTS, start_ns)

    def finish(self, layer: int) -> None:
        start_ns = self._timeline.clock()
        self._steps.finish(layer)
        self._timeline.spent(SpanKind.EXPERTS, start_ns)

    def logits(self, n_last: int, out: Floats) -> None:
        timeline = self._timeline
        timeline.layer = -1
        start_ns = timeline.clock()
        self._steps.logits(n_last, out)
        timeline.spent(SpanKind.DENSE, start_ns)
        timeline.end()
