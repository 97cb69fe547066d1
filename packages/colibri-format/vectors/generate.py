"""Writes the conformance vectors: `valid/`, `invalid/` and `manifest.json` beside this file.

`python packages/colibri-format/vectors/generate.py [FOLDER]`; the same bytes each time. Vectors of
a released version never change: a new rule gets a new file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import colibri_format as cf
from forge import Forge
from invalid import MIXED, RULES, STRIPED, WHOLE_FILES
from valid import write_valid


def facts(path: Path) -> dict[str, Any]:
    """What every reader must find in a valid file."""
    with cf.open(path) as file:
        index = file.block_index
        content, plain = hashlib.sha256(), hashlib.sha256()
        for layer, expert in np.argwhere(index.entries["size"] != 0).tolist():
            handle = file.expert(layer, expert)
            block = np.frombuffer(file.read_at(handle.offset, handle.size, handle.volume), np.uint8)
            content.update(block)
            for segment in handle.segments:
                plain.update(handle.plain(segment, block))
        for tensor in file.tensors.values():
            content.update(file.read_at(tensor.offset, tensor.size))
        for entry in file.files.values():
            content.update(file.read_at(entry.offset, entry.size))
        return {
            "alignment": file.geometry.alignment,
            "content_sha256": content.hexdigest(),
            "plain_sha256": plain.hexdigest(),
            "damage": [
                [d.code.upper().replace("-", "_"), d.volume, d.offset] for d in file.verify()
            ],
            "expert_layouts": [
                [None if n == 0xFFFF else n for n in row] for row in index.layouts.tolist()
            ][:5]
            if index.layouts.size <= 100
            else None,
            "files": {e.name: e.size for e in file.files.values()},
            "incompat": file.superblock.incompat,
            "layouts": [
                {
                    "block_size": layout.block_size,
                    "segments": [
                        [
                            int(s.role),
                            s.dtype.name,
                            list(s.shape),
                            s.row_interleave,
                            s.offset,
                            s.size,
                        ]
                        for s in layout.segments
                    ],
                }
                for layout in file.layouts
            ],
            "metadata": file.metadata,
            "n_blocks": int(np.count_nonzero(index.entries["size"])),
            "n_experts": file.geometry.n_experts,
            "n_layers": file.geometry.n_layers,
            "tensors": {
                t.name: [t.dtype.name, list(t.shape), t.layer, t.row_interleave, t.size]
                for t in file.tensors.values()
            },
            "uuid": str(file.uuid),
            "volumes": {v.label: v.file_size for v in file.volumes},
            "n_warnings": len(file.warnings),
        }


def write_invalid(folder: Path, valid: Path) -> dict[str, dict[str, str]]:
    """Writes every invalid file; for each its path and the code that a reader must refuse with."""
    entries = {}
    for cases, source in (
        (RULES, valid / "base.colibri"),
        (WHOLE_FILES, valid / "base.colibri"),
        (MIXED, valid / "mixed.colibri"),
        (STRIPED, valid / "striped" / "striped.colibri"),
    ):
        base = source.read_bytes()
        for name, (code, change) in cases.items():
            if name in entries:
                raise ValueError(f"two vectors are called {name}")
            forge = Forge(base)
            change(forge)
            forge.write(folder / f"{name}.colibri")
            entries[name] = {
                "path": f"invalid/{name}.colibri",
                "code": code.upper().replace("-", "_"),
            }
    for name, code, change_volume in (
        ("volume_truncated", "TRUNCATED", lambda data: data[:-1]),
        ("volume_extended", "TRAILING_BYTES", lambda data: data + b"\0"),
        ("volume_swapped", "VOLUME_MISMATCH", None),
    ):
        target = folder / name
        shutil.copytree(valid / "striped", target)
        (target / "striped.colibri").rename(target / f"{name}.colibri")
        volume = target / "striped.fast.colibri-volume"
        if change_volume is not None:
            volume.write_bytes(change_volume(volume.read_bytes()))
        else:
            volume.write_bytes(impostor(volume.read_bytes()))
        entries[name] = {"path": f"invalid/{name}/{name}.colibri", "code": code}
    return entries


def impostor(data: bytes) -> bytes:
    """The volume with another digest in both of its pages."""
    page = bytearray(data[:4096])
    page[24] ^= 0xFF
    page[-8:] = cf.checksum(bytes(page[:-8])).to_bytes(8, "little")
    return bytes(page) + data[4096:-4096] + bytes(page)


def main(argv: list[str]) -> int:
    """Replaces the vectors in the folder that is named, or beside this file."""
    folder = Path(argv[0]) if argv else Path(__file__).parent
    for name in ("valid", "invalid"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    valid = {
        name: {"path": str(path.relative_to(folder)), "facts": facts(path)}
        for name, path in write_valid(folder / "valid")
    }
    manifest = {
        "format": "colibri-vectors-1",
        "valid": valid,
        "invalid": write_invalid(folder / "invalid", folder / "valid"),
    }
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=True)
    (folder / "manifest.json").write_text(text + "\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
