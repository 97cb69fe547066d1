"""A tokenizer rebuilt from a GGUF's key-values, kept in the embedded file `gguf.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from .decoder_errors import ModelError
from .pretokenizers import PATTERNS, WHOLE_WORDS, pre_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

# Kinds of tokens (llama.h, llama_token_type).
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPACE: Final = "\u2581"
# Real ones stay below 200 characters; cutting one at every place takes the square of its length.
_MAX_TOKEN: Final = 4096


def parse_gguf_keys(data: bytes, where: object) -> dict[str, Any]:
    """Key-values of `gguf.json`, by key.

    Raises:
        ModelError: `bad-tokenizer` when `data` is not such a file.
    """
    try:
        return {key: value for key, _kind, value in json.loads(data)["kv"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(
            "bad-tokenizer",
            where,
            f"gguf.json cannot be read ({error})",
            'an object with "kv": [[key, type, value], ...]',
            "repack the source again",
        ) from error


@contextmanager
def guarded(where: object, doing: str) -> Iterator[None]:
    """Turns whatever the tokenizers library raises into ModelError `bad-tokenizer`.

    Its panics derive from BaseException, and most of its errors are plain Exceptions.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ModelError):
        raise
    except BaseException as error:
        raise ModelError(
            "bad-tokenizer",
            where,
            f"{doing} failed ({str(error)[:200]})",
            "a tokenizer that the tokenizers library can work with",
            "repack the source again",
        ) from error


