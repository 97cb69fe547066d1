"""How text is cut into words before byte-pair merging, by GGUF's `tokenizer.ggml.pre`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

# The expressions are facts about published tokenizers, as llama.cpp lists them
# (src/llama-vocab.cpp, llm_tokenizer_bpe); the first is GPT-2's (encoder.py of openai/gpt-2).
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


def _modern(digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DIGITS: Final = (r"\p{N}", _GPT2)
_LLAMA3: Final = (_modern(r"\p{N}{1,3}"),)
_QWEN2: Final = (_modern(r"\p{N}"),)

# Each expression cuts what the ones before it have left.
PATTERNS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "mpt": (_GPT2,),
    "olmo": (_GPT2,),
    "phi-2": (_GPT2,),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
# Tokenizers that take a word of the vocabulary whole, and begin a text with bos by default.
WHOLE_WORDS: Final = frozenset({"llama-bpe", "llama3", "llama-v3"})


def pre_tokenizer(name: str) -> PreTokenizer:
    """The cutter of `PATTERNS[name]`, its words in GPT-2's printable form of bytes."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    cuts = [Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
