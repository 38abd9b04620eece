"""Byte-pair encoding with the `tokenizers` library, set up from a GGUF vocabulary.

Text is cut into words by the patterns its model was trained with, words become bytes written as
printable letters, and pairs of those join by rank. The patterns name no case-insensitive group:
what counts as the same letter differs between regular-expression engines.

Invariant: control and unknown tokens are not in the model that joins pairs, so no text becomes
one of them here.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from ...core.errors import UserError
from .vocabulary import CONTROL, UNKNOWN, Vocabulary, check_merges

# Letters, numbers and punctuation of Unicode 16. What counts as one is frozen at Unicode 15.1, as
# in llama.cpp: the ids of a text must not change with the tables of a library.
LATER = [
    (0x1B4E, 0x1B4F),
    (0x1B7F, 0x1B7F),
    (0x1C89, 0x1C8A),
    (0xA7CB, 0xA7CD),
    (0xA7DA, 0xA7DC),
    (0x105C0, 0x105F3),
    (0x10D40, 0x10D65),
    (0x10D6E, 0x10D85),
    (0x10EC2, 0x10EC4),
    (0x11380, 0x113B7),
    (0x113D1, 0x113D8),
    (0x116D0, 0x116E3),
    (0x11BC0, 0x11BE1),
    (0x11BF0, 0x11BF9),
    (0x13460, 0x143FA),
    (0x16100, 0x1611D),
    (0x16130, 0x16139),
    (0x16D40, 0x16D79),
    (0x18CFF, 0x18CFF),
    (0x1CCF0, 0x1CCF9),
    (0x1E5D0, 0x1E5FF),
]
NEW = "".join(f"{chr(low)}-{chr(high)}" for low, high in LATER)
LETTER, NUMBER = rf"[\p{{L}}&&[^{NEW}]]", rf"[\p{{N}}&&[^{NEW}]]"
OTHER = rf"(?:[^\s\p{{L}}\p{{N}}]|[{NEW}])"
LEAD = rf"(?:[^\r\n\p{{L}}\p{{N}}]|[{NEW}])"
GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{LETTER}+| ?{NUMBER}+| ?{OTHER}+|\s+(?!\S)|\s+"
SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
REST = rf" ?{OTHER}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SHORT}|{LEAD}?{LETTER}+|{NUMBER}{{1,3}}|{REST}"
QWEN2 = rf"{SHORT}|{LEAD}?{LETTER}+|{NUMBER}|{REST}"
# Words with capitals first, then small letters; endings stay with them (o200k, of gpt-oss).
CAPITAL = rf"[[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]&&[^{NEW}]]"
SMALL = rf"[[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]&&[^{NEW}]]"
O200K_WORD = rf"{LEAD}?{CAPITAL}*{SMALL}+(?:{SHORT})?|{LEAD}?{CAPITAL}+{SMALL}*(?:{SHORT})?"
O200K = rf"{O200K_WORD}|{NUMBER}{{1,3}}| ?{OTHER}+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = rf"[[\p{{P}}\$\+<=>\^~\|]&&[^{NEW}]]+"
DEFAULT = [SIGNS, GPT2, rf"{NUMBER}+", r"[0-9][0-9][0-9]"]
# The patterns of each kind, applied one after the other, and whether a whole word that is a token
# is taken before any pair joins.
KINDS: dict[str, tuple[list[str], bool]] = {
    "default": (DEFAULT, False),
    "gpt-2": ([GPT2], False),
    "phi-2": ([GPT2], False),
    "olmo": ([GPT2], False),
    "mpt": ([GPT2], False),
    "smollm": ([NUMBER, GPT2], False),
    "starcoder": ([NUMBER, GPT2], False),
    "refact": ([NUMBER, GPT2], False),
    "command-r": ([NUMBER, GPT2], False),
    "llama-bpe": ([LLAMA3], True),
    "llama3": ([LLAMA3], True),
    "llama-v3": ([LLAMA3], True),
    "gpt-4o": ([O200K], True),
    "dbrx": ([LLAMA3], False),
    "smaug-bpe": ([LLAMA3], False),
    "qwen2": ([QWEN2], False),
    "deepseek-r1-qwen": ([QWEN2], False),
    "stablelm2": ([QWEN2], False),
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
        self.count = len(vocabulary.texts)
        self.tokenizer, self.lacks_bytes = build(vocabulary)

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of text without special tokens; bytes that are no tokens are left out."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < self.count] if self.lacks_bytes else ids


def build(vocabulary: Vocabulary) -> tuple[Any, bool]:
    """A tokenizer of the library without special tokens, and whether it lacks some bytes.

    A byte that is no token gets an id beyond the vocabulary, so that the letters around it do not
    become neighbours.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    if vocabulary.pre not in KINDS:
        raise UserError(
            f"unknown pre-tokenizer {vocabulary.pre!r}",
            op="tokenizer",
            expected=", ".join(sorted(KINDS)),
            got=vocabulary.pre,
        )
    patterns, whole_words = KINDS[vocabulary.pre]
    ids = dict(vocabulary.ids)
    hidden = {vocabulary.texts[i] for i in vocabulary.of_kind(CONTROL, UNKNOWN)}
    for text in hidden:
        del ids[text]
    missing = [letter for letter in BYTES if letter not in ids]
    ids |= {letter: len(vocabulary.texts) + i for i, letter in enumerate(missing)}
    model = None
    if set(missing).isdisjoint(itertools.chain.from_iterable(vocabulary.merges)):
        with contextlib.suppress(Exception):  # a merge has a text that is not in `ids`
            model = models.BPE(vocab=ids, merges=vocabulary.merges, ignore_merges=whole_words)
    if model is None:
        check_merges(vocabulary)
        merges = [(a, b) for a, b in vocabulary.merges if hidden.isdisjoint((a, b, a + b))]
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=whole_words)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer, bool(missing)
