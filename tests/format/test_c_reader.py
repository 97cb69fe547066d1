"""The reader in C: warnings, hashes, agreement with the Python reader on every file, reads.

Programs are built with the address and undefined-behaviour sanitizers, which end them at a fault.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import colibri_format as cf
from colibri_format.header import Region, RegionExtent, encode_superblock, place_regions
from colibri_format.layout import NO_LAYOUT
from helpers.forge import Forge, code_of, fill, layout_of, sample_plan, write_sample

PACKAGE = Path(cf.get_include()).parents[2]
VECTORS = PACKAGE / "vectors"
DRIVER = Path(__file__).with_name("c_driver.c")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
CC = shutil.which(os.environ.get("CC", "cc"))
CXX = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler: set CC")


def compile_c(source: Path, output: Path, *flags: str, compiler: str | None = None) -> Path:
    """Builds `source`, which includes colibri.h, without a warning."""
    standard = "-std=c++17" if source.suffix == ".cc" else "-std=c11"
    command = [
        compiler or CC or "cc",
        standard,
        *WARNINGS,
        "-I",
        cf.get_include(),
        str(source),
        "-o",
        str(output),
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def run(program: Path, *arguments: object, stdin: str = "") -> list[Any]:
    """What the program prints, line by line, as JSON."""
    done = subprocess.run(
        [program, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    command = [CC or "cc", *SANITIZERS, str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("the C compiler has no sanitizers")
    return folder


@pytest.fixture(scope="module")
def driver(build: Path) -> Path:
    return compile_c(DRIVER, build / "driver", *SANITIZERS)


@pytest.fixture(scope="module")
def mutate(build: Path) -> Path:
    return compile_c(PACKAGE / "fuzz" / "mutate.c", build / "mutate", *SANITIZERS)


def open_in_c(driver: Path, paths: Sequence[Path], *folders: object) -> list[Any]:
    stdin = "".join(f"{path}\n" for path in paths)
    found = run(driver, "open", *folders, stdin=stdin)
    assert len(found) == len(paths)
    return found


def shape_facts(item: Any, dtypes: dict[str, int]) -> list[Any]:
    return [dtypes[item.dtype.name], item.row_interleave, list(item.shape), item.offset, item.size]


def facts(path: Path, volumes: Sequence[Path] | None = ()) -> dict[str, Any]:
    """What the driver prints of the file, by the Python reader."""
    try:
        with cf.open(path, volumes=volumes) as file:
            return reader_facts(file)
    except cf.FormatError as error:
        return {"code": error.code.upper().replace("-", "_"), "errno": 0}
    except cf.StorageError as error:
        return {"code": error.code, "errno": error.errno or 0}


def reader_facts(file: cf.Reader) -> dict[str, Any]:
    n_layers, n_experts = file.geometry.n_layers, file.geometry.n_experts
    numbers = {dtype.name: n for n, dtype in enumerate(file.tables.dtypes)}
    index = file.block_index
    present = np.argwhere(index.entries["size"] != 0)
    rows = np.zeros((len(present), 6), "<u8")
    for row, (layer, expert) in zip(rows, present.tolist(), strict=True):
        handle = file.expert(layer, expert)
        row[:] = (
            handle.offset,
            handle.size,
            cf.round_up(handle.size, file.geometry.alignment),
            handle.checksum,
            index.layouts[layer, expert],
            handle.volume,
        )
    found: dict[str, Any] = {
        "code": "OK",
        "uuid": file.uuid.hex,
        "file_size": file.file_size,
        "n_layers": n_layers,
        "n_experts": n_experts,
        "alignment": file.geometry.alignment,
        "features": [
            file.superblock.incompat,
            file.superblock.ro_compat,
            file.superblock.compat,
        ],
        "dtypes": [
            [d.name, -1 if d.ggml_id is None else d.ggml_id, d.block_elements, d.block_bytes]
            for d in file.tables.dtypes
        ],
        "layouts": [
            [x.block_size, [[int(s.role), *shape_facts(s, numbers)] for s in x.segments]]
            for x in file.layouts
        ],
        "layers": [
            -1 if n is None else n - 2**32 if n > NO_LAYOUT else n
            for n in file.tables.layer_layouts
        ],
        "packs": [list(file.tables.packs[n].item()) for n in range(n_layers + 1)],
        "tensors": [
            [t.name, -1 if t.layer is None else t.layer, *shape_facts(t, numbers), t.checksum]
            for t in file.tensors.values()
        ],
        "files": [[f.name, f.offset, f.size, f.checksum] for f in file.files.values()],
        "volumes": [
            [v.label, v.file_size, v.digest.hex(), v.data.offset, v.data.size] for v in file.volumes
        ],
        "n_present": len(present),
        "experts": cf.checksum(rows.tobytes()),
        "metadata": cf.checksum(
            file.read_region_copy(Region.METADATA, is_tail=False)
            or file.read_region_copy(Region.METADATA, is_tail=True)
            or b""
        ),
        "warnings": [plain_warning(warning) for warning in file.warnings],
    }
    if not file.volumes or file.volume_paths:
        found["damage"] = damages(file, present.tolist())
    return found


def plain_warning(text: str) -> str:
    """A warning without path and code, which the C reader gives apart."""
    before, opening, rest = text.partition(" (")
    text = before + rest.partition(")")[2] if opening else text
    for region in Region:
        text = text.replace(region.name.lower(), region.name.lower().replace("_", " "))
    return text


def damages(file: cf.Reader, present: Iterable[tuple[int, int]]) -> list[Any]:
    found = []

    def attempt(action: Callable[[], object], kind: str, a: int, b: int) -> None:
        try:
            action()
        except cf.FormatError as error:
            found.append([kind, a, b, error.code.upper().replace("-", "_")])

    for layer, expert in present:
        attempt(file.expert(layer, expert).read, "block", layer, expert)
    for n, name in enumerate(file.tensors):
        attempt(file.tensor(name).read, "tensor", n, 0)
    for n, name in enumerate(file.files):
        attempt(lambda name=name: file.read_file(name), "file", n, 0)
    return found


def assert_agreement(driver: Path, paths: Sequence[Path]) -> list[str]:
    """Both readers find the same in each file; the codes."""
    found = open_in_c(driver, paths)
    for path, fact in zip(paths, found, strict=True):
        assert fact == facts(path), path
    return [fact["code"] for fact in found]


def test_header_compiles_without_warnings(tmp_path: Path) -> None:
    compile_c(DRIVER, tmp_path / "driver", "-O2")  # what is inlined, and so warned of, differs


@pytest.mark.skipif(CXX is None, reason="no C++ compiler: set CXX")
def test_header_compiles_as_cpp(tmp_path: Path) -> None:
    source = tmp_path / "use.cc"
    source.write_text(
        "#define COLIBRI_API static\n#define COLIBRI_IMPLEMENTATION\n"
        '#include "colibri.h"\n'
        'int main() { colibri_file file; return colibri_open(&file, "/", nullptr) == '
        "COLIBRI_E_NOT_A_FILE ? 0 : 1; }\n"
    )

    program = compile_c(source, tmp_path / "use", "-O1", "-Wno-unused-function", compiler=CXX)

    assert run(program) == []


def test_header_serves_several_source_files(tmp_path: Path) -> None:
    one = tmp_path / "one.c"
    one.write_text('#define COLIBRI_IMPLEMENTATION\n#include "colibri.h"\n')
    two = tmp_path / "two.c"
    two.write_text(
        '#include <stdio.h>\n#include "colibri.h"\n'
        "int main(void) { puts(colibri_strerror(COLIBRI_E_BAD_MAGIC)); return 0; }\n"
    )

    program = compile_c(one, tmp_path / "both", str(two))

    assert subprocess.run([program], capture_output=True, check=True).stdout == b"BAD_MAGIC\n"


def test_codes_have_the_numbers_and_names_of_the_specification(driver: Path) -> None:
    found = {number: name for number, name in run(driver, "codes") if number < 200}

    assert found == {int(code): code.name for code in cf.FormatCode}


@pytest.mark.parametrize("is_portable", [False, True])
def test_hashes_are_those_of_xxhash(is_portable: bool, driver: Path, build: Path) -> None:
    program = driver
    if is_portable:
        program = compile_c(DRIVER, build / "portable", "-O3", "-DCOLIBRI_PORTABLE")
    data = np.random.default_rng(5).bytes(300_000)
    (build / "data").write_bytes(data)

    found = run(program, "hash", build / "data", 0, 2**64 - 1, 0xFFFF_FFFE_0000_0003)

    assert len(found) > 3 * 2048
    assert max(row[1] for row in found) > 250_000
    for seed, size, hash64, hash128 in found:
        assert hash64 == xxhash.xxh3_64_intdigest(data[:size], seed), (seed, size)
        assert hash128 == xxhash.xxh3_128_hexdigest(data[:size], seed), (seed, size)


def test_vectors_give_their_codes_and_both_readers_the_same_facts(driver: Path) -> None:
    manifest = json.loads((VECTORS / "manifest.json").read_text(encoding="ascii"))
    entries = [*manifest["valid"].values(), *manifest["invalid"].values()]

    codes = assert_agreement(driver, [VECTORS / entry["path"] for entry in entries])

    assert codes == [entry.get("code", "OK") for entry in entries]


def random_mutants(path: Path, folder: Path, n: int, seed: int) -> list[Path]:
    """Files with a few bytes changed, in regions with every checksum put right, or anywhere."""
    rng = np.random.default_rng(seed)
    data = path.read_bytes()
    regions = [r for r in Region if r != Region.DATA and Forge(data).superblock.region(r).length]
    made = []
    for number in range(n):
        forge = Forge(data)
        kind = rng.integers(10)
        if kind == 0:
            forge.data = forge.data[: int(rng.integers(len(data)))]
        elif kind < 3:
            for _ in range(int(rng.integers(1, 5))):
                forge.data[int(rng.integers(min(len(data), 40_000)))] ^= 1 << int(rng.integers(8))
        elif kind == 3:
            offset = int(rng.choice([8, 16, 24, 32, 56, 64, 68, 72, *range(128, 384, 8)]))
            forge.patch_superblock(offset, struct.pack("<I", int(rng.choice([0, 1, 2**31, 4096]))))
        else:
            region = regions[int(rng.integers(len(regions)))]
            width = int(rng.choice([1, 2, 4, 8]))
            length = len(forge.region(region))
            place = int(rng.integers(max(length // width, 1))) * width
            value = int(rng.choice([0, 1, 2, 255, 4096, 65535, 2**31, 2**62])) % 2 ** (8 * width)
            if place + width <= length:
                forge.patch_region(region, place, value.to_bytes(width, "little"))
        made.append(forge.write(folder / f"{path.stem}-{number}.colibri"))
    return made


def test_both_readers_agree_on_random_mutants(driver: Path, tmp_path: Path) -> None:
    write_sample(tmp_path / "sample.colibri")
    paths = [tmp_path / "sample.colibri", VECTORS / "valid/mixed.colibri"]

    mutants = [m for n, path in enumerate(paths) for m in random_mutants(path, tmp_path, 200, n)]
    codes = assert_agreement(driver, mutants)

    assert len(set(codes)) > 20


def test_mutants_neither_crash_the_reader_nor_divide_the_readers(
    driver: Path, mutate: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    corpus = sorted(path for path in VECTORS.glob("valid/**/*.colibri"))
    arguments = ["-n", "20000", "-s", "3", "-k", "67", "-o", kept, "-w", tmp_path / "work"]

    done = subprocess.run(
        [mutate, *map(str, arguments), *map(str, corpus)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("20000 executions")
    mutants = sorted(kept.glob("*/mutant.colibri"))
    assert len(mutants) > 250
    assert_agreement(driver, mutants)


def with_metadata(path: Path, text: bytes) -> Path:
    write_sample(path)
    return Forge(path.read_bytes()).set_region(Region.METADATA, text).write(path)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"a":1,"b":2}', "OK"),
        (b'{"a\\n":1,"a b":2}', "OK"),
        (b'{"a b":1,"a\\n":2}', "METADATA_NOT_CANONICAL"),
        (b'{"\\"":1,"\\\\":2}', "OK"),
        (b'{"\xed\x9f\xbf":1,"\xf0\x90\x80\x80":2,"\xef\xbf\xbf":3}', "METADATA_NOT_CANONICAL"),
        (b'{"\xef\xbf\xbf":3,"\xf0\x90\x80\x80":2}', "OK"),
        (b'{"":{},"\\u0000":[]}', "OK"),
        (b'{"\\u0000":[],"":{}}', "METADATA_NOT_CANONICAL"),
        (b'{"\\u001f":"\x7f"}', "OK"),
        (b'{"a":1,"a":1}', "METADATA_NOT_CANONICAL"),
        (b' {"a":1} ', "METADATA_NOT_CANONICAL"),
        (b'{"a":-0}', "METADATA_NOT_CANONICAL"),
        (b'{"a":-9007199254740991}', "OK"),
        (b'{"a":-9007199254740992}', "METADATA_INVALID"),
        (b'{"a":1}x', "METADATA_INVALID"),
        (b'{"a":1,}', "METADATA_INVALID"),
        (b'{"a":tru}', "METADATA_INVALID"),
        (b'{"a":"\\x"}', "METADATA_INVALID"),
        (b'{"a":"\\udc00"}', "METADATA_INVALID"),
        (b'{"a":"\\ud800\\u0041"}', "METADATA_INVALID"),
        (b'{"a":"\\u00"}', "METADATA_INVALID"),
        (b'{"a":"', "METADATA_INVALID"),
        (b"[]", "METADATA_INVALID"),
        (b"{}\0", "METADATA_INVALID"),
        (b"{\0}\0", "METADATA_INVALID"),
        (b'{"a":' + b"[" * 31 + b"]" * 31 + b"}", "OK"),
        (b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", "METADATA_INVALID"),
    ],
)
def test_both_readers_agree_on_metadata(
    text: bytes, code: str, driver: Path, tmp_path: Path
) -> None:
    assert assert_agreement(driver, [with_metadata(tmp_path / "a.colibri", text)]) == [code]


def test_invalid_metadata_is_invalid_in_a_member_that_stands_twice(
    driver: Path, tmp_path: Path
) -> None:
    path = with_metadata(tmp_path / "a.colibri", b'{"a":1.5,"a":1}')

    assert open_in_c(driver, [path])[0]["code"] == "METADATA_INVALID"
    assert code_of(lambda: cf.open(path)) == "metadata-invalid"


def test_tables_longer_than_any_counts_are_refused_without_being_read_into_memory(
    driver: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.colibri"
    write_sample(path)
    forge = Forge(path.read_bytes())
    block = forge.superblock
    grown = 2**29
    lengths = {r: block.region(r).length for r in Region} | {Region.TABLES: grown}
    zeros = xxhash.xxh3_64()
    for _ in range(grown // 2**20):
        zeros.update(bytes(2**20))
    write_sparse(path, forge, lengths, zeros.intdigest())

    (found,) = open_in_c(driver, [path])

    assert found["code"] == "TABLE_LENGTH"


def write_sparse(path: Path, forge: Forge, lengths: dict[Region, int], tables: int) -> None:
    """The file with other lengths of regions; all regions but the tables keep their bytes."""
    block = forge.superblock
    places, size = place_regions(lengths, block.geometry.alignment)
    regions = []
    with path.open("wb") as file:
        for region in Region:
            offset, copy_offset = places[region]
            checksum = block.region(region).checksum
            if region == Region.TABLES:
                checksum = tables
            elif region != Region.DATA and lengths[region]:
                for place in (offset, copy_offset):
                    file.seek(place)
                    file.write(forge.region(region))
            regions.append(RegionExtent(offset, copy_offset, lengths[region], checksum))
        page = encode_superblock(dataclasses.replace(block, file_size=size, regions=tuple(regions)))
        file.truncate(size)
        for place in (0, size - len(page)):
            file.seek(place)
            file.write(page)


def test_each_allocation_may_fail(driver: Path) -> None:
    for path in ("valid/base.colibri", "valid/striped/striped.colibri"):
        ((n_allocations, code),) = run(driver, "memory", VECTORS / path)

        assert code == "OK"
        assert n_allocations > 8


def test_failures_of_the_kernel_keep_their_errno(driver: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    found = open_in_c(driver, [tmp_path / "none", tmp_path, tmp_path / "pipe"])

    assert found == [
        {"code": "OS_ERROR", "errno": 2},
        {"code": "NOT_A_FILE", "errno": 0},
        {"code": "NOT_A_FILE", "errno": 0},
    ]


def test_reads_are_direct_where_buffer_and_disk_allow_and_say_how_they_went(
    driver: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.colibri"
    write_sample(path)

    found = {row[0]: row[1:] for row in run(driver, "read", path, 0, 1, "cut")}

    direct, asked, unaligned, refused = 1, 2, 3, 4
    if found["aligned"][1] == direct:
        assert found["aligned"] == ["OK", direct, 0]
        assert found["unaligned"] == ["OK", unaligned, 0]
        assert found["tight"] == ["OK", unaligned, 0]
    else:  # tmpfs and the like: the reason is told
        assert found["aligned"][:2] == ["OK", refused]
        assert found["aligned"][2] != 0
    assert found["buffered"][:2] == ["OK", asked]
    assert found["small"][0] == "BAD_BUFFER"
    assert found["checked"][0] == "BLOCK_CHECKSUM"
    assert found["absent"][0] == "NO_SUCH_EXPERT"
    assert found["cut"][0] == "SHORT_READ"


def test_faults_of_the_kernel_are_made_good_or_told(build: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    write_sample(path)
    program = compile_c(DRIVER.with_name("c_faults.c"), build / "faults", *SANITIZERS)

    with path.open("rb") as stdin:
        done = subprocess.run([program, path], stdin=stdin, capture_output=True, check=True)

    found = {row[0]: tuple(row[1:]) for row in map(json.loads, done.stdout.splitlines())}
    if found["none"][2] != 1:
        pytest.skip(f"{tmp_path} takes no direct reads")
    einval, eio = 22, 5
    assert found == {
        "none": ("OK", "OK", 1, 0, 0),
        "direct-open": ("OK", "OK", 4, einval, 0),
        "direct-probe": ("OK", "OK", 4, einval, 0),
        "direct-later": ("OK", "OK", 4, einval, 0),
        "direct-short": ("OK", "OK", 4, 0, 0),
        "short": ("OK", "OK", 1, 0, 0),
        "interrupted": ("OK", "OK", 1, 0, 0),
        "failed": ("OK", "OS_ERROR", 1, 0, eio),
        "cut": ("OK", "SHORT_READ", 1, 0, 0),
    }


@pytest.mark.parametrize("dtype", [n for n, d in cf.DTYPES.items() if d.units])
def test_interleaved_rows_come_back_plain(dtype: str, driver: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    kind = cf.DTYPES[dtype]
    shape = (32, 2 * kind.block_elements)
    layout = cf.Layout.of((cf.SegmentSpec(cf.Role.UP, kind, shape, 16),))
    data = np.random.default_rng(1).integers(0, 256, kind.size_bytes(shape), np.uint8)
    plan = cf.plan_layout(n_layers=1, n_experts=1, layer_layouts=[layout])
    with cf.Writer(path, plan) as writer:
        writer.write_block(0, 0, cf.interleave(data, kind, shape).tobytes())

    (found,) = run(driver, "plain", path, int(cf.Role.UP))

    assert bytes.fromhex(found) == data.tobytes()


@pytest.fixture
def striped(tmp_path: Path) -> Path:
    """A striped file in `tmp_path`, its volumes `fast` and `slow` in folders of these names."""
    folders = [tmp_path / "fast", tmp_path / "slow"]
    for folder in folders:
        folder.mkdir()
    path = tmp_path / "model.colibri"
    plan = sample_plan(volumes=["fast", "slow"])
    with cf.Writer(path, plan, volume_folders=folders) as writer:
        fill(writer)
    return path


def volume_file(path: Path, name: str) -> Path:
    (found,) = (path.parent / name).iterdir()
    return found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def patch_page(path: Path, offset: int, value: bytes, *, at_end: bool = True) -> None:
    """Other bytes in one or both pages of a volume, with checksums put right."""
    data = bytearray(path.read_bytes())
    for place in (0, len(data) - 4096) if at_end else (0,):
        page = data[place : place + 4096]
        page[offset : offset + len(value)] = value
        page[-8:] = struct.pack("<Q", cf.checksum(bytes(page[:-8])))
        data[place : place + 4096] = page
    path.write_bytes(data)


def copy_cut_short_before(path: Path) -> None:
    (path.parent / "a.colibri-volume").write_bytes(path.read_bytes()[:4096])


VOLUME_CASES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "sound": ("OK", lambda volume: None),
    "renamed": ("OK", lambda volume: volume.rename(volume.with_name("x.colibri-volume"))),
    "other suffix": ("VOLUME_MISSING", lambda volume: volume.rename(volume.with_name("x.bin"))),
    "gone": ("VOLUME_MISSING", Path.unlink),
    "cut": ("TRUNCATED", cut),
    "extended": ("TRAILING_BYTES", extend),
    "head damaged": ("OK", lambda volume: patch_raw(volume, 100)),
    "both damaged": (
        "VOLUME_MISSING",
        lambda volume: (patch_raw(volume, 9), patch_raw(volume, -9)),
    ),
    "other digest": ("VOLUME_MISMATCH", lambda volume: patch_page(volume, 24, b"\0" * 16)),
    "other digest in head": ("OK", lambda v: patch_page(v, 24, b"\0" * 16, at_end=False)),
    "other number": ("VOLUME_MISSING", lambda volume: patch_page(volume, 12, b"\7")),
    "other label": ("VOLUME_MISSING", lambda volume: patch_page(volume, 64, b"F")),
    "other alignment": ("VOLUME_MISMATCH", lambda volume: patch_page(volume, 56, b"\x0d")),
    "other extent": (
        "VOLUME_MISMATCH",
        lambda volume: (
            patch_page(volume, 16, struct.pack("<Q", 2**20))
            or patch_page(volume, 48, struct.pack("<Q", 2**20 - 8192))
        ),
    ),
    "extent wraps": (
        "VOLUME_MISSING",
        lambda volume: patch_page(volume, 40, struct.pack("<Q", 2**64 - 4096)),
    ),
    "huge extent": (
        "VOLUME_MISMATCH",
        lambda volume: (
            patch_page(volume, 16, struct.pack("<Q", 2**63 + 4096)),
            patch_page(volume, 40, struct.pack("<QQ", 2**63, 0)),
        ),
    ),
    "later minor": ("OK", lambda volume: patch_page(volume, 10, b"\7")),
    "other major": ("VOLUME_MISSING", lambda volume: patch_page(volume, 8, b"\2")),
    "bytes after label": ("VOLUME_MISSING", lambda volume: patch_page(volume, 80, b"x")),
    "label too long": ("VOLUME_MISSING", lambda v: patch_page(v, 60, struct.pack("<I", 2**32 - 1))),
    "reserved": ("VOLUME_MISSING", lambda volume: patch_page(volume, 4087, b"x")),
    "copy cut short before it": ("OK", copy_cut_short_before),
    "folder of that name": ("OK", lambda v: (v.parent / "a.colibri-volume").mkdir()),
}


def patch_raw(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", VOLUME_CASES)
def test_both_readers_agree_on_volumes(name: str, striped: Path, driver: Path) -> None:
    code, change = VOLUME_CASES[name]
    change(volume_file(striped, "fast"))
    folders = [striped.parent / "slow", striped.parent / "fast"]

    (found,) = open_in_c(driver, [striped], *folders)

    assert found == facts(striped, folders)
    assert found["code"] == code


def test_volumes_can_be_done_without(striped: Path, driver: Path) -> None:
    (found,) = open_in_c(driver, [striped], "--without-volumes")

    assert found == facts(striped, None)


def test_folder_that_cannot_be_listed_is_an_error_of_the_kernel(
    striped: Path, driver: Path
) -> None:
    (found,) = open_in_c(driver, [striped], striped.parent / "none")

    assert found == {"code": "OS_ERROR", "errno": 2}
    assert facts(striped, [striped.parent / "none"]) == {"code": "file-not-found", "errno": 2}


def test_pipe_among_the_volumes_is_passed_over(striped: Path, driver: Path) -> None:
    os.mkfifo(striped.parent / "fast" / "a.colibri-volume")
    folders = [striped.parent / "slow", striped.parent / "fast"]

    (found,) = open_in_c(driver, [striped], *folders)

    assert found == facts(striped, folders)
    assert found["code"] == "OK"


def engine_layer(x: np.ndarray, router: np.ndarray, experts: list[list[np.ndarray]]) -> np.ndarray:
    """`x` plus the two likeliest experts, weighted by their softmax probability; float64."""
    p = np.exp(router @ x)
    p /= p.sum()
    total = x.copy()
    for e in np.argsort(-p, kind="stable")[:2].tolist():
        gate, up, down = experts[e]
        a = gate @ x
        total += p[e] * (down @ (a / (1 + np.exp(-a)) * (up @ x)))
    return total


def test_example_engine_computes_what_numpy_does(build: Path, tmp_path: Path) -> None:
    source = PACKAGE / "examples" / "engine.c"
    assert len(source.read_text().splitlines()) < 100
    program = compile_c(source, build / "engine", "-O1", "-lm")
    n_layers, n_experts, hidden, width, n_tokens = 3, 5, 24, 40, 4
    rng = np.random.default_rng(7)
    routers = rng.standard_normal((n_layers, n_experts, hidden)).astype("<f4")
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    experts = [
        [[(rng.standard_normal(s) / math.sqrt(s[1])).astype("<f4") for s in shapes]
         for _ in range(n_experts)]
        for _ in range(n_layers)
    ]  # fmt: skip
    plan = cf.plan_layout(
        n_layers=n_layers,
        n_experts=n_experts,
        layer_layouts=[layout_of("f32", hidden, width)] * n_layers,
        tensors=[
            cf.TensorSpec(f"blk.{n}.ffn_gate_inp.weight", cf.DTYPES["f32"], (n_experts, hidden), n)
            for n in range(n_layers)
        ],
    )
    path = tmp_path / "a.colibri"
    with cf.Writer(path, plan) as writer:
        for layer in range(n_layers):
            writer.write_tensor(f"blk.{layer}.ffn_gate_inp.weight", routers[layer].tobytes())
            for expert in range(n_experts):
                payload = b"".join(m.tobytes() for m in experts[layer][expert])
                writer.write_block(layer, expert, payload)

    done = subprocess.run(
        [program, path, str(n_tokens)], capture_output=True, text=True, check=True
    )

    found = np.array([line.split() for line in done.stdout.splitlines()], np.float64)
    assert found.shape == (n_tokens, hidden)
    for token in range(n_tokens):
        x = (np.arange(hidden) * 7 + token * 13) % 11 / 11 - 0.5
        for layer in range(n_layers):
            x = engine_layer(x, routers[layer].astype(np.float64), experts[layer])
        # float32 sums of 40 products of order 1: the error is a few units of 2^-24 each.
        np.testing.assert_allclose(found[token], x, atol=2e-5)
    hits, misses = (int(word) for word in done.stderr.replace(",", "").split()[:4:2])
    assert hits + misses == 2 * n_layers * n_tokens
    assert hits > 0
