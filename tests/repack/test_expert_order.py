from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import colibri_format
from colibri_format import ColibriError
from colibri_repack import (
    RepackOptions,
    RoutingTrace,
    cmd_repack,
    export,
    plan,
    read_trace,
    repack,
)
from colibri_repack.expert_order import plan_order
from helpers.gguf_models import gguf_model

Capture = pytest.CaptureFixture[str]
HEAD = "turn,phase,step,layer,slot,expert,weight\n"


def trace_of(*tokens: tuple[int, ...], layer: int = 0) -> RoutingTrace:
    """One layer's choices, a tuple a token."""
    choices = [(token, layer, e) for token, chosen in enumerate(tokens) for e in chosen]
    return RoutingTrace(*np.array(choices, np.int64).T)


def csv_of(*tokens: tuple[int, ...], layers: int = 1) -> str:
    return HEAD + "".join(
        f"0,1,{token},{layer},{slot},{expert},0.5\n"
        for token, chosen in enumerate(tokens)
        for layer in range(layers)
        for slot, expert in enumerate(chosen)
    )


def test_experts_that_fire_together_become_neighbours() -> None:
    order = plan_order(trace_of((0, 5), (5, 0), (2, 7), (0, 5), (2, 7), (3, 1)), 1, 8)[0].tolist()

    assert abs(order.index(0) - order.index(5)) == 1
    assert abs(order.index(2) - order.index(7)) == 1
    assert sorted(order) == list(range(8))


def test_experts_that_fire_often_stand_first_and_those_never_seen_last() -> None:
    order = plan_order(trace_of((6, 2), (6, 2), (6, 2), (4, 1)), 1, 8)[0].tolist()

    assert set(order[:2]) == {2, 6}
    assert set(order[2:4]) == {1, 4}
    assert order[4:] == [0, 3, 5, 7]


def test_chains_are_joined_at_their_ends() -> None:
    tokens = [(0, 1)] * 5 + [(2, 3)] * 4 + [(1, 3)] * 3 + [(0, 2)] * 2

    order = plan_order(trace_of(*tokens), 1, 4)[0].tolist()

    assert order in ([0, 1, 3, 2], [2, 3, 1, 0])


def test_layers_without_a_trace_keep_the_order_of_numbers() -> None:
    order = plan_order(trace_of((3, 1), layer=1), 3, 4)

    assert order[0].tolist() == order[2].tolist() == [0, 1, 2, 3]
    assert set(order[1][:2].tolist()) == {1, 3}


def test_the_order_does_not_depend_on_that_of_the_trace() -> None:
    rng = np.random.default_rng(1)
    tokens = [tuple(rng.choice(16, 4, replace=False)) for _ in range(9000)]
    trace = trace_of(*tokens)
    mixed = rng.permutation(len(trace.token))

    shuffled = RoutingTrace(trace.token[mixed], trace.layer[mixed], trace.expert[mixed])

    assert plan_order(trace, 1, 16).tolist() == plan_order(shuffled, 1, 16).tolist()


@pytest.mark.parametrize(("layer", "n_experts"), [(0, 5), (1, 6)])
def test_a_trace_of_a_larger_model_is_refused(layer: int, n_experts: int) -> None:
    with pytest.raises(ColibriError) as caught:
        plan_order(trace_of((5, 1), layer=layer), 1, n_experts)
    assert caught.value.code == "trace-mismatch"


def test_csv_is_read_past_comments_and_further_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "# what it is\nweight,expert,layer,step,phase,turn,slot,other\n"
        "0.5,3,1,0,0,0,0,x\n# between\n0.5,4,1,0,0,0,1,x\n\n0.5,4,0,0,1,0,0,x\n"
    )

    trace = read_trace(path)

    assert trace.n_tokens == 2
    assert trace.token.tolist() == [0, 0, 1]
    assert (trace.layer.tolist(), trace.expert.tolist()) == ([1, 1, 0], [3, 4, 4])


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = csv_of((0, 5), (2, 7), (5, 1), layers=2)
    (tmp_path / "t.csv").write_text(text)
    rows = [line.split(",") for line in text.splitlines()]
    table = {
        name: pa.array([float(v) if name == "weight" else int(v) for v in values],
                       pa.float32() if name == "weight" else pa.int32())
        for name, *values in zip(*rows, strict=True)
    }  # fmt: skip
    parquet.write_table(pa.table(table), tmp_path / "t.parquet")

    a, b = read_trace(tmp_path / "t.csv"), read_trace(tmp_path / "t.parquet")

    assert a.token.tolist() == b.token.tolist()
    assert (a.layer.tolist(), a.expert.tolist()) == (b.layer.tolist(), b.expert.tolist())


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "cut").write_bytes(b"PAR1" + bytes(20))
    parquet.write_table(pa.table({"turn": [1]}), tmp_path / "columns")
    names = ("turn", "phase", "step", "layer", "expert")
    parquet.write_table(pa.table({n: [1, None] for n in names}), tmp_path / "nulls")
    parquet.write_table(pa.table({n: ["x"] for n in names}), tmp_path / "texts")
    parquet.write_table(pa.table({n: [-1] for n in names}), tmp_path / "negative")

    for name in ("cut", "columns", "nulls", "texts", "negative"):
        with pytest.raises(ColibriError) as caught:
            read_trace(tmp_path / name)
        assert caught.value.code == "bad-trace", name


