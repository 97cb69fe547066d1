"""Tokenizers: from tokenizer.json, rebuilt from GGUF keys, and text that comes in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from colibri_format import UsageError
from colibri_runtime.decoder_errors import ModelError
from colibri_runtime.gguf_tokenizer import _byte_signs, spm_merges
from colibri_runtime.pretokenizers import PATTERNS, pre_tokenizer
from colibri_runtime.tokenizer import Tokenizer, load_tokenizer


class Files:
    """A file that carries nothing but what a test embeds."""

    path = "x.colibri"

    def __init__(self, **files: bytes) -> None:
        self.files = {name.replace("_json", ".json"): data for name, data in files.items()}

    def read_file(self, name: str) -> bytes:
        return self.files[name]


def from_keys(keys: dict[str, Any]) -> Tokenizer:
    kv = [[f"tokenizer.ggml.{key}", "any", value] for key, value in keys.items()]
    data = json.dumps({"version": 3, "alignment": 32, "kv": kv}).encode()
    return load_tokenizer(Files(gguf_json=data))


def byte_keys(**changes: Any) -> dict[str, Any]:
    """A byte-level BPE of all 256 bytes, a few merges and special tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "<|end|>", "<tool>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    keys = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges,
        "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 2,
    }  # fmt: skip
    return {key: value for key, value in (keys | changes).items() if value is not None}


def spm_keys(**changes: Any) -> dict[str, Any]:
    """A SentencePiece BPE with byte fallback."""
    pieces = [
        ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        ("\u2581", -1000.0, 1), ("a", -1001.0, 1), ("b", -1002.0, 1), ("c", -1003.0, 1),
        ("ab", -2.0, 1), ("bc", -1.0, 1), ("\u2581a", -3.0, 1), ("abc", -4.0, 1),
    ]  # fmt: skip
    keys = {
        "model": "llama", "tokens": [p[0] for p in pieces], "scores": [p[1] for p in pieces],
        "token_type": [p[2] for p in pieces], "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0, "add_bos_token": True,
    }  # fmt: skip
    return {key: value for key, value in (keys | changes).items() if value is not None}


def texts(keys: dict[str, Any], tokens: list[int]) -> list[str]:
    return [keys["tokens"][token] for token in tokens]


def test_byte_level_merges_in_order_and_round_trips() -> None:
    keys = byte_keys()
    tokenizer = from_keys(keys)

    tokens = tokenizer.encode("hello hello wörld 🐦\n")

    assert texts(keys, tokens)[:2] == ["hello", "Ġhello"]
    assert tokenizer.decode(tokens) == "hello hello wörld 🐦\n"
    assert tokenizer.vocab_size == len(keys["tokens"])
    assert tokenizer.source == "gguf.json"


def test_special_and_user_defined_tokens_are_recognised_whole() -> None:
    keys = byte_keys()
    tokenizer = from_keys(keys)

    tokens = tokenizer.encode("he<|end|>he<tool>")

    assert texts(keys, tokens) == ["he", "<|end|>", "he", "<tool>"]
    assert tokenizer.decode(tokens) == "hehe<tool>"
    assert tokenizer.decode(tokens, skip_special=False) == "he<|end|>he<tool>"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", "Ġ123", "Ġx", "ĠĠ", "Ġy", "!!"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "Ġx", "ĠĠ", "Ġy", "!!"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "Ġx", "ĠĠ", "Ġy", "!!"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "Ġx", "ĠĠ", "Ġy", "!!"]),
        ("default", ["It", "'", "s", "Ġ", "123", "Ġx", "ĠĠ", "Ġy", "!!"]),
    ],
)
def test_words_are_cut_as_the_pre_tokenizer_says(pre: str, expected: list[str]) -> None:
    cut = pre_tokenizer(pre).pre_tokenize_str("It's 123 x   y!!")

    assert [word for word, _ in cut] == expected


