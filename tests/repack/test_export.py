from __future__ import annotations

import errno
import json
import os
import signal
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

import colibri_format
from colibri_format import (
    DTYPES,
    ColibriError,
    FileSpec,
    Layout,
    Role,
    SegmentSpec,
    TensorSpec,
    Writer,
    plan_layout,
)
from colibri_repack import cmd_export, export, repack
from colibri_repack.gguf_export import exporter
from helpers import family_states as f
from helpers import gguf_builder as g
from helpers.colibri_contents import contents
from helpers.family_gguf import gguf_of
from helpers.gguf_models import canonical_state, gguf_model
from helpers.quant_models import quant_model
from helpers.random_models import CONFIGS

DEMO = (
    Path(__file__).parents[2]
    / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.q8_0.gguf"
)
# Integers and doubles are no types of weights: the families refuse them.
GGML_TYPES = [
    dtype
    for dtype in DTYPES.values()
    if dtype.ggml_id is not None and (dtype.is_quantised or dtype.name in ("f32", "f16", "bf16"))
]
Capture = pytest.CaptureFixture[str]


def there_and_back(tmp_path: Path, source: Path, **options: Any) -> bytes:
    """The GGUF that comes out when `source` is repacked and exported."""
    repack(source, tmp_path / "m.colibri", **options)
    export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    return (tmp_path / "out.gguf").read_bytes()


def code_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ColibriError) as caught:
        export(*arguments, **options)
    return caught.value.code


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if "out.gguf" in p.name]


def forged(
    path: Path,
    record: bytes | None,
    *,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    segment: str = "f32",
) -> Path:
    """A file of one layer with two experts, zeros throughout, and this `gguf.json`."""
    shapes = tensors or {"a": ("f32", (4,))}
    layout = Layout.of((SegmentSpec(Role.GATE, DTYPES[segment], (2, 256)),))
    plan = plan_layout(
        n_layers=1,
        n_experts=2,
        layer_layouts=[layout],
        tensors=[TensorSpec(name, DTYPES[kind], shape) for name, (kind, shape) in shapes.items()],
        files=[] if record is None else [FileSpec("gguf.json", len(record))],
        metadata=metadata,
    )
    with Writer(path, plan) as writer:
        for expert in range(2):
            writer.write_block(0, expert, bytes(layout.block_size))
        for tensor in plan.tensors:
            writer.write_tensor(tensor.name, bytes(tensor.size))
        if record is not None:
            writer.write_file("gguf.json", record)
    return path


def record_of(*tensors: Any, kv: Any = (), **members: Any) -> bytes:
    return json.dumps({"version": 3, "kv": list(kv), "tensors": tensors} | members).encode()


A = ["a", "f32", [4]]
STACK = ["blk.0.ffn_gate_exps.weight", "f32", [2, 2, 256]]


@pytest.mark.parametrize("layout", ["plain", "x16"])
def test_the_demo_model_comes_back_byte_for_byte(tmp_path: Path, layout: str) -> None:
    assert there_and_back(tmp_path, DEMO, layout=layout) == DEMO.read_bytes()