def test_parquet_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")

    with pytest.raises(ColibriError, match="parquet") as caught:
        read_trace(tmp_path / "t.parquet")
    assert caught.value.code == "missing-pyarrow"


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEAD,
        "turn,phase,step,layer,slot,weight\n0,0,0,0,0,1\n",
        HEAD + "0,0,0,0,0,x,1\n",
        HEAD + "0,0,0,0\n",
        HEAD + "0,0,0,0,0,-1,1\n",
        HEAD + f"0,0,0,0,0,{2**70},1\n",
        HEAD + "0,0,0,0,0,1.5,1\n",
        "\0\n",
        HEAD + "0" * 70_000,
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)

    with pytest.raises(ColibriError) as caught:
        read_trace(tmp_path / "t.csv")
    assert caught.value.code == "bad-trace"


def test_a_trace_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ColibriError) as caught:
            read_trace(path)
        assert caught.value.code == "not-a-file"


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(csv_of((1, 2)), encoding="utf-8-sig")

    assert read_trace(tmp_path / "t.csv").n_tokens == 1


def test_an_empty_name_of_a_trace_is_not_taken_for_none(tmp_path: Path, capsys: Capture) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")

    assert cmd_repack.main([str(source), "--dry-run", "--order", ""]) == 1
    assert "is-a-directory" in capsys.readouterr().err


def test_memory_counts_the_trace(tmp_path: Path) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")
    (tmp_path / "t.csv").write_text(csv_of(*[(1, 2)] * 500))
    trace = read_trace(tmp_path / "t.csv")

    with_trace = plan(source, RepackOptions(trace=trace)).peak_memory_bytes

    least = plan(source).peak_memory_bytes + 100 * len(trace.expert)
    assert with_trace >= least


def test_a_missing_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(ColibriError) as caught:
        read_trace(tmp_path / "t.csv")
    assert caught.value.code == "file-not-found"


def test_blocks_stand_as_the_trace_says_and_hold_what_they_held(tmp_path: Path) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")
    (tmp_path / "t.csv").write_text(csv_of((9, 4), (9, 4), (2, 7), (9, 4), (2, 7), layers=3))
    arguments = [str(source), str(tmp_path / "m.colibri"), "--order", str(tmp_path / "t.csv")]

    assert cmd_repack.main(arguments) == 0
    repack(source, tmp_path / "plain.colibri")

    with (
        colibri_format.open(tmp_path / "m.colibri") as file,
        colibri_format.open(tmp_path / "plain.colibri") as plain,
    ):
        assert file.verify() == []
        for layer in range(3):
            stand = np.argsort(file.index["offset"][layer]).tolist()
            assert (set(stand[:2]), set(stand[2:4])) == ({4, 9}, {2, 7})
            ends = [file.index["offset"][layer].max() for layer in range(3)]
            assert ends == sorted(ends)
        assert (file.checksums == plain.checksums).all()
        assert (file.metadata["order"], file.metadata["trace"]) == ("trace", "t.csv")
        assert plain.metadata["order"] == "layer-major"
    export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == source.read_bytes()


def test_the_output_is_never_the_trace(tmp_path: Path) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")
    (tmp_path / "t.csv").write_text(csv_of((1, 2)))

    with pytest.raises(ColibriError) as caught:
        repack(source, tmp_path / "t.csv", order=tmp_path / "t.csv", overwrite=True)
    assert caught.value.code == "output-is-input"