@pytest.mark.parametrize("pre", PATTERNS)
def test_no_pre_tokenizer_loses_text(pre: str) -> None:
    text = "A tab\tand\r\n\r\n  lines, don't 12345 ÄÖ漢字 🐦 $+<=> \u00a0 end  "
    tokenizer = from_keys(byte_keys(pre=pre))

    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_bos_and_eos_are_added_as_the_flags_say() -> None:
    end = byte_keys()["bos_token_id"]

    assert from_keys(byte_keys()).encode("h") == [from_keys(byte_keys()).encode("h")[0]]
    assert from_keys(byte_keys(add_bos_token=True)).encode("h")[0] == end
    assert from_keys(byte_keys(add_eos_token=True)).encode("h")[-1] == end
    assert from_keys(byte_keys(add_bos_token=True)).encode("h", add_special=False)[0] != end
    assert from_keys(byte_keys(pre="llama-bpe")).encode("h")[0] == end


def test_a_missing_pre_tokenizer_is_the_default_one() -> None:
    text = "It's 1234"

    assert from_keys(byte_keys(pre=None)).encode(text) == from_keys(
        byte_keys(pre="default")
    ).encode(text)


def test_sentencepiece_joins_the_highest_score_first() -> None:
    keys = spm_keys()
    tokenizer = from_keys(keys)

    # First bc, the highest of all; then the space with a, which scores above a with bc.
    assert texts(keys, tokenizer.encode("abc")) == ["<s>", "\u2581a", "bc"]
    assert texts(keys, tokenizer.encode("babc")) == ["<s>", "\u2581", "b", "abc"]
    assert texts(keys, tokenizer.encode("ab a")) == ["<s>", "\u2581", "ab", "\u2581a"]


def test_sentencepiece_falls_back_to_bytes_and_round_trips() -> None:
    keys = spm_keys()
    tokenizer = from_keys(keys)

    tokens = tokenizer.encode("ab ö c")

    assert texts(keys, tokens)[4:6] == ["<0xC3>", "<0xB6>"]
    assert tokenizer.decode(tokens) == "ab ö c"


def test_sentencepiece_without_space_prefix() -> None:
    keys = spm_keys(add_space_prefix=False, add_bos_token=False)
    tokenizer = from_keys(keys)

    assert texts(keys, tokenizer.encode("abc")) == ["abc"]
    assert tokenizer.decode(tokenizer.encode(" abc")) == " abc"


def test_merges_of_scores_are_ordered_and_leave_out_bytes_and_controls() -> None:
    tokens = ["a", "b", "ab", "aba", "<s>", "a<s>"]

    merges = spm_merges(tokens, [0, 0, -1, -0.5, 0, 9], [1, 1, 1, 1, 3, 1])

    assert merges == [("ab", "a"), ("a", "b")]