@pytest.mark.parametrize("storage", ["stacks", "one by one"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_comes_back_byte_for_byte(tmp_path: Path, name: str, storage: str) -> None:
    state = None if storage == "stacks" else canonical_state(name)
    source = gguf_model(name, state).write(tmp_path / "in.gguf")

    assert there_and_back(tmp_path, source) == source.read_bytes()


@pytest.mark.parametrize(
    ("family", "storage"),
    [(family, "stacked") for family in f.FAMILIES]
    + [("phimoe", "single"), ("deepseek_v2", "single"), ("qwen3_next", "fused"),
       ("qwen3_5_moe", "fused")],
)  # fmt: skip
def test_families_that_are_repacked_only_come_back_byte_for_byte(
    tmp_path: Path, family: str, storage: str
) -> None:
    source = gguf_of(family, storage).write(tmp_path / "in.gguf")

    assert there_and_back(tmp_path, source) == source.read_bytes()


@pytest.mark.parametrize("layout", ["plain", "x16"])
@pytest.mark.parametrize("dtype", GGML_TYPES, ids=lambda dtype: dtype.name)
def test_every_type_comes_back_byte_for_byte(tmp_path: Path, dtype: Any, layout: str) -> None:
    source = quant_model(dtype).write(tmp_path / "in.gguf")

    assert there_and_back(tmp_path, source, layout=layout) == source.read_bytes()


def test_every_kind_of_key_value_comes_back_byte_for_byte(tmp_path: Path) -> None:
    builder = gguf_model("olmoe")
    builder.alignment, builder.version = 256, 2
    builder.add("general.alignment", g.U32, 256)
    for name, kind, low, high in (
        ("u8", g.U8, 0, 255), ("i8", g.I8, -128, 127), ("u16", g.U16, 0, 65535),
        ("i16", g.I16, -32768, 32767), ("u32", g.U32, 0, 2**32 - 1), ("i32", g.I32, -(2**31), 7),
        ("u64", g.U64, 0, 2**64 - 1), ("i64", g.I64, -(2**63), 2**63 - 1),
        ("f64", g.F64, -0.0, 1e-300), ("f32", g.F32, float("inf"), 3.4028234663852886e38),
        ("bool", g.BOOL, False, True),
    ):  # fmt: skip
        builder.add(f"x.{name}", kind, high)
        builder.add(f"x.{name}s", g.ARRAY, (kind, [low, high]))
    builder.add("x.empty", g.ARRAY, (g.F32, []))
    builder.add("x.strings", g.ARRAY, (g.STRING, ["", "é", "\0", b"\xff\xfe no text"]))
    builder.add("x.nan", g.F32, float("nan"))
    source = builder.write(tmp_path / "in.gguf")

    assert there_and_back(tmp_path, source) == source.read_bytes()


def test_parts_of_a_split_file_come_back_as_one(tmp_path: Path) -> None:
    whole = gguf_model("qwen3moe")
    rows, pairs = whole.rows, whole.pairs
    for number, part in enumerate((rows[:9], rows[9:])):
        builder = g.GgufBuilder(pairs=[] if number else list(pairs), rows=part)
        for key, value in (("no", number), ("count", 2), ("tensors.count", len(rows))):
            builder.add(f"split.{key}", g.U16 if key != "tensors.count" else g.I32, value)
        builder.write(tmp_path / f"m-0000{number + 1}-of-00002.gguf")

    made = there_and_back(tmp_path, tmp_path / "m-00002-of-00002.gguf")

    assert made == whole.build()


@pytest.mark.parametrize(("quant", "file_type"), [("q8_0", 7), ("q4_k_m", 15)])
def test_what_was_quantised_is_exported_as_what_it_became(
    tmp_path: Path, quant: str, file_type: int
) -> None:
    source = quant_model(DTYPES["f32"]).add("general.file_type", g.U32, 0)
    repack(source.write(tmp_path / "in.gguf"), tmp_path / "m.colibri", quant=quant)

    export(tmp_path / "m.colibri", tmp_path / "out.gguf")

    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    made = {t.name: (t.tensor_type.name.lower(), t.data.tobytes()) for t in reader.tensors}
    assert made == contents(tmp_path / "m.colibri")
    assert reader.fields["general.file_type"].contents() == file_type


def test_a_tensor_that_was_left_out_is_told(tmp_path: Path) -> None:
    builder = gguf_model("llama")
    builder.tensor("blk.0.attn_rot_embd.weight", (4,), 0, bytes(16))
    repack(builder.write(tmp_path / "in.gguf"), tmp_path / "m.colibri")

    report = export(tmp_path / "m.colibri", tmp_path / "out.gguf")

    assert "attn_rot_embd" in report.notes[0]
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors]
    assert names == [row.name for row in builder.rows[:-1]]


def test_a_record_without_tensors_gives_stacks_in_the_usual_order(tmp_path: Path) -> None:
    path = forged(tmp_path / "m.colibri", json.dumps({"version": 3, "kv": []}).encode(), tensors={
        "output.weight": ("f32", (2, 4)), "token_embd.weight": ("f32", (2, 4)),
        "output_norm.weight": ("f32", (4,))})  # fmt: skip

    report = export(path, tmp_path / "out.gguf")

    tensors = gguf.GGUFReader(tmp_path / "out.gguf").tensors
    assert [(t.name, t.shape.tolist()) for t in tensors] == [
        ("token_embd.weight", [4, 2]),
        ("blk.0.ffn_gate_exps.weight", [256, 2, 2]),
        ("output_norm.weight", [4]),
        ("output.weight", [4, 2]),
    ]
    assert "usual order" in report.notes[0]


@pytest.mark.parametrize(
    "record",
    [
        b"{",
        b"[]",
        b'{"kv": 1}',
        b"[" * 100_000,
        record_of(A, STACK, version=9),
        record_of(A, STACK, kv=[["a", "u8"]]),
        record_of(A, STACK, kv=[["a", "u8", 256]]),
        record_of(A, STACK, kv=[["a", "u8", True]]),
        record_of(A, STACK, kv=[["a", "u7", 1]]),
        record_of(A, STACK, kv=[["a", "f32", "x"]]),
        record_of(A, STACK, kv=[["a", "arr:i8", [1, 128]]]),
        record_of(A, STACK, kv=[["a", "arr:i8", 1]]),
        record_of(A, STACK, kv=[["a", "arr:arr:i8", [[1]]]]),
        record_of(A, STACK, kv=[["a", "str", "\ud800"]]),
        record_of(A, STACK, kv=[["a", "u8", 1], ["a", "u8", 1]]),
        record_of(A, STACK, kv=[["general.alignment", "u32", 48]]),
        record_of(A, STACK, kv=[["general.alignment", "str", "x"]]),
        record_of(A, A, STACK),
        record_of(["a", "f32", []], STACK),
        record_of(["a", "f32", [-4]], STACK),
        record_of(["a", "f32", [4.0]], STACK),
        record_of(["a", "f32", [2**70]], STACK),
        record_of("a"),
        b'{"version": 3, "kv": [], "tensors": {}}',
    ],
)
def test_a_record_that_is_not_as_written_is_refused(tmp_path: Path, record: bytes) -> None:
    path = forged(tmp_path / "m.colibri", record)

    assert code_of(path, tmp_path / "out.gguf") == "bad-gguf-record"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "record",
    [
        record_of(A),
        record_of(STACK),
        record_of(A, STACK, ["b", "f32", [4]]),
        record_of(["a", "f32", [5]], STACK),
        record_of(A, ["blk.0.ffn_gate_exps.weight", "f32", [2, 1, 256]]),
        record_of(A, ["blk.7.ffn_gate_exps.weight", "f32", [2, 2, 256]]),
        record_of(A, ["blk.0.ffn_gate.9.weight", "f32", [2, 256]]),
        record_of(A, ["blk.0.ffn_up_exps.weight", "f32", [2, 2, 256]]),
        record_of(A, ["blk.0.ffn_gate.weight", "f32", [2, 256]]),
    ],
)
def test_a_record_of_other_tensors_than_the_file_holds_is_refused(
    tmp_path: Path, record: bytes
) -> None:
    path = forged(tmp_path / "m.colibri", record)

    assert code_of(path, tmp_path / "out.gguf") == "cannot-export"


