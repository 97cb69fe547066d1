"""Small tokenizers as `tokenizer.json` has them."""

from __future__ import annotations

import json
from typing import Any

QWEN2_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"


def byte_signs() -> list[str]:
    """The printable character that stands for each byte (GPT-2's bytes_to_unicode)."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


def byte_level(n_tokens: int = 203, pattern: str | None = QWEN2_CUT, **members: Any) -> bytes:
    """Byte-level BPE of the printable ASCII bytes and a few merges, two special tokens in front."""
    signs = byte_signs()
    tokens = ["<pad>", "<s>", "</s>", *(signs[b] for b in (9, 10, 13, *range(32, 127)))]
    merges = [(signs[32], "t"), ("h", "e"), (signs[32] + "t", "he"), ("i", "n")]
    tokens += [a + b for a, b in merges]
    cut: list[dict[str, Any]] = []
    if pattern is not None:
        cut = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                "invert": False}]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    record: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for n, token in enumerate(tokens[:3])
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*cut, level | {"use_regex": pattern is None}],
        },
        "post_processor": level | {"use_regex": False},
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: n for n, token in enumerate(tokens[:n_tokens])},
            "merges": [list(merge) for merge in merges],
        },
    }  # fmt: skip
    return json.dumps(record | members).encode()


def sentence_piece(**members: Any) -> bytes:
    """SentencePiece's BPE as its converter writes it: bytes, pieces by falling score, letters."""
    pieces = [_SPACE + "t", "he", _SPACE + "the", "in", "er", _SPACE + "a", "an", "on", "re",
              _SPACE + "th"]  # fmt: skip
    letters = sorted(
        {c for piece in pieces for c in piece} | set("bcdfgijklmopqsuvwxyz.,!?0123456789")
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters]
    known = set(pieces) | set(letters)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    record: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for n, token in enumerate(tokens[:3])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>",
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False,
            "vocab": {token: n for n, token in enumerate(tokens)},
            "merges": [" ".join(merge) for merge in merges],
        },
    }  # fmt: skip
    return json.dumps(record | members).encode()