def json_tokenizer() -> bytes:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models
    from tokenizers.pre_tokenizers import Whitespace

    engine = Engine(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    engine.pre_tokenizer = Whitespace()
    engine.enable_truncation(2)
    engine.enable_padding(length=9, pad_id=2, pad_token="?")
    return engine.to_str().encode()


def test_tokenizer_json_is_used_first_and_without_batch_settings() -> None:
    tokenizer = load_tokenizer(Files(tokenizer_json=json_tokenizer(), gguf_json=b"{}"))

    assert tokenizer.source == "tokenizer.json"
    assert tokenizer.encode("a b a b c") == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "missing-tokenizer"),
        ({"tokenizer_json": b"{}"}, "bad-tokenizer"),
        ({"gguf_json": b"{"}, "bad-tokenizer"),
        ({"gguf_json": b"[]"}, "bad-tokenizer"),
        ({"gguf_json": b'{"kv": [[1]]}'}, "bad-tokenizer"),
        ({"gguf_json": b'{"kv": []}'}, "unsupported-tokenizer"),
    ],
)
def test_files_without_a_readable_tokenizer_are_refused(files: dict[str, bytes], code: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(Files(**files))

    assert caught.value.code == code


@pytest.mark.parametrize(
    ("keys", "code", "named"),
    [
        (byte_keys(model="bert"), "unsupported-tokenizer", "bert"),
        (byte_keys(pre="tekken"), "unsupported-tokenizer", "tekken"),
        (byte_keys(tokens=None), "bad-tokenizer", "tokens"),
        (byte_keys(tokens=[1, 2]), "bad-tokenizer", "tokens"),
        (byte_keys(token_type=[1]), "bad-tokenizer", "token_type"),
        (byte_keys(merges=None), "bad-tokenizer", "merges"),
        (byte_keys(merges=["x nothere"]), "bad-tokenizer", "merges"),
        (byte_keys(bos_token_id=10**6), "bad-tokenizer", "bos_token_id"),
        (byte_keys(add_bos_token="yes"), "bad-tokenizer", "add_bos_token"),
        (byte_keys(add_bos_token=True, bos_token_id=None), "bad-tokenizer", "bos_token_id"),
        (byte_keys(add_eos_token=True, eos_token_id=None), "bad-tokenizer", "eos_token_id"),
        (spm_keys(scores=None), "bad-tokenizer", "scores"),
        (spm_keys(scores=[1.0]), "bad-tokenizer", "scores"),
    ],
)
def test_keys_that_make_no_tokenizer_are_refused(
    keys: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(ModelError) as caught:
        from_keys(keys)

    assert caught.value.code == code
    assert named in str(caught.value)


@pytest.mark.parametrize("keys", [byte_keys(), spm_keys(add_bos_token=False)])
@pytest.mark.parametrize("context", ["", "ab a"])
def test_streamed_pieces_join_to_the_whole_and_never_split_a_character(
    keys: dict[str, Any], context: str
) -> None:
    tokenizer = from_keys(keys)
    before = tokenizer.encode(context) if context else []
    text = "abc wö 漢字 🐦🐦 b"
    tokens = tokenizer.encode(text, add_special=False)
    stream = tokenizer.stream(before)

    pieces = [stream.push(token) for token in tokens] + [stream.finish()]

    whole = tokenizer.decode([*before, *tokens])
    assert "".join(pieces) == whole[len(tokenizer.decode(before)) :]
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_come_out_in_the_end() -> None:
    keys = byte_keys()
    tokenizer = from_keys(keys)
    broken = keys["tokens"].index("ð")
    stream = tokenizer.stream()

    pieces = [stream.push(broken) for _ in range(20)]

    assert any("\ufffd" in piece for piece in pieces)
    assert "\ufffd" in tokenizer.stream().push(broken) + _last(tokenizer, broken)


def _last(tokenizer: Tokenizer, token: int) -> str:
    stream = tokenizer.stream()
    stream.push(token)
    return stream.finish() + stream.finish()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda keys: keys["tokens"].__setitem__(0, "\u0120"), "twice"),
        (lambda keys: keys["tokens"].__setitem__(-1, "x" * 5000), "5000 characters"),
        (lambda keys: keys.update(pre=["gpt-2"]), "no text"),
    ],
)
def test_vocabulary_that_would_lose_text_is_refused(change: Any, told: str) -> None:
    keys = byte_keys()
    change(keys)

    with pytest.raises(ModelError) as caught:
        from_keys(keys)

    assert caught.value.code == "bad-tokenizer"
    assert told in str(caught.value)


def test_spm_without_bytes_needs_an_unknown_token() -> None:
    keys = spm_keys(unknown_token_id=None)
    keys["tokens"][10] = "zz"

    with pytest.raises(ModelError) as caught:
        from_keys(keys)

    assert caught.value.code == "bad-tokenizer"


@pytest.mark.parametrize(
    "record",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
         "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
         "normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)*$b"}, "content": "x"}},
    ],
)  # fmt: skip
def test_whatever_the_tokenizers_library_raises_is_one_error(record: dict[str, Any]) -> None:
    data = json.dumps({"version": "1.0", "added_tokens": [], **record}).encode()

    try:
        load_tokenizer(Files(tokenizer_json=data)).encode("b" + "a" * 40)
    except ModelError as error:
        assert error.code == "bad-tokenizer"


def test_text_of_bytes_that_the_vocabulary_lacks_is_refused_and_other_text_is_not() -> None:
    keys = byte_keys()
    place = keys["tokens"].index("\u00c3")  # stands for byte 0xC3, the first of an e with an accent
    keys["tokens"][place] = "zz"
    tokenizer = from_keys(keys)

    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    with pytest.raises(UsageError) as caught:
        tokenizer.encode("h\u00e9llo")
    assert caught.value.code == "bad-prompt"
    assert "0xc3" in str(caught.value)


def test_bytes_stand_for_the_characters_that_the_library_gives_them() -> None:
    assert set(_byte_signs()) == set(ByteLevel.alphabet())
    signs = _byte_signs()
    text = "A z\n\u00e9"
    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert "".join(signs[byte] for byte in text.encode()) == "".join(part for part, _ in split)