@pytest.mark.parametrize("kind", ["u8", "f8_e4m3"])
def test_types_that_gguf_lacks_are_refused(tmp_path: Path, kind: str) -> None:
    path = forged(tmp_path / "m.colibri", record_of(A, STACK), tensors={"a": (kind, (4,))})

    assert code_of(path, tmp_path / "out.gguf") == "cannot-export"


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    repack(DEMO, tmp_path / "m.colibri")
    (tmp_path / "out.gguf").write_bytes(b"precious")

    assert code_of(tmp_path / "m.colibri", tmp_path / "out.gguf") == "file-exists"
    assert (tmp_path / "out.gguf").read_bytes() == b"precious"

    export(tmp_path / "m.colibri", tmp_path / "out.gguf", overwrite=True)
    assert (tmp_path / "out.gguf").read_bytes() == DEMO.read_bytes()


def test_the_output_is_never_the_input(tmp_path: Path) -> None:
    repack(DEMO, tmp_path / "m.colibri")
    (tmp_path / "link").symlink_to(tmp_path / "m.colibri")

    code = code_of(tmp_path / "m.colibri", tmp_path / "link", overwrite=True)

    assert code == "output-is-input"


def test_full_disk_is_found_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repack(DEMO, tmp_path / "m.colibri")
    space = namedtuple("space", ["f_bavail", "f_frsize"])(10, 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: space)

    assert code_of(tmp_path / "m.colibri", tmp_path / "out.gguf") == "disk-full"
    assert leftovers(tmp_path) == []


