"""Mistakes of a decode benchmark that it finds by itself."""

from dataclasses import replace

import pytest

from colibri_bench.decode_checks import check_outcomes
from colibri_bench.decode_run import Outcome
from colibri_bench.same_model import compare_models
from colibri_bench.synthetic_model import write_model
from colibri_bench.synthetic_shape import shape_of
from colibri_repack import repack

LIMIT = 2**30
GOOD = Outcome(
    round=0, limit="50%", limit_bytes=LIMIT, arm="colibri", is_ours=True, is_cold=True,
    cache_state="dropped", peak_bytes=LIMIT, n_killed=0, resident_share=0.0, group="g-1",
    applied_bytes=LIMIT, model="/m.gguf", inode=7,
    answer={"tokens": [], "memory_group": "/a/g-1", "peak_rss_bytes": LIMIT, "io_mode": "direct",
            "mapped": {"/m.gguf": 7}},
)  # fmt: skip


def answered(**changes):
    return replace(GOOD, answer=GOOD.answer | changes)


@pytest.mark.parametrize(
    "outcome",
    [
        GOOD,
        replace(GOOD, limit="none", limit_bytes=None, is_cold=False, applied_bytes=None,
                group=None),
        replace(GOOD, answer={}, failure="killed"),
        answered(mapped={"/m.gguf": 8}),
        answered(mapped={"/other/name": 7}),
        answered(mapped={}),
    ],
)  # fmt: skip
def test_nothing_is_found_where_all_is_as_claimed(outcome):
    assert check_outcomes([outcome]) == []


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (replace(GOOD, is_cold=False), "NOT COLD: colibri at 50%"),
        (replace(GOOD, applied_bytes=None), "LIMIT NOT APPLIED"),
        (replace(GOOD, applied_bytes=2**62), "LIMIT NOT APPLIED"),
        (replace(GOOD, peak_bytes=2 * LIMIT), "LIMIT NOT APPLIED"),
        (replace(GOOD, peak_bytes=LIMIT // 16), "LIMIT NOT APPLIED"),
        (answered(memory_group="/a"), "LIMIT NOT APPLIED"),
        (answered(memory_group=None), "LIMIT NOT APPLIED"),
        (answered(io_mode="buffered", io_reason="tmpfs"), "NOT DIRECT: colibri at 50%"),
        (answered(mapped={"/other": 9}), "OTHER FILE"),
    ],
)
def test_what_was_observed_denies_what_was_claimed(outcome, code):
    (note,) = check_outcomes([GOOD, outcome])

    assert note.startswith(code)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape, one repacked as it is and once more in another encoding."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        write_model(folder / f"{seed}.gguf", shape_of("tiny"), seed)
    repack(folder / "1.gguf", folder / "1.colibri")
    return folder


def test_the_same_model_is_recognised_through_interleaved_rows(models):
    assert compare_models(models / "1.colibri", models / "1.gguf") == []


def test_another_model_of_the_same_shape_is_not(models):
    (note,) = compare_models(models / "1.colibri", models / "2.gguf")

    assert note.startswith("NOT THE SAME MODEL: blk.0.ffn_gate_inp.weight")


def test_a_model_of_another_shape_is_not(models, tmp_path):
    write_model(tmp_path / "small.gguf", shape_of("tiny", 2), 1)

    assert "(theirs has none)" in compare_models(models / "1.colibri", tmp_path / "small.gguf")[0]


def test_what_cannot_be_read_is_told(models, tmp_path):
    (tmp_path / "none.gguf").write_text("none")

    assert compare_models(models / "1.colibri", tmp_path / "none.gguf")[0].startswith(
        "MODELS NOT COMPARED"
    )
