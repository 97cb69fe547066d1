"""A Hugging Face checkpoint: `config.json` beside one or more safetensors files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from colibri_format import StorageError

from ..errors import SourceError
from .embedded import EmbeddedFile
from .files import Fingerprint, InputFiles
from .gguf_source import check_range
from .json_object import MAX_JSON_BYTES, read_object
from .safetensors_header import parse_safetensors_header
from .safetensors_index import read_weight_map
from .tensor import SourceTensor

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
COMPANIONS: Final = (
    CONFIG,
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
# DeepSeek-V3's are called model-00001-of-000163.
_SHARD: Final = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors")


class SafetensorsSource:
    """The `Source` over a folder, or over one file of it.

    `path` is a folder with an index, with `model.safetensors`, with one lone safetensors file or
    with a whole numbered set of shards; or a safetensors file. Opening reads every shard's header,
    so that a missing, damaged or cut shard is found before anything is written.

    Raises:
        SourceError: as `parse_safetensors_header`; `safetensors-index`, `missing-shard`,
            `shard-lacks-tensor`, `duplicate-tensor`, `ambiguous-source`, `missing-config`,
            `bad-config`, `companion-size`.
        StorageError: a file cannot be read.
    """

    format: Final = "safetensors"

    def __init__(self, path: Path) -> None:
        self._files = InputFiles()
        self._path = path
        self._notes: list[str] = []
        folder = path if path.is_dir() else path.parent
        try:
            self._config = self._read_config(folder)
            self._tensors = self._read_tensors(path)
            self._embedded = self._find_companions(folder)
        except BaseException:
            self._files.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @property
    def inputs(self) -> tuple[Path, ...]:
        return self._files.paths

    @property
    def embedded(self) -> tuple[EmbeddedFile, ...]:
        return self._embedded

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        tensor = self._tensors[name]
        check_range(tensor, offset, len(buffer))
        self._files.read_into(tensor.file, tensor.offset + offset, buffer)

    @property
    def fingerprints(self) -> Mapping[Path, Fingerprint]:
        return self._files.fingerprints

    @property
    def io_mode(self) -> tuple[str, str]:
        return self._files.mode, self._files.reason

    def changed(self) -> tuple[Path, str] | None:
        return self._files.changed()

    def close(self) -> None:
        self._files.close()

    def _read_config(self, folder: Path) -> dict[str, Any]:
        path = folder / CONFIG
        if not path.is_file():
            raise SourceError(
                "missing-config",
                path,
                "is not there",
                "the model's description stands beside its safetensors files",
                "fetch config.json, and tokenizer.json, from where the model came from",
            )
        config = read_object(self._files, path, "bad-config")
        # Generation settings carry the tokens that end a text; the model's own are the fallback.
        generation = folder / GENERATION_CONFIG
        if _is_there(generation):
            config[GENERATION_CONFIG] = read_object(self._files, generation, "bad-config")
        return config

    def _read_tensors(self, path: Path) -> dict[str, SourceTensor]:
        if not path.is_dir():
            return parse_safetensors_header(self._files, path)
        found = sorted(p.name for p in path.glob("*.safetensors"))
        if _is_there(path / INDEX):
            weight_map = read_weight_map(self._files, path / INDEX)
            shards = list(dict.fromkeys(weight_map.values()))
            self._note_strays(sorted(set(found) - set(shards)))
            return self._merge(path, shards, "the index names it", weight_map)
        if SINGLE in found:
            self._note_strays([name for name in found if name != SINGLE])
            return parse_safetensors_header(self._files, path / SINGLE)
        return self._merge(path, self._shard_set(path, found), "its number is in the set")

    def _note_strays(self, names: list[str]) -> None:
        if names:
            self._notes.append(f"not part of the model, ignored: {', '.join(names)}")

    def _shard_set(self, path: Path, found: list[str]) -> list[str]:
        if len(found) == 1 and not _SHARD.fullmatch(found[0]):
            return found
        matches = [_SHARD.fullmatch(name) for name in found]
        sets = {(m[1], len(m[2]), m[3]) for m in matches if m}
        if len(sets) != 1 or not all(matches):
            listed = ", ".join(found[:8]) or "no safetensors file"
            raise SourceError(
                "ambiguous-source",
                path,
                f"has {listed} and no {INDEX}",
                f"{INDEX}, {SINGLE}, or one numbered set of shards",
                "fetch the index, or name one file",
            )
        stem, width, total = sets.pop()
        numbers = range(1, int(total) + 1)
        return [f"{stem}-{number:0{width}}-of-{total}.safetensors" for number in numbers]

    def _merge(
        self, folder: Path, shards: list[str], why: str, weight_map: dict[str, str] | None = None
    ) -> dict[str, SourceTensor]:
        """The tensors of all shards by name; `weight_map`, if any, must say just that."""
        for shard in shards:
            if not (folder / shard).is_file():
                raise SourceError("missing-shard", folder / shard, "is not there", why,
                                  "fetch the file")  # fmt: skip
        tensors: dict[str, SourceTensor] = {}
        n_listed = 0
        for shard in shards:
            found = parse_safetensors_header(self._files, folder / shard)
            if not tensors.keys().isdisjoint(found):
                name = next(name for name in found if name in tensors)
                raise SourceError(
                    "duplicate-tensor",
                    f"{folder / shard}: tensor {name!r}",
                    f"is also in {tensors[name].file.name}",
                    "each tensor is in one shard",
                    "fetch the model again into an empty folder",
                )
            tensors |= found
            if weight_map is not None:
                n_listed += list(map(weight_map.get, found)).count(shard)
        if weight_map is not None and not n_listed == len(tensors) == len(weight_map):
            self._refuse_index(folder, weight_map, tensors)
        return tensors

    def _refuse_index(
        self, folder: Path, weight_map: dict[str, str], tensors: dict[str, SourceTensor]
    ) -> NoReturn:
        shard_of = {name: tensor.file.name for name, tensor in tensors.items()}
        for name, shard in weight_map.items():
            if shard_of.get(name) != shard:
                raise SourceError(
                    "shard-lacks-tensor",
                    folder / shard,
                    f"has no tensor {name!r}",
                    f"{INDEX} says it has",
                    "index and shards are of different models: fetch both again",
                )
        extra = [name for name in shard_of if name not in weight_map]
        raise SourceError(
            "safetensors-index",
            folder / INDEX,
            f"does not list {len(extra)} tensors of its shards, {extra[0]!r} among them",
            "every tensor is listed",
            "index and shards are of different models: fetch both again",
        )

    def _find_companions(self, folder: Path) -> tuple[EmbeddedFile, ...]:
        embedded = []
        for name in COMPANIONS:
            path = folder / name
            if not _is_there(path):
                continue
            size = self._files.add(path)
            if size > MAX_JSON_BYTES:
                raise SourceError("companion-size", path, f"has {size} bytes",
                                  f"at most {MAX_JSON_BYTES}")  # fmt: skip
            embedded.append(EmbeddedFile(name, size, partial(_read_whole, self._files, path, size)))
        return tuple(embedded)


def _is_there(path: Path) -> bool:
    """Whether there is such a file.

    Raises:
        StorageError: `not-a-file` when the name leads nowhere, as links of a half-filled cache do,
            or to something else: the model would be other without it.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        found = "is a link to nothing" if not path.exists() else "is no regular file"
        raise StorageError("not-a-file", path, found, "a file, or no such name",
                           "fetch the model again, or remove it")  # fmt: skip
    return False


def _read_whole(files: InputFiles, path: Path, size: int) -> bytes:
    return bytes(files.read(path, 0, size))