def test_folder_of_the_output_must_be_there(tmp_path: Path) -> None:
    repack(DEMO, tmp_path / "m.colibri")

    assert code_of(tmp_path / "m.colibri", tmp_path / "no" / "out.gguf") == "file-not-found"


@pytest.mark.parametrize("what", ["block", "tensor"])
def test_damage_is_found_and_nothing_is_left(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m.colibri"
    repack(DEMO, path)
    with colibri_format.open(path) as file:
        at = (
            file.expert(3, 7).offset
            if what == "block"
            else file.tensor("blk.2.attn_k.weight").offset
        )
    with path.open("r+b") as raw:
        raw.seek(at + 100)
        byte = raw.read(1)[0]
        raw.seek(at + 100)
        raw.write(bytes([byte ^ 1]))

    assert code_of(path, tmp_path / "out.gguf") == f"{what}-checksum"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupt_in_the_middle_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    repack(DEMO, tmp_path / "m.colibri")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        export(tmp_path / "m.colibri", tmp_path / "out.gguf", progress=stop)

    assert leftovers(tmp_path) == []


def test_sigterm_ends_the_command_as_ctrl_c_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "colibri_repack.cmd_export.export", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )

    assert cmd_export.main([str(tmp_path / "m.colibri"), str(tmp_path / "out.gguf")]) == 143


def test_a_failing_write_keeps_its_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repack(DEMO, tmp_path / "m.colibri")

    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)

    with pytest.raises(OSError, match=r"out\.gguf") as caught:
        export(tmp_path / "m.colibri", tmp_path / "out.gguf")
    monkeypatch.undo()
    assert getattr(caught.value, "code", None) == "disk-full"
    assert caught.value.errno == errno.ENOSPC
    assert leftovers(tmp_path) == []


def test_pieces_smaller_than_a_matrix_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = quant_model(DTYPES["q5_k"]).write(tmp_path / "in.gguf")
    monkeypatch.setattr(exporter, "_PIECE", 3000)

    assert there_and_back(tmp_path, source, layout="x16") == source.read_bytes()


def test_the_command_writes_tells_and_plans(tmp_path: Path, capsys: Capture) -> None:
    path, output = tmp_path / "m.colibri", tmp_path / "out.gguf"
    repack(DEMO, path)

    assert cmd_export.main([str(path), str(output), "--dry-run"]) == 0
    assert "--dry-run" in capsys.readouterr().out
    assert not output.exists()
    assert cmd_export.main([str(path), str(output), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["file_size"] == output.stat().st_size == DEMO.stat().st_size
    assert record["types"]["q8_0"] > 0
    assert cmd_export.main([str(path), str(output)]) == 1
    assert "error[file-exists]" in capsys.readouterr().err
    assert cmd_export.main([str(path), str(output), "--force"]) == 0
    assert "type q8_0" in capsys.readouterr().out
    assert cmd_export.main([str(path), str(path), "--force"]) == 2
