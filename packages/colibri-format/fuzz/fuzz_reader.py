"""Coverage-guided fuzzing of the Python reader with atheris.

`python fuzz_reader.py [-runs=N] [-max_total_time=SECONDS]`; needs `pip install atheris`. An input
names a conformance vector and patches to its superblock, regions or bytes; checksums are put right
after patches of the first two kinds, so that the rules behind them are reached. A file must open,
or be refused with a code; whatever opens must verify and read without any other exception.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "vectors")]

with atheris.instrument_imports(include=["colibri_format"]):
    import colibri_format as cf
    from colibri_format.header import Region
    from colibri_format.layout import PAGE

from forge import Forge  # noqa: E402

VECTORS = sorted(
    path
    for path in (HERE.parent / "vectors/valid").glob("*.colibri")
    if path.stat().st_size < 2**18
)
FOLDER = Path(tempfile.mkdtemp(prefix="colibri-fuzz-"))
REGIONS = [Region.INDEX, Region.CHECKSUMS, Region.EXPERT_LAYOUTS, Region.TABLES, Region.METADATA]
INTERESTING = (0, 1, 2**12, 2**31, 2**32 - 1, 2**61, 2**62, 2**63, 2**64 - 4096, 2**64 - 1)


def patch(forge: Forge, data: atheris.FuzzedDataProvider) -> None:
    """One change of the file."""
    kind = data.ConsumeIntInRange(0, 3)
    value = data.ConsumeBytes(data.ConsumeIntInRange(1, 8))
    if data.ConsumeBool():
        value = struct.pack("<Q", data.PickValueInList(list(INTERESTING)))
    if kind == 0:
        forge.patch_superblock(data.ConsumeIntInRange(8, PAGE - 17), value)
    elif kind == 1:
        region = data.PickValueInList(REGIONS)
        length = forge.superblock.regions[region].length
        if length > len(value):
            forge.patch_region(region, data.ConsumeIntInRange(0, length - len(value)), value)
    elif kind == 2:
        region = Region.METADATA
        room = -(-forge.superblock.regions[region].length // PAGE) * PAGE
        text = data.ConsumeBytes(data.ConsumeIntInRange(2, min(room, 200)))
        if len(text) >= 2:
            forge.set_region(region, text)
    else:
        place = data.ConsumeIntInRange(0, len(forge.data) - len(value))
        forge.data[place : place + len(value)] = value


def use(path: Path) -> None:
    """Opens the file and reads everything in it."""
    with cf.open(path) as file:
        file.verify()
        for layer in range(min(file.geometry.n_layers, 4)):
            for expert in range(min(file.geometry.n_experts, 4)):
                if file.index["size"][layer, expert]:
                    handle = file.expert(layer, expert)
                    block = handle.read()
                    for segment in handle.segments:
                        handle.plain(segment, block)
        for name in file.tensors:
            file.tensor(name).read()
        for name in file.files:
            file.read_file(name)


def test_one(raw: bytes) -> None:
    data = atheris.FuzzedDataProvider(raw)
    forge = Forge(data.PickValueInList(VECTORS).read_bytes())
    try:
        for _ in range(data.ConsumeIntInRange(1, 4)):
            patch(forge, data)
    except (cf.ColibriError, struct.error):
        # The superblock is past repair by now: the file is tried as it is.
        pass
    path = forge.write(FOLDER / "case.colibri")
    try:
        use(path)
    except cf.ColibriError as error:
        if not error.code:
            raise


def main() -> None:
    atheris.Setup(sys.argv, test_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
