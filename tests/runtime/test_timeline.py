"""Timelines: every read and step of a pass, at no change of what is computed."""

from itertools import pairwise

import numpy as np
import pytest

from colibri_runtime import RunConfig, Runtime, Timeline
from colibri_runtime.backend import load_backend
from colibri_runtime.budget import total_bytes
from colibri_runtime.disk import BlockRead, IoReport
from colibri_runtime.disk_files import IoMode
from colibri_runtime.runtime import describe_needs, read_model
from colibri_runtime.timeline import Span, SpanKind
from helpers.random_colibri import make_model, write_random_colibri

MIB = 2**20
TOKENS = (20, 3, 55, 7, 31, 12)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "moe.colibri"
    write_random_colibri(path, make_model(n_layers=3, hidden=96, width=64, n_experts=7, top_k=2))
    return path


def run(path, timeline, **options):
    """Logits after each of `TOKENS` with slots for a few experts, and all counts of the store."""
    config = RunConfig(memory_bytes=64 * MIB, context=16, prefetch_depth=1, **options)
    with Runtime.open(path, config) as whole:
        needs = describe_needs(whole.reader, read_model(whole.reader), load_backend("auto"), config)
    tight = RunConfig(
        memory_bytes=total_bytes(needs, 5, io_threads=2), context=16, prefetch_depth=1, **options
    )
    with Runtime.open(path, tight, timeline=timeline) as runtime:
        logits = [runtime.decoder.forward([token]) for token in TOKENS]
        return np.stack(logits), runtime.store.stats.total()


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_every_read_and_step_of_a_pass_is_written_down(model_file, io):
    timeline = Timeline()
    logits, stats = run(model_file, timeline, io=io)
    plain, _ = run(model_file, None, io=io)

    assert np.array_equal(logits, plain)
    assert [p.n_tokens for p in timeline.passes] == [1] * len(TOKENS)
    spans = [span for p in timeline.passes for span in p.spans]
    kinds = {span.kind for span in spans}
    assert {"read", "attention", "router", "experts", "dense"} <= kinds
    reads = [span for span in spans if span.kind is SpanKind.READ]
    assert 0 < sum(span.n_bytes for span in reads) <= stats.read_bytes
    assert all(0 <= span.layer < 3 and 0 <= span.expert < 7 for span in reads)
    assert all(span.submit_ns <= span.start_ns <= span.end_ns for span in reads)


def test_steps_exclude_each_other_and_lie_within_their_pass(model_file):
    timeline = Timeline()
    run(model_file, timeline)

    for passed in timeline.passes:
        own = [span for span in passed.spans if span.kind is not SpanKind.READ]
        assert [(s.start_ns, s.end_ns) for s in own] == sorted((s.start_ns, s.end_ns) for s in own)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(own))
        assert passed.start_ns <= own[0].start_ns
        assert own[-1].end_ns <= passed.end_ns
        assert own[0].layer == own[-1].layer == -1


def test_what_others_write_down_is_taken_in_at_the_end_of_a_pass():
    timeline = Timeline()
    ended = [Span(SpanKind.READ, 0, 1, 2)]

    def spans():
        found, ended[:] = list(ended), []
        return found

    timeline.follow(spans)
    timeline.begin(1)
    start_ns = timeline.clock()
    timeline.spent(SpanKind.EXPERTS, start_ns)
    ended.append(Span(SpanKind.WAIT, 0, start_ns - 2, start_ns - 1))
    timeline.end()

    assert [span.kind for span in timeline.passes[0].spans] == ["wait", "experts"]


class FakeEngine:
    """Gives back `reads` once, having taken as long as the clock says."""

    def __init__(self, reads, n_threads):
        self.reads = reads
        self.n_threads = n_threads

    def report(self):
        return IoReport("fake", IoMode.DIRECT, "", self.n_threads, is_verified=True)

    def submit(self, read):
        pass

    def cancel(self, read):
        return read.is_prefetch

    def wait(self):
        return self.reads

    def poll(self):
        return []


def a_read(**changes):
    values = {"layer": 0, "expert": 4, "offset": 0, "length": 8, "size": 8, "checksum": 1,
              "slot": 0, "buffer": np.zeros(8, np.uint8), "tag": 2, "n_bytes": 8}  # fmt: skip
    return BlockRead(**(values | changes))


@pytest.mark.parametrize(("n_threads", "n_checks"), [(0, 1), (2, 0)])
def test_checks_are_told_apart_from_waiting_where_they_are_made_here(n_threads, n_checks):
    times = iter([100, 110, 120, 200, 300])
    timeline = Timeline(clock=lambda: next(times))
    read = a_read(read_ns=70, ended_ns=190, checksum_ns=8)
    engine = timeline.engine(FakeEngine([read], n_threads))

    timeline.begin(1)  # 100
    engine.submit(read)  # 110
    assert engine.poll() == []
    assert engine.wait() == [read]  # 120 to 200
    timeline.end()

    spans = timeline.passes[0].spans
    assert spans[0] == Span(SpanKind.READ, 2, 120, 190, 4, 110, 8)
    assert spans[1] == Span(SpanKind.WAIT, -1, 120, 192 if n_checks else 200)
    assert spans[2:] == ((Span(SpanKind.CHECK, -1, 192, 200),) if n_checks else ())


def test_what_comes_between_passes_and_passes_that_broke_off_are_forgotten():
    timeline = Timeline()
    timeline.add(Span(SpanKind.WAIT, 0, 1, 2))
    timeline.end()
    timeline.begin(1)
    timeline.add(Span(SpanKind.WAIT, 0, 3, 4))
    timeline.begin(2)
    timeline.end()

    assert [(p.n_tokens, p.spans) for p in timeline.passes] == [(2, ())]


def test_only_the_last_passes_are_kept():
    timeline = Timeline(n_kept=2)
    for n in (1, 2, 3):
        timeline.begin(n)
        timeline.end()

    assert [p.n_tokens for p in timeline.passes] == [2, 3]


def test_reads_that_were_called_off_leave_nothing():
    timeline = Timeline()
    read = a_read(is_prefetch=True)
    engine = timeline.engine(FakeEngine([], 0))
    timeline.begin(1)
    engine.submit(read)

    assert engine.cancel(read)
    timeline.end()
    assert timeline.passes[0].spans == ()


def test_reads_begun_ahead_are_told_though_demand_came_meanwhile():
    timeline = Timeline()
    read = a_read(is_prefetch=True)
    engine = timeline.engine(FakeEngine([read], 2))
    timeline.begin(1)
    engine.submit(read)
    read.is_prefetch = False  # as `promote` does
    engine.wait()
    timeline.end()

    (span,) = [span for span in timeline.passes[0].spans if span.kind is SpanKind.READ]
    assert span.is_prefetch
