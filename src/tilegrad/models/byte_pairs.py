"""Byte-pair encoding with the `tokenizers` library, set up from a GGUF vocabulary.

Text is cut into words by the patterns its model was trained with, words become bytes written as
printable letters, and pairs of those join by rank. The patterns name no case-insensitive group:
what counts as the same letter differs between regular-expression engines.

Invariant: control and unknown tokens are not in the model that joins pairs, so no text becomes
one of them here.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import UserError
from .vocabulary import CONTROL, UNKNOWN, Vocabulary

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
# Upper-case words end before lower-case ones begin, and marks count as letters.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]
# The patterns of each kind, applied one after the other, and whether a whole word that is a token
# is taken before any pair joins.
KINDS: dict[str, tuple[list[str], bool]] = {
    "default": (DEFAULT, False),
    "gpt-2": ([GPT2], False),
    "phi-2": ([GPT2], False),
    "olmo": ([GPT2], False),
    "mpt": ([GPT2], False),
    "smollm": ([r"\p{N}", GPT2], False),
    "starcoder": ([r"\p{N}", GPT2], False),
    "refact": ([r"\p{N}", GPT2], False),
    "command-r": ([r"\p{N}", GPT2], False),
    "llama-bpe": ([LLAMA3], True),
    "llama3": ([LLAMA3], True),
    "llama-v3": ([LLAMA3], True),
    "dbrx": ([LLAMA3], False),
    "smaug-bpe": ([LLAMA3], False),
    "qwen2": ([QWEN2], False),
    "deepseek-r1-qwen": ([QWEN2], False),
    "stablelm2": ([QWEN2], False),
    "tekken": ([TEKKEN], True),
}


def byte_letters() -> list[str]:
    """The letter that stands for each byte: itself where printable, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, extra = [], 256
    for value in range(256):
        if value in printable:
            letters.append(chr(value))
        else:
            letters.append(chr(extra))
            extra += 1
    return letters


BYTES = {letter: value for value, letter in enumerate(byte_letters())}


def bytes_of(text: str) -> bytes:
    """The bytes a token's letters stand for; text with other letters stands for itself."""
    try:
        return bytes([BYTES[letter] for letter in text])
    except KeyError:
        return text.encode("utf-8")


class PairEncoder:
    """Text to ids by joining pairs of bytes in the order of rank."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokenizer = build(vocabulary)

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of text without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def build(vocabulary: Vocabulary) -> Any:
    """A tokenizer of the library, without special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    if vocabulary.pre not in KINDS:
        raise UserError(
            f"unknown pre-tokenizer {vocabulary.pre!r}", op="tokenizer",
            expected=", ".join(sorted(KINDS)), got=vocabulary.pre,
        )  # fmt: skip
    patterns, whole_words = KINDS[vocabulary.pre]
    hidden = set(vocabulary.of_kind(CONTROL, UNKNOWN))
    ids = {text: i for i, text in enumerate(vocabulary.texts) if i not in hidden}
    merges = [
        (left, right) for left, right in vocabulary.merges
        if left in ids and right in ids and left + right in ids
    ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    return tokenizer
