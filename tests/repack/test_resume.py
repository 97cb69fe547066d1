"""A repack that was stopped goes on, unless what it is made from is no longer the same."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_format import ColibriError, Resume
from colibri_repack import repack
from colibri_repack.report import RepackReport
from colibri_repack.sources.files import InputFiles, page_aligned
from helpers.gguf_models import gguf_model
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import write_folder


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small models have many entries, too."""
    real = Resume.__init__

    def init(self: Resume, *args: Any, **options: Any) -> None:
        real(self, *args, **options | {"every_bytes": 2**16})

    monkeypatch.setattr(Resume, "__init__", init)
    yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return gguf_model("qwen3moe").write(tmp_path / "in.gguf")


def stop_in_the_middle(
    source: Path, output: Path, error: type[BaseException] = KeyboardInterrupt, **options: Any
) -> BaseException:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error) as caught:
        repack(source, output, progress=stop, **options)
    assert not output.exists()
    return caught.value


def code_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ColibriError) as caught:
        repack(*arguments, **options)
    return caught.value.code


def resumed_bytes(report: RepackReport) -> int:
    assert report.converted is not None
    return report.converted.resumed_bytes


@pytest.mark.parametrize("quant", ["keep", "q8_0"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_stopped_repack_goes_on_to_the_same_bytes(
    tmp_path: Path, error: type[BaseException], quant: str
) -> None:
    source = gguf_model("qwen3moe").write(tmp_path / "in.gguf")
    repack(source, tmp_path / "whole.colibri", quant=quant)
    output = tmp_path / "m.colibri"
    before = source.read_bytes()

    stopped = stop_in_the_middle(source, output, error, quant=quant)
    report = repack(source, output, quant=quant)

    assert "the same command goes on" in stopped.__notes__[0]
    assert resumed_bytes(report) > report.payload_bytes // 4
    assert output.read_bytes() == (tmp_path / "whole.colibri").read_bytes()
    assert source.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf", "m.colibri", "whole.colibri"]


def test_progress_starts_with_what_is_there_and_ends_with_all(tmp_path: Path, source: Path) -> None:
    stop_in_the_middle(source, tmp_path / "m.colibri")
    seen: list[tuple[int, int]] = []

    report = repack(
        source, tmp_path / "m.colibri", progress=lambda done, total: seen.append((done, total))
    )

    assert seen[0] == (resumed_bytes(report), report.payload_bytes)
    assert seen[-1] == (report.payload_bytes, report.payload_bytes)


def test_rate_counts_only_what_this_run_wrote(tmp_path: Path, source: Path) -> None:
    stop_in_the_middle(source, tmp_path / "m.colibri")

    report = repack(source, tmp_path / "m.colibri")

    assert report.seconds is not None
    assert report.bytes_per_second == pytest.approx(
        (report.payload_bytes - resumed_bytes(report)) / report.seconds
    )


def rewrite_in_place(source: Path) -> None:
    found = source.stat()
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    with source.open("r+b") as file:
        file.write(data)
    os.utime(source, ns=(found.st_atime_ns, found.st_mtime_ns))


def replace(source: Path) -> None:
    found = source.stat()
    other = source.with_name("other")
    other.write_bytes(source.read_bytes())
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(source)


CHANGES = {
    "time": lambda source: os.utime(source, ns=(1, 1)),
    "content, time put back": rewrite_in_place,
    "replaced": replace,
    "permissions": lambda source: source.chmod(0o600),
}


@pytest.mark.parametrize("change", CHANGES)
def test_source_that_changed_between_runs_is_refused_and_the_work_kept(
    tmp_path: Path, source: Path, change: str
) -> None:
    output = tmp_path / "m.colibri"
    stop_in_the_middle(source, output)
    CHANGES[change](source)

    assert code_of(source, output) == "unfinished-differs"
    assert code_of(source, output) == "unfinished-differs"
    report = repack(source, output, trust_source=True)

    assert resumed_bytes(report) > 0


@pytest.mark.parametrize("change", CHANGES)
def test_source_that_changes_during_a_run_is_told_and_the_work_kept(
    tmp_path: Path, source: Path, change: str
) -> None:
    output = tmp_path / "m.colibri"
    calls: list[int] = []

    def touch(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 2:
            CHANGES[change](source)

    assert code_of(source, output, progress=touch) == "source-changed"
    assert not output.exists()
    report = repack(source, output, restart=True)

    assert resumed_bytes(report) == 0


def test_source_of_another_size_is_no_source_to_trust(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "m.colibri"
    stop_in_the_middle(source, output)
    gguf_model("llama").write(source)

    assert code_of(source, output, trust_source=True) == "unfinished-differs"


@pytest.mark.parametrize(
    "options",
    [{"quant": "f16"}, {"alignment": 8192}, {"dense_quant": "f16"}, {"may_requantise": True}],
)
def test_other_options_are_refused_until_told_to_restart(
    tmp_path: Path, source: Path, options: dict[str, Any]
) -> None:
    output = tmp_path / "m.colibri"
    stop_in_the_middle(source, output)

    assert code_of(source, output, **options) == "unfinished-differs"
    assert resumed_bytes(repack(source, output, restart=True, **options)) == 0


def test_another_memory_budget_goes_on(tmp_path: Path, source: Path) -> None:
    stop_in_the_middle(source, tmp_path / "m.colibri")

    report = repack(source, tmp_path / "m.colibri", memory_bytes=2**30)

    assert resumed_bytes(report) > 0


def test_another_version_of_the_tool_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in_the_middle(source, tmp_path / "m.colibri")
    monkeypatch.setattr("colibri_repack.work_facts.version", lambda name: "9.9")

    assert code_of(source, tmp_path / "m.colibri") == "unfinished-differs"


def test_existing_output_is_replaced_only_when_the_new_one_is_whole(
    tmp_path: Path, source: Path
) -> None:
    output = tmp_path / "m.colibri"
    output.write_bytes(b"precious")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack(source, output, overwrite=True, progress=stop)
    assert output.read_bytes() == b"precious"
    assert code_of(source, output) == "file-exists"

    report = repack(source, output, overwrite=True)

    assert resumed_bytes(report) > 0
    assert output.read_bytes() != b"precious"


def test_data_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    state = dict(random_state("llama"))
    state["lm_head.weight"][-1, -1] = float("nan")
    folder = write_folder(tmp_path / "hf", state, CONFIGS["llama"])

    assert code_of(folder, tmp_path / "m.colibri", quant="q8_0") == "not-finite"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_failing_disk_keeps_what_is_done(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    output = tmp_path / "m.colibri"
    code = errno.ENOSPC if call == "pwrite" else errno.EIO
    real = getattr(os, call)
    calls: list[int] = []
    most = 10**9

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > most:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr("colibri_repack.memory_plan._TILES", (2**14,))
    monkeypatch.setattr("colibri_repack.memory_plan._WRITE_BUFFER", 2**14)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        repack(source, tmp_path / "whole.colibri")
        most = len(calls) * 2 // 3
        calls.clear()
        found = code_of(source, output)

    assert found == ("disk-full" if call == "pwrite" else "io-error")
    assert not output.exists()
    assert resumed_bytes(repack(source, output)) > 0
    assert output.read_bytes() == (tmp_path / "whole.colibri").read_bytes()


def test_space_of_the_unfinished_output_counts_as_free(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "m.colibri"
    stop_in_the_middle(source, output)
    there = (tmp_path / "m.colibri.part").stat()
    missing = there.st_size - there.st_blocks * 512
    space = namedtuple("space", ["f_bavail", "f_frsize"])
    real = os.statvfs

    monkeypatch.setattr(os, "statvfs", lambda path: space(missing - 1, 1))
    assert code_of(source, output) == "disk-full"
    monkeypatch.setattr(os, "statvfs", lambda path: space(missing, 1))
    repack(source, output)
    monkeypatch.setattr(os, "statvfs", real)

    assert output.exists()


def test_file_systems_without_direct_io_are_served_and_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    repack(source, tmp_path / "a.colibri")

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("colibri_repack.sources.files._LEAST_DIRECT", 4096)
    report = repack(source, tmp_path / "b.colibri")

    assert report.converted is not None
    for mode, reason in (report.converted.read_mode, report.converted.write_mode):
        assert mode == "buffered"
        assert "refused at opening" in reason
    assert (tmp_path / "a.colibri").read_bytes() == (tmp_path / "b.colibri").read_bytes()


@pytest.mark.parametrize("is_refused", [False, True])
def test_direct_reads_of_any_place_give_the_files_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    rng = np.random.default_rng(5)
    data = rng.bytes(70_001)
    path = tmp_path / "x"
    path.write_bytes(data)
    monkeypatch.setattr("colibri_repack.sources.files._LEAST_DIRECT", 1)
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
        if is_refused and int(flags, 8) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    files = InputFiles()
    files.add(path)
    for _ in range(200):
        start, stop = np.sort(rng.integers(0, len(data) + 1, 2)).tolist()
        for buffer in (page_aligned(stop - start, start), np.empty(stop - start, np.uint8)):
            if stop > start:
                files.read_into(path, start, buffer.data)
                assert buffer.tobytes() == data[start:stop]
    with pytest.raises(ColibriError) as caught:
        files.read_into(path, 65_000, page_aligned(6000, 65_000).data)
    files.close()

    assert caught.value.code == "short-read"
    assert files.mode == ("buffered" if is_refused else "direct")
