"""What a time estimate is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri_format import DTYPES
from colibri_repack import Quant, RepackOptions, estimate_time, plan
from colibri_repack.time_estimate import plan_seconds, time_conversion
from helpers.gguf_models import gguf_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return gguf_model("qwen3moe").write(tmp_path / "in.gguf")


def test_passing_through_takes_what_the_disk_takes(source: Path) -> None:
    planned = plan(source)
    n_read = sum(part.source.size for part in planned.parts)

    seconds = plan_seconds(planned, {}, 2, disk_bytes_per_second=1000)

    assert seconds == (n_read + planned.file.file_size) / 1000
    assert "conversions" not in estimate_time(planned).basis


def test_slow_conversions_decide_and_are_shared_by_the_cores(source: Path) -> None:
    planned = plan(source, RepackOptions(quant=Quant.Q8_0))
    pairs = {(p.source.dtype.name, p.dtype.name) for p in planned.parts if p.size}
    costs = dict.fromkeys(pairs, 1.0)

    one, four = (plan_seconds(planned, costs, n) for n in (1, 4))

    assert one == 4 * four > 10_000


def test_fast_conversions_hide_behind_the_disk(source: Path) -> None:
    planned = plan(source, RepackOptions(quant=Quant.Q8_0))
    pairs = {(p.source.dtype.name, p.dtype.name) for p in planned.parts}

    seconds = plan_seconds(planned, dict.fromkeys(pairs, 1e-15), 1, disk_bytes_per_second=1000)

    assert seconds == pytest.approx(
        (sum(p.source.size for p in planned.parts) + planned.file.file_size) / 1000
    )


def test_a_conversion_is_timed_by_the_better_of_two() -> None:
    ticks = iter([0.0, 9.0, 10.0, 12.0])

    cost = time_conversion(DTYPES["bf16"], DTYPES["q8_0"], lambda: next(ticks))

    assert cost in (2.0 / 2**16, 2.0 / 2**14)
