from __future__ import annotations

import errno
import json
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import colibri_format
from colibri_format import ColibriError, Role, parse_model
from colibri_repack import RepackOptions, plan, read_checkpoint, repack
from colibri_repack.convert import convert
from colibri_repack.sources import GgufSource, open_source
from helpers import gguf_builder as g
from helpers.gguf_models import canonical_state, gguf_model
from helpers.random_models import CONFIGS, random_state
from helpers.safetensors_builder import bf16, write_folder

DEMO = (
    Path(__file__).parents[2]
    / "packages/colibri-bench/src/colibri_bench/data/hummingbird-21m-moe.q8_0.gguf"
)
MATRICES = ("token_embd", "output.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w",
            "ffn_gate.w", "ffn_up.w", "ffn_down.w", "_shexp.w")  # fmt: skip


def hf_folder(folder: Path, name: str, n_shards: int = 1, **config: Any) -> Path:
    return write_folder(folder, dict(random_state(name)), CONFIGS[name] | config, n_shards=n_shards)


def code_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ColibriError) as caught:
        repack(*arguments, **options)
    return caught.value.code


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if ".colibri" in p.name]


def test_demo_model_passes_through_bit_for_bit(tmp_path: Path) -> None:
    output = tmp_path / "demo.colibri"
    repack(DEMO, output)
    source = {t.name: t.data for t in gguf.GGUFReader(DEMO).tensors}

    with colibri_format.open(output) as file:
        assert file.verify() == []
        for layer in range(6):
            for expert in range(16):
                block = file.expert(layer, expert)
                data = block.read()
                for segment in block.segments:
                    name = f"blk.{layer}.ffn_{segment.role.name.lower()}_exps.weight"
                    expected = source[name][expert].tobytes()
                    got = block.plain(segment, data).tobytes()
                    assert got == expected, (layer, expert, segment.role)
                    assert segment.dtype.name == "q8_0"
        dense = {name: data for name, data in source.items() if "_exps" not in name}
        assert set(file.tensors) == set(dense)
        for name, data in dense.items():
            assert file.tensor(name).read_plain().tobytes() == data.tobytes(), name
        assert file.tensors["blk.3.attn_q.weight"].layer == 3
        assert file.tensors["token_embd.weight"].layer is None


def test_demo_file_describes_itself(tmp_path: Path) -> None:
    output = tmp_path / "demo.colibri"
    report = repack(DEMO, output)

    with colibri_format.open(output) as file:
        model = parse_model(file.read_file("model.json"))
        record = json.loads(file.read_file("gguf.json"))
        assert model.moe is not None
        assert (model.family, model.n_layers, model.moe.n_experts) == ("qwen3moe", 6, 16)
        assert record["kv"][0] == ["general.architecture", "str", "qwen3moe"]
        assert file.metadata["source"] == {"files": [DEMO.name], "format": "gguf"}
        assert file.uuid == report.uuid
    facts = report.facts
    assert facts.file_size == output.stat().st_size
    assert [b.size for b in facts.block_sizes] == [208_896]
    assert facts.token_bytes == 6 * 2 * 208_896
    assert (facts.padding_share, facts.index_bytes, facts.n_blocks) == (0.0, 6 * 16 * 24, 96)
    assert report.warnings == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_keep_gives_every_tensor_back(tmp_path: Path, name: str) -> None:
    output = tmp_path / "m.colibri"
    repack(hf_folder(tmp_path / "hf", name, n_shards=2), output)
    left = dict(canonical_state(name))

    with colibri_format.open(output) as file:
        assert file.verify() == []
        for tensor in file.tensors.values():
            expected = left.pop(tensor.name)
            assert tensor.shape == expected.shape
            assert file.tensor(tensor.name).read_plain().tobytes() == expected.tobytes()
        is_moe = "num_experts_per_tok" in CONFIGS[name]
        for layer, expert in np.argwhere(file.index["size"]).tolist():
            block = file.expert(layer, expert)
            data = block.read()
            for segment in block.segments:
                stem = f"blk.{layer}.ffn_{segment.role.name.lower()}"
                expected = left.pop(f"{stem}.{expert}.weight" if is_moe else f"{stem}.weight")
                assert segment.shape == expected.shape
                got = block.plain(segment, data).tobytes()
                assert got == expected.tobytes()
    assert not left


def quantised(values: np.ndarray) -> bytes:
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0).tobytes()


