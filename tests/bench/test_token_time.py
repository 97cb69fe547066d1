"""What a timeline's passes come to."""

from colibri_bench.token_time import SHARES, mean_sums, middle_token, token_rows, token_sums
from colibri_runtime.timeline import Pass, Span, SpanKind

MS = 10**6


def span(kind, start, end, layer=0, **changes):
    return Span(kind, layer, 1000 * MS + start * MS, 1000 * MS + end * MS, **changes)


def token(*spans, end=20):
    return Pass(1, 1000 * MS, 1000 * MS + end * MS, spans)


PASS = token(
    span(SpanKind.ATTENTION, 0, 3),
    span(SpanKind.WAIT, 4, 8),
    span(SpanKind.CHECK, 8, 9),
    span(SpanKind.EXPERTS, 9, 14),
    span(SpanKind.DENSE, 14, 18, layer=-1),
    span(SpanKind.READ, -2, 4, expert=3, submit_ns=997 * MS, n_bytes=2**20),
    span(SpanKind.READ, 3, 8, expert=5, submit_ns=1003 * MS, n_bytes=2**20, is_prefetch=True),
    span(SpanKind.READ, 12, 13, expert=6, submit_ns=1012 * MS, n_bytes=2**20),
)


def test_sums_tell_where_the_time_went():
    sums = token_sums(PASS)

    assert [sums[name] for name in SHARES] == [3, 0, 5, 4, 1, 4, 3]
    assert sums["total"] == 20
    assert (sums["reading"], sums["n_reads"], sums["read_mib"]) == (9, 3, 3)


def test_rows_count_from_the_tokens_beginning():
    rows = token_rows(PASS)

    assert [row["start_ms"] for row in rows] == sorted(row["start_ms"] for row in rows)
    assert rows[0] == {
        "kind": "read", "layer": 0, "expert": 3, "submit_ms": -3.0, "start_ms": -2.0,
        "end_ms": 4.0, "n_bytes": 2**20, "is_prefetch": False,
    }  # fmt: skip
    assert rows[-1]["kind"] == "dense"
    assert (rows[-1]["layer"], rows[-1]["n_bytes"]) == (None, None)


def test_middle_token_is_the_shorter_of_two():
    assert middle_token([token(end=n) for n in (9, 2, 5, 7)]).end_ns == 1005 * MS


def test_means_are_of_each_sum():
    assert mean_sums([{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 1.0}]) == {"a": 2.0, "b": 5.0}
    assert mean_sums([]) == {}
