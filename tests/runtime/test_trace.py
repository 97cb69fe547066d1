"""Traces: reading CSV and Parquet, refusing bad ones, and recording runs."""

import sys
from pathlib import Path

import numpy as np
import pytest

from colibri_format import FormatError, StorageError, UsageError
from colibri_runtime.trace import TracePhase, read_trace
from colibri_runtime.trace_recorder import TraceRecorder

HEADER = "turn,phase,step,layer,slot,expert,weight\n"
DEMO = (
    Path(__file__).parents[2]
    / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.route.csv"
)


def write(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_rows_of_a_generated_tokens_layer_form_an_event(tmp_path):
    path = write(tmp_path, HEADER + "0,1,5,2,0,7,0.75\n0,1,5,2,1,3,0.25\n0,1,6,2,0,3,1\n")

    trace = read_trace(path)

    assert [(e.layer, e.step, e.experts, e.weights) for e in trace.events] == [
        (2, 5, (7, 3), (0.75, 0.25)),
        (2, 6, (3,), (1.0,)),
    ]
    assert (trace.n_layers, trace.n_experts, trace.n_picks, trace.n_blocks) == (3, 8, 3, 8)


def test_a_batch_of_a_prompt_asks_for_each_expert_once(tmp_path):
    path = write(
        tmp_path,
        HEADER + "0,0,0,0,0,1,0.5\n0,0,1,0,0,1,0.25\n0,0,1,0,1,2,0.5\n0,0,0,1,0,1,1\n",
    )

    events = read_trace(path).events

    assert [(e.layer, e.experts, e.weights) for e in events] == [
        (0, (1, 2), (0.75, 0.5)),
        (1, (1,), (1.0,)),
    ]
    assert not read_trace(path).only(TracePhase.DECODE).events


def test_columns_come_in_any_order_and_number_and_comments_state_block_sizes(tmp_path):
    path = write(
        tmp_path,
        "# a trace\n# layer=0 expert_bytes=4096 dense_bytes=7\n"
        "weight,expert,slot,layer,step,phase,turn,more\n1,2,0,0,0,1,0,x\n",
    )

    trace = read_trace(path)

    assert trace.events[0].experts == (2,)
    assert trace.block_bytes == (4096,)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "trace-columns"),
        ("turn,phase,step,layer,slot,expert\n", "trace-columns"),
        ("turn,turn,phase,step,layer,slot,expert,weight\n", "trace-columns"),
        (HEADER, "trace-empty"),
        (HEADER + "0,1,0,0,0\n", "trace-value"),
        (HEADER + "0,1,0,0,0,x,1\n", "trace-value"),
        (HEADER + "0,1,0,0,0,-1,1\n", "trace-value"),
        (HEADER + "0,2,0,0,0,1,1\n", "trace-value"),
        (HEADER + "0,1,0,5000,0,1,1\n", "trace-value"),
        (HEADER + "0,1,0,0,0,65536,1\n", "trace-value"),
        (HEADER + "0,1,0,0,0,1,nan\n", "trace-value"),
        (HEADER + "0,1,0,0,0,1,-0.5\n", "trace-value"),
        (HEADER + '0,1,0,0,0,1,"1\n', "trace-value"),
        (HEADER + "0,1,0,0,0,1,0.5\n0,1,0,0,1,1,0.5\n", "trace-duplicate"),
        (HEADER + "0,1,0,0,0,1,\xff\n", "trace-encoding"),
    ],
)
def test_bad_traces_are_refused_by_code(tmp_path, text, code):
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(FormatError) as error:
        read_trace(path)

    assert error.value.code == code


def test_the_line_of_a_bad_value_is_named(tmp_path):
    path = write(tmp_path, "# one\n" + HEADER + "0,1,0,0,0,1,1\n0,1,1,0,0,?,1\n")

    with pytest.raises(FormatError, match=r"trace.csv:4: "):
        read_trace(path)


def test_a_trace_of_too_many_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("colibri_runtime.trace.MAX_PICKS", 1)
    path = write(tmp_path, HEADER + "0,1,0,0,0,1,1\n0,1,1,0,0,1,1\n")

    with pytest.raises(FormatError) as error:
        read_trace(path)

    assert error.value.code == "trace-size"


def test_a_trace_that_is_not_there_is_the_kernels_error(tmp_path):
    with pytest.raises(StorageError) as error:
        read_trace(tmp_path / "none.csv")

    assert error.value.code == "file-not-found"


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow.lib", None)

    for call in (read_trace, TraceRecorder):
        with pytest.raises(UsageError, match=r"colibri-runtime\[trace\]") as error:
            call(tmp_path / "trace.parquet")
        assert error.value.code == "no-pyarrow"
    assert list(tmp_path.iterdir()) == []