def test_q8_0_quantises_matrices_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "m.colibri"
    report = repack(hf_folder(tmp_path / "hf", "qwen2moe"), output, quant="q8_0")
    left = dict(canonical_state("qwen2moe"))

    with colibri_format.open(output) as file:
        for tensor in file.tensors.values():
            values = left.pop(tensor.name)
            is_matrix = any(part in tensor.name for part in MATRICES)
            is_gate = "ffn_gate_inp" in tensor.name
            should = is_matrix and not is_gate
            fits = values.shape[-1] % 32 == 0
            assert tensor.dtype.name == (("q8_0" if fits else "f16") if should else "f32")
            halves = values.astype(np.float16) if should else values
            expected = quantised(values) if should and fits else halves.tobytes()
            assert file.tensor(tensor.name).read_plain().tobytes() == expected, tensor.name
        # Experts of 44 neurons: gate and up have rows of 96, down has rows of 44.
        layout = file.layout(0)
        assert layout is not None
        assert [s.dtype.name for s in layout.segments] == ["q8_0", "q8_0", "f16"]
        block = file.expert(0, 3)
        data = block.read()
        gate, _, down = block.segments
        assert data[: gate.size].tobytes() == quantised(left["blk.0.ffn_gate.3.weight"])
        halves = left["blk.0.ffn_down.3.weight"].astype(np.float16)
        assert data[down.offset :].tobytes() == halves.tobytes()
    assert any("q8_0 became f16" in note and "ffn_down_exps" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_precision_quantises_as_its_float32_and_norms_become_float32(
    tmp_path: Path, kind: str
) -> None:
    state = random_state("llama")
    half: dict[str, Any] = {
        key: bf16(v) if kind == "bf16" else v.astype("<f2") for key, v in state.items()
    }
    output = tmp_path / "m.colibri"
    repack(
        write_folder(tmp_path / "hf", half, CONFIGS["llama"]), output, quant="q8_0", layout="plain"
    )

    def exact(key: str) -> np.ndarray:
        if kind == "f16":
            return state[key].astype("<f2").astype(np.float32)
        return (state[key].view(np.uint32) & 0xFFFF0000).view(np.float32)

    with colibri_format.open(output) as file:
        norm = file.tensor("output_norm.weight")
        assert norm.dtype.name == "f32"
        assert norm.read().tobytes() == exact("model.norm.weight").tobytes()
        up = file.expert(1, 0).layout.segment(Role.UP)
        assert up is not None
        data = file.expert(1, 0).read()[up.offset : up.offset + up.size]
        assert data.tobytes() == quantised(exact("model.layers.1.mlp.up_proj.weight"))


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        source = hf_folder(tmp_path / folder / "hf", "mixtral", n_shards=3)
        repack(source, tmp_path / folder / "m.colibri")

    a, b = ((tmp_path / f / "m.colibri").read_bytes() for f in ("a", "b"))
    assert a == b
    assert str(tmp_path).encode() not in a


def test_block_size_sets_the_alignment_and_padding_is_warned_of(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "mixtral")

    report = repack(folder, tmp_path / "m.colibri", alignment=65_536)

    with colibri_format.open(tmp_path / "m.colibri") as file:
        assert (file.index["offset"] % 65_536 == 0).all()
    assert report.facts.padding_share > 0.05
    # A block of 82,944 bytes is 1.27 times 64 KiB; 4 KiB wastes 1 %.
    assert "--block-size 4K gives 3.6%" in report.warnings[0]


def test_padding_that_no_block_size_cures_is_said_to_be_so(tmp_path: Path) -> None:
    report = repack(hf_folder(tmp_path / "hf", "qwen3moe"), tmp_path / "m.colibri")

    assert report.facts.padding_share > 0.05
    assert "smallest block size there is" in report.warnings[0]


def test_plan_tells_what_repack_does_and_writes_nothing(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "olmoe")

    planned = plan(folder, RepackOptions(alignment=8192))
    report = repack(folder, tmp_path / "m.colibri", alignment=8192)

    assert planned.file.file_size == (tmp_path / "m.colibri").stat().st_size
    assert planned.payload_bytes == report.payload_bytes
    assert planned.file.padding_share == pytest.approx(report.facts.padding_share)
    assert planned.file.index_bytes == report.facts.index_bytes
    assert planned.peak_memory_bytes < 400 * 2**20


def test_jobs_stand_in_the_order_of_the_file() -> None:
    planned = plan(DEMO)
    offsets = {t.name: t.offset for t in planned.file.tensors}
    offsets |= {f.name: f.offset for f in planned.file.files}

    at = [
        offsets[job.name]
        if hasattr(job, "name")
        else offsets[job.file.name]
        if hasattr(job, "file")
        else int(planned.file.index["offset"][job.layer, job.expert])
        for job in planned.jobs
    ]

    assert at == sorted(at)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    report = repack(
        DEMO, tmp_path / "m.colibri", progress=lambda done, total: seen.append((done, total))
    )

    assert seen[-1] == (report.payload_bytes, report.payload_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_notes_of_the_source_reach_the_report(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "llama", n_shards=2)
    (folder / "stray.safetensors").write_bytes(b"")

    report = repack(folder, tmp_path / "m.colibri")

    assert "stray.safetensors" in report.notes[0]


def test_quantised_input_is_not_quantised_again(tmp_path: Path) -> None:
    assert code_of(DEMO, tmp_path / "m.colibri", quant="q4_0") == "requantize"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_place(
    tmp_path: Path, bad: float
) -> None:
    state = random_state("llama")
    state["model.layers.1.mlp.up_proj.weight"][150, 7] = bad
    folder = write_folder(tmp_path / "hf", dict(state), CONFIGS["llama"])

    with pytest.raises(ColibriError, match=r"up_proj.weight'.*\[150, 7\]") as caught:
        repack(folder, tmp_path / "m.colibri", quant="q8_0")

    assert caught.value.code == "not-finite"
    assert leftovers(tmp_path) == []
    repack(folder, tmp_path / "m.colibri")


def test_values_beyond_a_scale_are_refused_with_the_tensor(tmp_path: Path) -> None:
    state = random_state("llama")
    state["lm_head.weight"][0, 0] = 1e7
    folder = write_folder(tmp_path / "hf", dict(state), CONFIGS["llama"])

    with pytest.raises(ColibriError, match=r"lm_head") as caught:
        repack(folder, tmp_path / "m.colibri", quant="q8_0")

    assert caught.value.code == "scale-overflow"


def test_experts_of_one_layer_in_different_types_are_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = dict(random_state("mixtral"))
    key = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    state[key] = state[key].astype("<f2")
    folder = write_folder(tmp_path / "hf", state, CONFIGS["mixtral"])

    assert code_of(folder, tmp_path / "m.colibri") == "mixed-layer"


@pytest.mark.parametrize("alignment", [0, 512, 5000, 2**22])
def test_block_sizes_that_cannot_be_are_refused(tmp_path: Path, alignment: int) -> None:
    assert code_of(DEMO, tmp_path / "m.colibri", alignment=alignment) == "bad-alignment"


def test_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    assert code_of(DEMO, tmp_path / "m.colibri", quant="q9") == "bad-quant"


@pytest.mark.parametrize("how", ["itself", "hard link", "symbolic link", "part"])
def test_output_is_never_an_input(tmp_path: Path, how: str) -> None:
    name = "in.colibri.part" if how == "part" else "in.colibri"
    source = gguf_model("llama").write(tmp_path / name)
    before = source.read_bytes()
    output = tmp_path / "in.colibri"
    if how == "hard link":
        output = tmp_path / "out.colibri"
        output.hardlink_to(source)
    elif how == "symbolic link":
        output = tmp_path / "out.colibri"
        output.symlink_to(source)

    assert code_of(source, output, overwrite=True) == "output-is-input"
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_output_is_no_file_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = hf_folder(tmp_path / "hf", "llama", n_shards=2)

    assert code_of(folder, folder / name, overwrite=True) == "output-is-input"


def test_existing_output_is_kept_unless_asked(tmp_path: Path) -> None:
    output = tmp_path / "m.colibri"
    output.write_bytes(b"precious")

    assert code_of(DEMO, output) == "file-exists"
    assert output.read_bytes() == b"precious"

    repack(DEMO, output, overwrite=True)
    with colibri_format.open(output) as file:
        assert file.verify() == []


def test_existing_output_survives_a_failure(tmp_path: Path) -> None:
    state = random_state("llama")
    state["model.norm.weight"][0] = np.nan
    folder = write_folder(tmp_path / "hf", dict(state), CONFIGS["llama"])
    output = tmp_path / "m.colibri"
    output.write_bytes(b"precious")

    assert code_of(folder, output, quant="q8_0", overwrite=True) == "not-finite"
    assert output.read_bytes() == b"precious"


def test_full_disk_is_found_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = namedtuple("space", ["f_bavail", "f_frsize"])(10, 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: space)

    with pytest.raises(ColibriError) as caught:
        repack(DEMO, tmp_path / "m.colibri")

    assert caught.value.code == "disk-full"
    assert getattr(caught.value, "errno", None) == errno.ENOSPC
    assert leftovers(tmp_path) == []


def test_folder_of_the_output_must_be_there(tmp_path: Path) -> None:
    assert code_of(DEMO, tmp_path / "no" / "m.colibri") == "file-not-found"


def test_source_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")

    def touch(done: int, total: int) -> None:
        os.utime(source, ns=(1, 1))

    assert code_of(source, tmp_path / "m.colibri", progress=touch) == "source-changed"
    assert not (tmp_path / "m.colibri").exists()


def test_source_that_is_cut_meanwhile_is_told(tmp_path: Path) -> None:
    source = gguf_model("llama").write(tmp_path / "in.gguf")

    opened = open_source(source)
    os.truncate(source, source.stat().st_size // 2)

    with pytest.raises(ColibriError, match=r"in\.gguf") as caught:
        repack(opened, tmp_path / "m.colibri")
    opened.close()
    assert caught.value.code == "short-read"
    assert not (tmp_path / "m.colibri").exists()


def test_failing_read_keeps_its_errno_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(DEMO)
    planned = plan(source)

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="hummingbird") as caught:
        convert(planned, source, tmp_path / "m.colibri")
    source.close()

    assert caught.value.errno == errno.EIO
    assert getattr(caught.value, "code", None) == "io-error"
    assert leftovers(tmp_path) == []


def test_tiles_of_any_size_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen3moe")
    repack(folder, tmp_path / "a.colibri", quant="q8_0")
    monkeypatch.setattr("colibri_repack.memory_plan._TILES", (4096,))
    monkeypatch.setattr("colibri_repack.memory_plan._WRITE_BUFFER", 4096)

    repack(folder, tmp_path / "b.colibri", quant="q8_0")
    repack(folder, tmp_path / "c.colibri", quant="q8_0", memory_bytes=72 * 2**20)

    assert (tmp_path / "a.colibri").read_bytes() == (tmp_path / "c.colibri").read_bytes()
    assert (tmp_path / "a.colibri").read_bytes() == (tmp_path / "b.colibri").read_bytes()


def test_more_shards_than_descriptors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colibri_repack.sources.files.MAX_OPEN", 2)
    repack(hf_folder(tmp_path / "a", "llama", n_shards=5), tmp_path / "a.colibri")
    repack(hf_folder(tmp_path / "b", "llama", n_shards=1), tmp_path / "b.colibri")

    with (
        colibri_format.open(tmp_path / "a.colibri") as a,
        colibri_format.open(tmp_path / "b.colibri") as b,
    ):
        assert (a.checksums == b.checksums).all()


def test_an_open_source_stays_open(tmp_path: Path) -> None:
    source = open_source(DEMO)

    repack(source, tmp_path / "m.colibri")

    assert isinstance(source, GgufSource)
    assert read_checkpoint(source).n_experts == 16
    source.close()


def test_k_quants_pass_through(tmp_path: Path) -> None:
    # A Q4_K and a Q6_K tensor of one row each: any bytes do, none is interpreted.
    rng = np.random.default_rng(1)
    name, hidden, width = "llama", 256, 256
    builder = g.GgufBuilder()
    config = {"hidden_size": hidden, "intermediate_size": width}
    from helpers.gguf_models import describe

    old = CONFIGS[name]
    CONFIGS["_k"] = old | config | {"num_hidden_layers": 1, "head_dim": 64,
                                    "num_attention_heads": 4}  # fmt: skip
    try:
        describe(builder, "_k")
    finally:
        del CONFIGS["_k"]
    q4_k, q6_k = (12, 144), (14, 210)
    sizes = {
        "token_embd": (203, q6_k), "output": (203, q6_k), "blk.0.attn_q": (256, q4_k),
        "blk.0.attn_k": (128, q4_k), "blk.0.attn_v": (128, q6_k), "blk.0.attn_output": (256, q4_k),
        "blk.0.ffn_gate": (256, q4_k), "blk.0.ffn_up": (256, q4_k), "blk.0.ffn_down": (256, q6_k),
    }  # fmt: skip
    data = {}
    for key, (rows, (kind, block)) in sizes.items():
        data[key] = rng.bytes(rows * block)
        builder.tensor(f"{key}.weight", (rows, 256), kind, data[key])
    for key in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        builder.tensor(f"{key}.weight", (256,), 0, bytes(1024))

    repack(builder.write(tmp_path / "m.gguf"), tmp_path / "m.colibri", layout="plain")

    with colibri_format.open(tmp_path / "m.colibri") as file:
        block = file.expert(0, 0)
        assert [s.dtype.name for s in block.segments] == ["q4_k", "q4_k", "q6_k"]
        payload = block.read().tobytes()
        assert payload == data["blk.0.ffn_gate"] + data["blk.0.ffn_up"] + data["blk.0.ffn_down"]
        assert file.tensor("blk.0.attn_v.weight").read_plain().tobytes() == data["blk.0.attn_v"]
