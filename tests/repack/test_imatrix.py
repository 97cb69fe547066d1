from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import DTYPES, ColibriError
from colibri_repack import Imatrix, recode, repack
from helpers.colibri_contents import contents
from helpers.gguf_builder import STRING, GgufBuilder
from helpers.gguf_models import stacked_state
from helpers.mix_models import mix_model

EXPERTS = "blk.0.ffn_down_exps.weight"
DENSE = "blk.0.attn_q.weight"


def entry(name: str | bytes, values: NDArray[np.float32], n_calls: int = 1) -> bytes:
    raw = name.encode() if isinstance(name, str) else name
    head = struct.pack("<i", len(raw)) + raw + struct.pack("<ii", n_calls, values.size)
    return head + values.astype("<f4").tobytes()


def legacy(path: Path, *entries: bytes, n: int | None = None) -> Path:
    """As llama-imatrix wrote before GGUF, with the number of chunks and the text's name behind."""
    tail = struct.pack("<ii", 5, 4) + b"text"
    path.write_bytes(struct.pack("<i", len(entries) if n is None else n) + b"".join(entries) + tail)
    return path


def gguf_form(
    path: Path,
    sums: dict[str, NDArray[np.float32]],
    counts: dict[str, list[float]],
    kind: str = "imatrix",
) -> Path:
    builder = GgufBuilder().add("general.type", STRING, kind)
    for name, values in sums.items():
        builder.tensor(f"{name}.in_sum2", values.shape, 0, values.astype("<f4").tobytes())
    for name, numbers in counts.items():
        data = np.array(numbers, "<f4")
        builder.tensor(f"{name}.counts", (len(numbers), 1), 0, data.tobytes())
    return builder.write(path)


def weights(n: int) -> NDArray[np.float32]:
    return np.random.default_rng(n).gamma(1, 1, n).astype(np.float32)


def code_of(path: Path) -> str:
    with pytest.raises(ColibriError) as caught:
        Imatrix(path)
    return caught.value.code


def test_legacy_values_are_divided_by_their_calls(tmp_path: Path) -> None:
    values = weights(512)
    matrix = Imatrix(legacy(tmp_path / "m.dat", entry(DENSE, values, 3)))

    importance = matrix.importance(DENSE, 256, 1, 2)

    assert importance is not None
    assert (importance.read() == values[256:] / np.float32(3)).all()
    matrix.close()


def test_gguf_sums_are_divided_by_their_counts_and_unused_experts_weigh_alike(
    tmp_path: Path,
) -> None:
    sums = weights(512).reshape(2, 256)
    matrix = Imatrix(gguf_form(tmp_path / "m.gguf", {EXPERTS: sums}, {EXPERTS: [7, 0]}))

    used, unused = (matrix.importance(EXPERTS, 256, e, 2) for e in (0, 1))

    assert used is not None
    assert unused is not None
    assert (used.read() == sums[0] / np.float32(7)).all()
    assert (unused.read() == 1).all()
    matrix.close()


def test_experts_of_an_older_matrix_kept_as_gguf_share_their_count(tmp_path: Path) -> None:
    """What llama-imatrix writes of what it read with --in-file OLD.dat: one row, one count."""
    sums = weights(512)
    matrix = Imatrix(gguf_form(tmp_path / "m.gguf", {EXPERTS: sums}, {EXPERTS: [7]}))

    second = matrix.importance(EXPERTS, 256, 1, 2)

    assert second is not None
    assert (second.read() == sums[256:] / np.float32(7)).all()
    matrix.close()


def test_sums_of_activations_and_statistics_beside_are_passed_over(tmp_path: Path) -> None:
    """As of llama.cpp's build 11434: `.in_sum` beside `.in_sum2`, and a schema of statistics."""
    sums = weights(256)
    data = sums.astype("<f4").tobytes()
    builder = GgufBuilder().add("general.type", STRING, "imatrix")
    builder.tensor(f"{DENSE}.in_sum2", (256,), 0, data)
    builder.tensor(f"{DENSE}.counts", (1,), 0, np.array([3], "<f4").tobytes())
    builder.tensor(f"{DENSE}.in_sum", (256,), 0, bytes(4 * 256))
    matrix = Imatrix(builder.write(tmp_path / "m.gguf"))

    importance = matrix.importance(DENSE, 256, 0, 1)

    assert importance is not None
    assert (importance.read() == sums / np.float32(3)).all()
    matrix.close()