def record(path, **options):
    """Two prompt tokens and one generated one, through two layers."""
    with TraceRecorder(path, n_prompt=2, **options) as recorder:
        for first, n in ((0, 2), (2, 1)):
            for layer in range(2):
                experts = np.arange(2 * n).reshape(n, 2) + layer
                weights = np.tile(np.array([0.75, 0.25], np.float32), (n, 1))
                recorder.routed(layer, first, experts, weights, frozenset())
        recorder.routed(2, 0, np.zeros((1, 1), np.intp), None, frozenset())
        assert not path.exists()
    return recorder


@pytest.mark.parametrize("name", ["trace.csv", "trace.parquet"])
def test_what_is_recorded_can_be_read(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="the extra `trace` is not installed")
    path = tmp_path / name

    recorder = record(path)

    assert recorder.n_rows == 12
    trace = read_trace(path)
    assert [(e.phase, e.step, e.layer, e.experts) for e in trace.events] == [
        (TracePhase.PREFILL, 0, 0, (0, 1, 2, 3)),
        (TracePhase.PREFILL, 0, 1, (1, 2, 3, 4)),
        (TracePhase.DECODE, 2, 0, (0, 1)),
        (TracePhase.DECODE, 2, 1, (1, 2)),
    ]
    assert trace.events[2].weights == (0.75, 0.25)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_bad_parquet_is_refused_by_code(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="the extra `trace` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "trace.parquet"
    names = ["turn", "phase", "step", "layer", "slot", "expert", "weight"]
    cases = {
        "trace-columns": arrow.table({"turn": [1]}),
        "trace-value": arrow.table({name: [None] for name in names}),
        "trace-empty": arrow.table({name: arrow.array([], arrow.int32()) for name in names}),
    }
    codes = {}
    for code, table in cases.items():
        parquet.write_table(table, path)
        with pytest.raises(FormatError) as error:
            read_trace(path)
        codes[code] = error.value.code
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(FormatError) as error:
        read_trace(path)

    assert codes == {code: code for code in cases}
    assert error.value.code == "trace-value"


def test_rows_leave_memory_as_they_become_many(tmp_path, monkeypatch):
    monkeypatch.setattr("colibri_runtime.trace_recorder._FLUSH_ROWS", 4)
    path = tmp_path / "trace.csv"

    record(path)

    assert len(path.read_text().splitlines()) == 13


def test_an_existing_file_is_not_replaced_unless_asked(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("mine")

    with pytest.raises(StorageError) as error:
        TraceRecorder(path)

    assert error.value.code == "file-exists"
    assert path.read_text() == "mine"
    record_over = TraceRecorder(path, overwrite=True)
    record_over.close()
    record_over.close()
    assert path.read_text() == HEADER


def test_a_folder_that_is_not_there_is_the_kernels_error(tmp_path):
    with pytest.raises(StorageError) as error:
        TraceRecorder(tmp_path / "no" / "trace.csv")

    assert error.value.code == "file-not-found"


def test_a_failed_write_is_told_and_leaves_no_file_of_that_name(tmp_path, monkeypatch):
    path = tmp_path / "trace.csv"
    recorder = TraceRecorder(path)

    def full(columns):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder._sink, "write", full)
    recorder.routed(0, 0, np.array([[3]]), np.array([[1.0]], np.float32), frozenset())

    with pytest.raises(StorageError) as error:
        recorder.close()

    assert error.value.code == "disk-full"
    assert not path.exists()
    recorder.close()


def test_turns_follow_each_other(tmp_path):
    path = tmp_path / "trace.csv"
    one = (np.array([[3]]), np.array([[1.0]], np.float32), frozenset())
    with TraceRecorder(path, n_prompt=1) as recorder:
        recorder.routed(0, 0, *one)
        recorder.begin_turn(0)
        recorder.routed(0, 0, *one)

    assert [(e.turn, e.phase) for e in read_trace(path).events] == [
        (0, TracePhase.PREFILL),
        (1, TracePhase.DECODE),
    ]


def test_the_recorded_trace_of_the_demo_model_is_whole():
    trace = read_trace(DEMO)

    decode = trace.only(TracePhase.DECODE)
    assert (trace.n_layers, trace.n_experts) == (6, 16)
    assert len(decode.events) == 6 * 128
    assert decode.n_picks == 2 * len(decode.events)
