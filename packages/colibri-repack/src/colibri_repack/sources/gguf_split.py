"""The parts of a split GGUF file as one header.

Written by llama.cpp's gguf-split: `NAME-00001-of-00003.gguf` and so on, counted from 1 in names
and from 0 in the key `split.no`; `split.tensors.count` is the number of tensors of all parts
together. Only the first part has the model's description.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import SourceError
from .files import InputFiles
from .gguf_header import GgufHeader, parse_gguf_header
from .tensor import SourceTensor

_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_NO: Final = "split.no"
_COUNT: Final = "split.count"
_TENSORS: Final = "split.tensors.count"
_AGAIN: Final = "the parts are of different models or damaged: fetch all of them again"


def split_count(header: GgufHeader) -> int:
    """Of how many parts the file of `header` is one; 1 where it is whole."""
    return _number(header, _COUNT) or 1


def join_parts(files: InputFiles, path: Path, header: GgufHeader) -> GgufHeader:
    """The header of the whole model of which `path`, with this `header`, is one part.

    Reads and checks the header of every part. Key-values are the first part's, without those that
    tell of the split.

    Raises:
        SourceError: `gguf-split` when names and keys of the parts disagree, `missing-shard`
            naming the first part that is not there, `duplicate-tensor`; and as
            `parse_gguf_header`, with the name of the part.
    """
    count = split_count(header)
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise SourceError(
            "gguf-split",
            path,
            f"is one of {count} parts by its {_COUNT}, not by its name",
            f"a name that ends in -00001-of-{count:05}.gguf, beside the other parts",
            "give the parts the names they were published under",
        )
    paths = [path.with_name(f"{match[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    for part in paths:
        if not part.is_file():
            raise SourceError("missing-shard", part, "is not there",
                              f"the model has {count} parts", "fetch the file")  # fmt: skip
    headers = [
        header if part == path else parse_gguf_header(files, part, files.add(part))
        for part in paths
    ]
    total = _number(headers[0], _TENSORS)
    tensors: dict[str, SourceTensor] = {}
    for number, (part, found) in enumerate(zip(paths, headers, strict=True)):
        for key, required in ((_NO, number), (_COUNT, count), (_TENSORS, total)):
            if (value := _number(found, key)) != required:
                raise SourceError("gguf-split", part, f"{key} is {value}", f"{required}", _AGAIN)
        for name, tensor in found.tensors.items():
            if name in tensors:
                raise SourceError("duplicate-tensor", f"{part}: tensor {name!r}",
                                  f"is also in {tensors[name].file.name}",
                                  "each tensor is in one part", _AGAIN)  # fmt: skip
            tensors[name] = tensor
    if total is not None and len(tensors) != total:
        raise SourceError("gguf-split", path, f"the parts have {len(tensors)} tensors",
                          f"{_TENSORS} says {total}", _AGAIN)  # fmt: skip
    return replace(
        headers[0],
        key_values=tuple(p for p in headers[0].key_values if not p.key.startswith("split.")),
        tensors=tensors,
        trailing_bytes=sum(found.trailing_bytes for found in headers),
    )


def _number(header: GgufHeader, key: str) -> int | None:
    """The whole number under `key`, None where there is none."""
    for pair in header.key_values:
        if pair.key == key:
            return pair.value if type(pair.value) is int else None
    return None