def test_a_tensor_that_is_not_there_has_no_importance(tmp_path: Path) -> None:
    matrix = Imatrix(legacy(tmp_path / "m.dat", entry(DENSE, weights(256))))

    assert matrix.importance("blk.1.attn_q.weight", 256, 0, 1) is None
    matrix.close()


def test_another_size_is_refused_but_for_the_embedding(tmp_path: Path) -> None:
    embedding = entry("token_embd.weight", weights(96))
    matrix = Imatrix(legacy(tmp_path / "m.dat", entry(DENSE, weights(256)), embedding))

    assert matrix.importance("token_embd.weight", 256, 0, 1) is None
    with pytest.raises(ColibriError) as caught:
        matrix.importance(DENSE, 512, 0, 1)

    assert caught.value.code == "imatrix-size"
    matrix.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_values_that_cannot_weigh_are_refused(tmp_path: Path, bad: float) -> None:
    values = weights(256)
    values[9] = bad
    matrix = Imatrix(legacy(tmp_path / "m.dat", entry(DENSE, values)))
    importance = matrix.importance(DENSE, 256, 0, 1)

    assert importance is not None
    with pytest.raises(ColibriError, match="value 9") as caught:
        importance.read()

    assert caught.value.code == "imatrix-value"
    matrix.close()


@pytest.mark.parametrize("n", [-1, 0, 2, 2**30])
def test_a_number_of_tensors_that_is_wrong_is_refused(tmp_path: Path, n: int) -> None:
    path = legacy(tmp_path / "m.dat", entry(DENSE, weights(256)), n=n)

    assert code_of(path) == "bad-imatrix"


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = legacy(tmp_path / "m.dat", entry("a", weights(2)), entry("b", weights(3)))
    data = whole.read_bytes()
    tail = 4 + 4 + 4

    for size in range(len(data) - tail):
        whole.write_bytes(data[:size])
        assert code_of(whole) == "bad-imatrix", size


@pytest.mark.parametrize(
    "entries",
    [
        [entry("a", weights(2)), entry("a", weights(2))],
        [entry(b"\xff\xfe", weights(2))],
        [entry("", weights(2))],
        [entry("a", weights(2), n_calls=-1)],
        [entry("a", np.zeros(0, np.float32))],
    ],
)
def test_entries_that_cannot_be_are_refused(tmp_path: Path, entries: list[bytes]) -> None:
    assert code_of(legacy(tmp_path / "m.dat", *entries)) == "bad-imatrix"


def test_a_gguf_file_that_is_no_importance_matrix_is_refused(tmp_path: Path) -> None:
    sums = {DENSE: weights(256).reshape(1, 256)}

    assert code_of(gguf_form(tmp_path / "a.gguf", sums, {DENSE: [1]}, "model")) == "bad-imatrix"
    assert code_of(gguf_form(tmp_path / "b.gguf", sums, {})) == "bad-imatrix"
    assert code_of(gguf_form(tmp_path / "c.gguf", sums, {DENSE: [1, 2]})) == "bad-imatrix"


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    assert code_of(tmp_path / "none.dat") == "file-not-found"


@pytest.mark.parametrize("form", ["legacy", "gguf"])
def test_matrices_are_quantised_by_their_importance(tmp_path: Path, form: str) -> None:
    n_experts, columns = 8, 256
    values = weights(n_experts * columns).reshape(n_experts, columns)
    if form == "legacy":
        path = legacy(tmp_path / "i.dat", entry(EXPERTS, values.reshape(-1)))
    else:
        path = gguf_form(tmp_path / "i.gguf", {EXPERTS: values}, {EXPERTS: [1] * n_experts})
    with mix_model("eight experts") as builder:
        source = builder.write(tmp_path / "m.gguf")
        state = stacked_state("eight experts")

    report = repack(source, tmp_path / "m.colibri", quant="q4_0", imatrix=path)

    got = contents(tmp_path / "m.colibri")
    expected = b"".join(
        recode(
            np.ascontiguousarray(state[EXPERTS][e]).view(np.uint8).reshape(-1),
            DTYPES["f32"],
            DTYPES["q4_0"],
            columns=columns,
            weights=values[e],
        ).tobytes()
        for e in range(n_experts)
    )
    assert got[EXPERTS] == ("q4_0", expected)
    assert any("lacks" in note and DENSE in note for note in report.notes)
