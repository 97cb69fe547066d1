"""A tokenizer of Hugging Face as the key-values that llama.cpp reads.

Only what llama.cpp turns to the same tokens is written: byte-level BPE whose way to cut words
llama.cpp knows by name, and SentencePiece's BPE, whose scores stand in the order of the merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from colibri_format import ModelSpec, Reader

from ..errors import ExportError
from ..sources.gguf_header import KeyValue

_FILE: Final = "tokenizer.json"
_SPACE: Final = "\u2581"
# llama.h, llama_token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_QWEN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How words are cut -> llama.cpp's name of it (src/llama-vocab.cpp, llm_tokenizer_bpe); expressions
# as published tokenizers have them. Digits cut one by one stand as "digits", GPT-2's own way as "".
_CUTS: Final = {
    ("",): "gpt-2",
    ("digits", ""): "smollm",
    (_QWEN % r"\p{N}",): "qwen2",
    (_QWEN % r"\p{N}{1,3}",): "llama-bpe",
}


def vocabulary_keys(reader: Reader, model: ModelSpec) -> tuple[list[KeyValue], tuple[str, ...]]:
    """The keys `tokenizer.*` of the open file's tokenizer, and notes.

    A file without one gets none but `no_vocab`: llama.cpp then takes token numbers alone.

    Raises:
        ExportError: `unsupported-tokenizer`, naming what llama.cpp would read otherwise.
        FormatError: `file-checksum`.
    """
    if _FILE not in reader.files:
        note = f"the file has no {_FILE}: the GGUF has no vocabulary, llama.cpp takes numbers alone"
        return [KeyValue("tokenizer.ggml.model", "str", "no_vocab")], (note,)
    where = f"{reader.path}: {_FILE}"
    try:
        record: Any = json.loads(reader.read_file(_FILE))
        keys = list(_Vocabulary(record, where, model).keys())
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        if isinstance(error, ExportError):
            raise
        raise _error(where, f"is malformed ({error!r:.80})", "a tokenizer.json") from error
    template = _chat_template(reader)
    if template is not None:
        keys.append(KeyValue("tokenizer.chat_template", "str", template))
    return keys, ()


class _Vocabulary:
    def __init__(self, record: Any, where: str, model: ModelSpec) -> None:
        self.record = record
        self.where = where
        self.model = model
        self.bpe = record["model"]
        if self.bpe.get("type", "BPE") != "BPE":
            raise _error(where, f"is a {self.bpe['type']} model", "BPE")
        self.merges = [
            tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1))
            for merge in self.bpe["merges"]
        ]
        self.is_spm = bool(self.bpe.get("byte_fallback"))
        self.special: dict[str, bool] = {}
        ids = dict(self.bpe["vocab"])
        for added in record.get("added_tokens") or []:
            ids[added["content"]] = added["id"]
            self.special[added["content"]] = bool(added["special"])
        self.tokens = self._in_order(ids)

    def _in_order(self, ids: dict[str, int]) -> list[str]:
        n_rows = self.model.vocab_size
        tokens: list[str | None] = [None] * n_rows
        for token, number in ids.items():
            if not (type(number) is int and 0 <= number < n_rows) or tokens[number] is not None:
                raise _error(
                    self.where,
                    f"gives {token!r} the number {number!r}",
                    f"a number of its own below {n_rows}, the embedding's rows",
                )
            tokens[number] = token
        # Embeddings have more rows than there are tokens, rounded up.
        return [f"[PAD{n}]" if token is None else token for n, token in enumerate(tokens)]

    def keys(self) -> Iterator[KeyValue]:
        unknown = self.bpe.get("unk_token")
        numbers = {token: n for n, token in enumerate(self.tokens)}
        yield _key("model", "str", "llama" if self.is_spm else "gpt2")
        if self.is_spm:
            yield _key("pre", "str", "default")
            yield _key("add_space_prefix", "bool", self._adds_space())
        else:
            yield _key("pre", "str", self._pre())
        yield _key("tokens", "arr:str", self.tokens)
        yield _key("token_type", "arr:i32", [self._type(t, unknown) for t in self.tokens])
        if self.is_spm:
            yield _key("scores", "arr:f32", self._scores())
        else:
            if any(" " in part for merge in self.merges for part in merge):
                raise _error(self.where, "merges parts with spaces", "byte-level BPE")
            yield _key("merges", "arr:str", [" ".join(merge) for merge in self.merges])
        if unknown is not None and unknown in numbers:
            yield _key("unknown_token_id", "u32", numbers[unknown])
        if self.model.bos_token is not None:
            yield _key("bos_token_id", "u32", self.model.bos_token)
        for name, number in zip(("eos", "eot", "eom"), self.model.eos_tokens, strict=False):
            yield _key(f"{name}_token_id", "u32", number)
        first, last = self._template()
        eos = self.model.eos_tokens[0] if self.model.eos_tokens else None
        ends = (("bos", first, self.model.bos_token), ("eos", last, eos))
        for name, found, token in ends:
            if found and [numbers.get(t) for t in found] != [token]:
                raise _error(self.where, f"puts {found} at an end of each text", "bos and eos")
            yield _key(f"add_{name}_token", "bool", bool(found))

    def _type(self, token: str, unknown: str | None) -> int:
        if token == unknown:
            return _UNKNOWN
        if token in self.special:
            return _CONTROL if self.special[token] else _USER_DEFINED
        if self.is_spm and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return _BYTE
        is_padding = token.startswith("[PAD") and token not in self.bpe["vocab"]
        return _UNUSED if is_padding else _NORMAL

    def _scores(self) -> list[float]:
        """Minus the place of the first merge that makes a token, so that both orders agree.

        SentencePiece joins the neighbours whose union scores highest; a list of merges is the
        same where all merges to one token follow each other.
        """
        place: dict[str, int] = {}
        last = ""
        for n, merge in enumerate(self.merges):
            made = "".join(merge)
            if made != last and made in place:
                raise _error(self.where, f"makes {made!r} by merges of different rank",
                             "one rank a token, as SentencePiece's scores give")  # fmt: skip
            place.setdefault(made, n)
            last = made
        return [-float(place.get(token, len(self.merges))) for token in self.tokens]

    def _adds_space(self) -> bool:
        found = [*_flat(self.record.get("normalizer"), "normalizers"),
                 *_flat(self.record.get("pre_tokenizer"), "pretokenizers")]  # fmt: skip
        adds = False
        for step in found:
            if step["type"] == "Prepend" and step["prepend"] == _SPACE:
                adds = True
            elif step["type"] == "Metaspace" and step["replacement"] == _SPACE:
                adds = step.get("prepend_scheme", "always") != "never"
                if step.get("split", True) and step.get("add_prefix_space") is False:
                    adds = False
            elif not (
                step["type"] == "Replace"
                and (step["pattern"], step["content"]) == ({"String": " "}, _SPACE)
            ):
                raise self._unknown_step(step)
        return adds

    def _pre(self) -> str:
        if (normalizer := self.record.get("normalizer")) not in (None, {"type": "NFC"}):
            raise self._unknown_step(normalizer)
        cuts = []
        for step in _flat(self.record.get("pre_tokenizer"), "pretokenizers"):
            if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
                cuts.append(step["pattern"]["Regex"])
            elif step["type"] == "Digits" and step["individual_digits"]:
                cuts.append("digits")
            elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
                cuts += [""] if step.get("use_regex", True) else []
            else:
                raise self._unknown_step(step)
        name = _CUTS.get(tuple(cuts))
        if name is None:
            raise _error(
                self.where,
                f"cuts words by {str(cuts)[:120]}",
                f"one of the ways that llama.cpp calls {', '.join(_CUTS.values())}",
            )
        if bool(self.bpe.get("ignore_merges")) != (name == "llama-bpe"):
            raise _error(self.where, f"ignore_merges is {self.bpe.get('ignore_merges')}",
                         f"what llama.cpp does for {name}")  # fmt: skip
        return name

    def _template(self) -> tuple[list[str], list[str]]:
        """What stands before and behind every text."""
        for step in _flat(self.record.get("post_processor"), "processors"):
            if step["type"] == "TemplateProcessing":
                before: list[str] = []
                behind: list[str] = []
                side = before
                for item in step["single"]:
                    if "Sequence" in item:
                        side = behind
                    else:
                        side.append(item["SpecialToken"]["id"])
                return before, behind
            if step["type"] != "ByteLevel":
                raise self._unknown_step(step)
        return [], []

    def _unknown_step(self, step: Any) -> ExportError:
        return _error(self.where, f"has a step {str(step)[:80]}", "steps that llama.cpp takes")


def _flat(step: Any, member: str) -> list[Any]:
    """The steps of a sequence, of one step alone, or none."""
    if step is None:
        return []
    return list(step[member]) if step["type"] == "Sequence" else [step]


def _key(name: str, kind: str, value: Any) -> KeyValue:
    return KeyValue(f"tokenizer.ggml.{name}", kind, value)


def _chat_template(reader: Reader) -> str | None:
    if "chat_template.jinja" in reader.files:
        return reader.read_file("chat_template.jinja").decode("utf-8", "replace")
    if "tokenizer_config.json" not in reader.files:
        return None
    try:
        found = json.loads(reader.read_file("tokenizer_config.json"))["chat_template"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _error(where: str, found: str, required: str) -> ExportError:
    return ExportError("unsupported-tokenizer", where, found, required,
                       "convert the checkpoint with llama.cpp")  # fmt: skip