class GgufVocabulary:
    """The members of a GGUF that describe its tokenizer, checked for type and length.

    Raises:
        ModelError: `unsupported-tokenizer` naming the model or pre-tokenizer that is not known,
            `bad-tokenizer` naming the key that is missing or malformed.
    """

    def __init__(self, keys: dict[str, Any], where: object) -> None:
        self.where = where
        self._keys = keys
        self.kind = keys.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            self._refuse(f"tokenizer model {self.kind!r}", "gpt2 (byte-level BPE) or llama (SPM)")
        self.pre = keys.get("tokenizer.ggml.pre") or "default"
        if not isinstance(self.pre, str):
            self._malformed("pre", "is no text", "the name of a pre-tokenizer")
        if self.kind == "gpt2" and self.pre not in PATTERNS:
            self._refuse(f"pre-tokenizer {self.pre!r}", f"one of {', '.join(sorted(PATTERNS))}")
        self.tokens = self._list("tokens", str)
        if (longest := max(map(len, self.tokens), default=0)) > _MAX_TOKEN:
            self._malformed("tokens", f"has one of {longest} characters", f"at most {_MAX_TOKEN}")
        self.types = self._list("token_type", int, len(self.tokens))
        is_spm = self.kind == "llama"
        self.scores = self._list("scores", (int, float), len(self.tokens)) if is_spm else []
        self.merges = [] if is_spm else self._list("merges", str)
        starts_with_bos = is_spm or self.pre in WHOLE_WORDS
        self.add_bos = self._flag("add_bos_token", starts_with_bos)
        self.add_eos = self._flag("add_eos_token", False)
        self.add_space_prefix = self._flag("add_space_prefix", is_spm)
        self.bos = self._token("bos_token_id")
        self.eos = self._token("eos_token_id")
        self.unknown = self._token("unknown_token_id")

    def engine(self) -> Engine:
        """The tokenizer; `bad-tokenizer` when its parts do not fit each other."""
        self._check_coverage()
        with guarded(self.where, "making a tokenizer of vocabulary and merges"):
            made = self._byte_level() if self.kind == "gpt2" else self._sentence_piece()
            made.add_tokens(self._added(is_special=False))
            made.add_special_tokens(self._added(is_special=True))
        return made

    def _check_coverage(self) -> None:
        """Raises unless every text has tokens and every token one number: else text is lost."""
        known = set(self.tokens)
        if len(known) != len(self.tokens):
            twice = Counter(self.tokens).most_common(1)[0][0]
            self._malformed("tokens", f"holds {twice!r} twice", "each token once")
        if self.kind == "llama" and self.unknown is None:
            missing = {f"<0x{byte:02X}>" for byte in range(256)} - known
            if missing:
                self._malformed(
                    "tokens",
                    f"lacks {len(missing)} byte tokens, {min(missing)!r} among them",
                    "a token for each of the 256 bytes, or an unknown token",
                )

    def missing_bytes(self) -> frozenset[int]:
        """Bytes that a byte-level vocabulary has no token for: texts with one cannot be encoded.

        Real vocabularies lack those that UTF-8 never has, and some that training never met.
        """
        if self.kind != "gpt2":
            return frozenset()
        known = set(self.tokens)
        return frozenset(byte for byte, sign in enumerate(_byte_signs()) if sign not in known)

    def _byte_level(self) -> Engine:
        from tokenizers import Tokenizer, decoders, models

        # A merge is "left right"; left itself may start with a space-like character only in
        # its printable form, so the first blank after its first character parts them.
        merges = []
        for merge in self.merges:
            at = merge.find(" ", 1)
            merges.append((merge[:at], merge[at + 1 :]))
        ids = {token: number for number, token in enumerate(self.tokens)}
        made = Tokenizer(models.BPE(ids, merges, ignore_merges=self.pre in WHOLE_WORDS))
        made.pre_tokenizer = pre_tokenizer(self.pre)
        made.decoder = decoders.ByteLevel()
        return made

    def _sentence_piece(self) -> Engine:
        """SentencePiece's BPE: of all neighbours join those whose union scores highest.

        That is a BPE whose merges stand in order of the score of what they make (Kudo &
        Richardson 2018, arXiv 1808.06226; llama.cpp, llm_tokenizer_spm).
        """
        from tokenizers import Tokenizer, decoders, models, normalizers

        ids = {token: number for number, token in enumerate(self.tokens)}
        merges = spm_merges(self.tokens, self.scores, self.types)
        unknown = None if self.unknown is None else self.tokens[self.unknown]
        made = Tokenizer(
            models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        spaces = normalizers.Replace(" ", _SPACE)
        strip = []
        made.normalizer = spaces
        if self.add_space_prefix:
            made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
            strip.append(decoders.Strip(" ", 1, 0))
        made.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return made

    def _added(self, *, is_special: bool) -> list[Any]:
        from tokenizers import AddedToken

        kinds = (_CONTROL, _UNKNOWN) if is_special else (_USER_DEFINED,)
        return [
            AddedToken(token, special=is_special, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in kinds and token
        ]

    def _list(self, name: str, kind: Any, length: int | None = None) -> list[Any]:
        value = self._keys.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            self._malformed(name, "is missing or holds values of another type", "an array")
        if length is not None and len(value) != length:
            self._malformed(name, f"has {len(value)} entries", f"{length}, as many as tokens")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self._keys.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            self._malformed(name, f"is {value!r}", "true or false")
        return value

    def _token(self, name: str) -> int | None:
        value = self._keys.get(f"tokenizer.ggml.{name}")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            self._malformed(name, f"is {value!r}", f"a token, 0 to {len(self.tokens) - 1}")
        return value

    def _refuse(self, found: str, required: str) -> NoReturn:
        raise ModelError(
            "unsupported-tokenizer",
            self.where,
            f"has {found}",
            required,
            "repack from a folder with a tokenizer.json",
        )

    def _malformed(self, name: str, found: str, required: str) -> NoReturn:
        raise ModelError(
            "bad-tokenizer",
            self.where,
            f"key tokenizer.ggml.{name} {found}",
            required,
            "repack the source again",
        )


def _byte_signs() -> list[str]:
    """The printable character that stands for each byte (GPT-2's bytes_to_unicode).

    Printable ones of Latin-1 stand for themselves, the others for U+0100 on, in order.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


def spm_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Pairs of tokens whose union is a token, those of highest score first.

    Of equal scores the token of lower number comes first, of one token's partitions the one
    with the shorter left part, which keeps the order defined.
    """
    normal = {
        token: number
        for number, token in enumerate(tokens)
        if types[number] in (_NORMAL, _USER_DEFINED)
    }
    ranked = [
        (-scores[number], number, cut)
        for token, number in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    ranked.sort()
    return [(tokens[number][:cut], tokens[number][cut:]) for _, number, cut in ranked]
