"""Text to tokens and back, by the tokenizer a file carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from colibri_format import UsageError

from .decoder_errors import ModelError
from .gguf_tokenizer import GgufVocabulary, guarded, parse_gguf_keys

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

TOKENIZER_FILE: Final = "tokenizer.json"
GGUF_FILE: Final = "gguf.json"
_UNFINISHED: Final = "\ufffd"
# Tokens before the first new one that decoders need to see to place spaces right.
_CONTEXT: Final = 6
# No character is longer than four bytes, so more pending tokens than this are no part of one.
_MAX_PENDING: Final = 8


class FileSource(Protocol):
    """The part of `colibri_format`'s reader that a tokenizer needs."""

    @property
    def path(self) -> object: ...
    @property
    def files(self) -> Mapping[str, object]: ...
    def read_file(self, name: str) -> bytes: ...


class Tokenizer:
    """Encodes and decodes; special tokens written out in a text are recognised.

    `source` is the embedded file it was made of.
    """

    def __init__(
        self,
        engine: Engine,
        source: str,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        *,
        where: object = "tokenizer",
        missing_bytes: frozenset[int] = frozenset(),
    ) -> None:
        self._engine = engine
        self.source = source
        self._where = where
        self._missing_bytes = missing_bytes
        self._prefix = list(prefix)
        self._suffix = list(suffix)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._engine.get_vocab_size()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Tokens of `text`; with `add_special` bos and eos where this tokenizer sets them.

        Raises:
            UsageError: `bad-prompt` when the vocabulary has no token for a byte of `text`.
            ModelError: `bad-tokenizer` when the tokenizer fails.
        """
        if self._missing_bytes and (lost := self._missing_bytes.intersection(text.encode())):
            raise UsageError(
                "bad-prompt",
                self._where,
                f"the text has byte 0x{min(lost):02x} in UTF-8, which the vocabulary lacks",
                "bytes that the vocabulary has tokens for",
            )
        with guarded(self._where, f"encoding with {self.source}"):
            ids = list(self._engine.encode(text, add_special_tokens=add_special).ids)
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of `tokens`; bytes that are no UTF-8 come as U+FFFD."""
        with guarded(self._where, f"decoding with {self.source}"):
            return self._engine.decode(list(tokens), skip_special_tokens=skip_special)

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        """A decoder of tokens that come one at a time after those of `context`."""
        return TextStream(self, context)


class TextStream:
    """Text of tokens as they come, never a part of a character.

    The pieces joined, `finish` included, are the text that decoding context and tokens at once
    gives after the context's own.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = list(context[-_CONTEXT:])
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """What `token` completes: empty while a character lacks bytes."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_UNFINISHED) and len(self._pending) < _MAX_PENDING:
            return ""
        self._shown = self._pending[-_CONTEXT:]
        self._pending = []
        return text

    def finish(self) -> str:
        """What is left: bytes of a character that was never completed, as U+FFFD."""
        text = self._text() if self._pending else ""
        self._pending = []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._pending])[len(before) :]


def load_tokenizer(file: FileSource) -> Tokenizer:
    """The tokenizer of `tokenizer.json` where `file` has one, else of its GGUF's key-values.

    Raises:
        ModelError: `missing-tokenizer`, `unsupported-tokenizer`, `bad-tokenizer`.
    """
    if TOKENIZER_FILE in file.files:
        return _from_json(file.read_file(TOKENIZER_FILE), file.path)
    if GGUF_FILE in file.files:
        keys = parse_gguf_keys(file.read_file(GGUF_FILE), file.path)
        vocabulary = GgufVocabulary(keys, file.path)
        engine = vocabulary.engine()
        prefix = _required(vocabulary, "bos") if vocabulary.add_bos else []
        suffix = _required(vocabulary, "eos") if vocabulary.add_eos else []
        return Tokenizer(
            engine,
            GGUF_FILE,
            prefix,
            suffix,
            where=file.path,
            missing_bytes=vocabulary.missing_bytes(),
        )
    raise ModelError(
        "missing-tokenizer",
        file.path,
        f"has neither {TOKENIZER_FILE} nor {GGUF_FILE}",
        "one of them: text cannot be turned to tokens without",
        "repack from a folder with a tokenizer.json, or from a GGUF",
    )


def _required(vocabulary: GgufVocabulary, name: str) -> list[int]:
    token = vocabulary.bos if name == "bos" else vocabulary.eos
    if token is None:
        raise ModelError(
            "bad-tokenizer",
            vocabulary.where,
            f"tokenizer.ggml.add_{name}_token is true and there is no {name}_token_id",
            "the token to add",
            "repack the source again",
        )
    return [token]


def _from_json(data: bytes, where: object) -> Tokenizer:
    from tokenizers import Tokenizer as Engine

    with guarded(where, f"reading {TOKENIZER_FILE}"):
        engine = Engine.from_buffer(data)
    # What a trainer set for its batches has no place in a prompt.
    engine.no_truncation()
    engine.no_padding()
    return Tokenizer(engine, TOKENIZER_FILE, where=where)
