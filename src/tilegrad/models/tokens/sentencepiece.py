"""SentencePiece merging by score, as models with `tokenizer.ggml.model = llama` were trained.

The two neighbours whose joined text is the token of highest score join first, the leftmost of
equals; what is no token in the end becomes bytes. Equal scores make the order depend on places,
which a table of merges cannot say; hence this is not a model of the `tokenizers` library.

Invariant: control, unknown and byte tokens never come out of merging text.
"""

from __future__ import annotations

import heapq
import re

from ...core.errors import UserError
from .vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

SPACE = "\u2581"
KEPT_WORDS, KEPT_LENGTH = 65536, 64


class PieceEncoder:
    """Text to ids by merging neighbours in the order of score."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        hidden = (CONTROL, UNKNOWN, BYTE)
        self.add_space_prefix = vocabulary.add_space_prefix
        self.ids = {
            text: i for i, text in enumerate(vocabulary.texts) if vocabulary.kinds[i] not in hidden
        }
        self.scores = vocabulary.scores
        self.bytes = [self.byte_id(vocabulary, value) for value in range(256)]
        # No token bridges from a letter to a space: then words can be merged one at a time.
        bridge = re.compile(f"[^{SPACE}]{SPACE}")
        apart = not any(bridge.search(text) for text in self.ids)
        self.words = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+" if apart else "(?s:.+)")
        self.kept: dict[str, list[int]] = {}

    def byte_id(self, vocabulary: Vocabulary, value: int) -> int | None:
        """The token of one byte, else the unknown token."""
        found = vocabulary.ids.get(f"<0x{value:02X}>")
        if found is None and value < 128:
            found = self.ids.get(chr(value))
        return vocabulary.unknown if found is None else found

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of text without special tokens; `first` where a token boundary is before it."""
        if first and self.add_space_prefix:
            text = " " + text
        out: list[int] = []
        for word in self.words.findall(text.replace(" ", SPACE)):
            out += self.encode_word(word)
        return out

    def encode_word(self, word: str) -> list[int]:
        """Ids of one word, remembered if it is short."""
        found = self.kept.get(word)
        if found is None:
            found = [i for part in self.merge(word) for i in self.ids_of(part)]
            if len(word) <= KEPT_LENGTH:
                if len(self.kept) >= KEPT_WORDS:
                    self.kept.clear()
                self.kept[word] = found
        return found

    def ids_of(self, part: str) -> list[int]:
        """A part's token, else the tokens of its bytes."""
        found = self.ids.get(part)
        if found is not None:
            return [found]
        out = []
        for value in part.encode("utf-8"):
            i = self.bytes[value]
            if i is None:
                raise UserError(
                    f"the vocabulary has no token for byte 0x{value:02X} of {part!r}",
                    op="encode",
                    hint="the file lacks byte tokens and an unknown token",
                )
            out.append(i)
        return out

    def merge(self, word: str) -> list[str]:
        """Parts of a word after all merges."""
        count = len(word)
        ids, scores = self.ids, self.scores
        parts: list[str] = list(word)  # "" once it is part of the one to its left
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < count:
                joined = parts[left] + parts[right]
                found = ids.get(joined)
                if found is not None:
                    heapq.heappush(queue, (-scores[found], left, right, joined))

        for left in range(count - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if not parts[left] or not parts[right] or parts[left] + parts[right] != joined:
                continue
            parts[left], parts[right] = joined, ""
            after[left] = after[right]
            if after[right] < count:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [part for part in parts if part]
