"""Two runs agree when their spreads overlap."""

import json

import pytest

from colibri_bench.agreement import Pair, pair_rows
from colibri_bench.cmd_bench import main
from colibri_bench.results import Results, save_results


def decode_row(arm, speed, slowest, fastest):
    return {"limit": "50%", "arm": arm, "tokens_per_s": speed, "slowest": slowest,
            "fastest": fastest}  # fmt: skip


def io_row(gb_per_s, **changes):
    values = {"engine": "uring", "depth": 8, "block_bytes": 2**20, "phase": "first",
              "gb_per_s": gb_per_s, "slowest": 0.9 * gb_per_s,
              "fastest": 1.1 * gb_per_s}  # fmt: skip
    return values | changes


@pytest.mark.parametrize(
    ("other", "agrees"),
    [((2.0, 1.9, 2.1), True), ((3.0, 2.1, 4.0), True), ((3.0, 2.2, 4.0), False),
     ((1.0, 0.5, 1.8), False)],
)  # fmt: skip
def test_overlapping_spreads_agree(other, agrees):
    assert Pair("x", (2.0, 1.9, 2.1), other).agrees is agrees
    assert Pair("x", other, (2.0, 1.9, 2.1)).agrees is agrees


def test_only_what_both_have_is_compared():
    pairs = pair_rows(
        "decode",
        [
            decode_row("colibri", 2, 1, 3),
            decode_row("a", 2, 1, 3),
            decode_row("b", None, None, None),
        ],
        [decode_row("colibri", 4, 3, 5), decode_row("b", 1, 1, 1)],
    )

    assert [(pair.name, pair.agrees) for pair in pairs] == [("colibri, limit 50%: tokens/s", True)]


def save(folder, kind, rows):
    save_results(Results(kind=kind, command=[], machine={}, rows=rows), folder)


def test_command_tells_what_differs(tmp_path, capsys):
    cache = [{"policy": "lru", "share": 0.1, "hit_rate": 0.5}]
    for name, speed in (("a", 1.0), ("b", 1.1), ("c", 2.0)):
        save(tmp_path / name, "io", [io_row(speed), io_row(1.0, depth=None, engine="mmap")])
        save(tmp_path / name, "cache", cache)

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "3 of 3 agree" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["agree"] is False


def test_folders_without_the_same_thing_are_told(tmp_path, capsys):
    save(tmp_path / "a", "io", [io_row(1.0)])
    save(tmp_path / "b", "cache", [])

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "error[no-results]" in capsys.readouterr().err
