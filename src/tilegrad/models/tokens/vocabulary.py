"""The words a model knows, read from the metadata of a GGUF file and checked before use.

Invariant: a Vocabulary has one text and one kind for each id, every id it names (first, last,
unknown, padding) lies in it, and every merge joins two of its tokens into a third. Kinds and the
tokens that end an answer follow llama.cpp, so that both read a file alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MOST_TOKENS = 4_000_000
# Texts that end an answer wherever a vocabulary has them.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
# Parts of an answer's form that are shown, not hidden.
SHOWN_TEXTS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
# Where all texts of a set are there, one more text is a word like others and ends nothing.
NO_END = [
    ({"<|return|>", "<|call|>"}, "<|end|>", USER_DEFINED),
    ({"<|calls|>", "<|flush|>"}, "<|end|>", USER_DEFINED),
    ({"<|tool_response>"}, "</s>", NORMAL),
]


@dataclass
class Vocabulary:
    """Tokens by id, with their kinds, scores and merges, and what the file says of their use."""

    model: str
    pre: str
    texts: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    padding: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    name: str = ""
    chat_template: str | None = None
    ends: frozenset[int] = frozenset()
    ids: dict[str, int] = field(default_factory=dict)

    def of_kind(self, *kinds: int) -> list[int]:
        """Ids of some kinds, in order."""
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]


def wrong(key: str, expected: str, got: object) -> UserError:
    """The error for metadata that does not fit."""
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return UserError(f"{key} does not fit", op="tokenizer", expected=expected, got=shown)


def values_of(metadata: Mapping[str, Any], key: str, kind: type, count: int | None) -> list | None:
    """An array of the metadata with each item's type and its length checked."""
    found = metadata.get(key)
    if found is None:
        return None
    if hasattr(found, "tolist"):
        found = found.tolist()
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise wrong(key, "an array", found)
    if count is not None and len(found) < count:
        raise wrong(key, f"{count} items, one for each token", f"{len(found)} items")
    if set(map(type, found)) <= {kind}:
        return list(found[:count])
    items = [x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in found[:count]]
    accepted = (int, float) if kind is float else kind
    for item in items:
        if not isinstance(item, accepted):
            raise wrong(key, f"items of {kind.__name__}", item)
    return items


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A yes or no of the metadata."""
    found = metadata.get(key, default)
    if not isinstance(found, bool | int):
        raise wrong(key, "a bool", found)
    return bool(found)


def word(metadata: Mapping[str, Any], key: str, default: str | None) -> str | None:
    """A string of the metadata."""
    found = metadata.get(key, default)
    if isinstance(found, bytes):
        found = found.decode("utf-8", "replace")
    if found is not None and not isinstance(found, str):
        raise wrong(key, "a string", found)
    return found


def token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    """The id of a token that the metadata names, inside the vocabulary."""
    found = metadata.get(key)
    if found is None or found == 0xFFFFFFFF:
        return None
    if hasattr(found, "item"):
        found = found.item()
    if not isinstance(found, int) or not 0 <= found < count:
        raise wrong(key, f"an id from 0 to {count - 1}", found)
    return found


def merges_of(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges, each once, in the order of their rank; see `check_merges`."""
    key = "tokenizer.ggml.merges"
    lines = values_of(metadata, key, str, None)
    if lines is None:
        raise wrong(key, "merges, which byte-pair encoding needs", None)
    merges: list[Any] = [tuple(line.split(" ")) for line in lines]  # hundreds of thousands
    if set(map(len, merges)) - {2}:
        gaps = [line.find(" ", 1) for line in lines]  # the first text may be a space
        if -1 in gaps:
            raise wrong(key, "two texts", lines[gaps.index(-1)])
        merges = [(line[:gap], line[gap + 1 :]) for line, gap in zip(lines, gaps)]
    return merges if len(set(lines)) == len(lines) else list(dict.fromkeys(merges))


def check_merges(vocabulary: Vocabulary) -> None:
    """An error for a merge that is not of two tokens which join to a third."""
    ids = vocabulary.ids
    for left, right in vocabulary.merges:
        if left not in ids or right not in ids or left + right not in ids:
            expected = "two tokens that join to a third"
            raise wrong("tokenizer.ggml.merges", expected, f"{left} {right}")


def texts_of(metadata: Mapping[str, Any]) -> tuple[list[str], dict[str, int]]:
    """The text of each token, and the id of each text."""
    key = "tokenizer.ggml.tokens"
    texts = values_of(metadata, key, str, None)
    if not texts or len(texts) > MOST_TOKENS:
        raise wrong(key, f"1 to {MOST_TOKENS} tokens", len(texts or ()))
    if "" in texts:
        texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = dict(zip(texts, range(len(texts))))
    if len(ids) < len(texts):
        twice = next(text for i, text in enumerate(texts) if ids[text] != i)
        raise wrong(key, "different texts", f"{twice!r} twice")
    return texts, ids


def settle_ends(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
    """Find the tokens that end an answer, and make them control tokens."""
    ids, kinds = vocabulary.ids, vocabulary.kinds
    ends = {ids[text] for text in END_TEXTS if text in ids}
    for i in ends:
        kinds[i] = CONTROL
    for text in SHOWN_TEXTS & ids.keys():
        kinds[ids[text]] = USER_DEFINED
    for name in ("eos", "eot", "eom"):
        found = token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(kinds))
        if found is not None:
            ends.add(found)
    for others, text, kind in NO_END:
        if others <= ids.keys() and text in ids and ids[text] != vocabulary.eos:
            ends.discard(ids[text])
            kinds[ids[text]] = kind
    vocabulary.ends = frozenset(ends)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The Vocabulary in the metadata of a GGUF file."""
    model = word(metadata, "tokenizer.ggml.model", None)
    if model not in ("gpt2", "llama"):
        raise wrong("tokenizer.ggml.model", "'gpt2' or 'llama'", model)
    texts, ids = texts_of(metadata)
    count, pieces = len(texts), model == "llama"
    kinds = values_of(metadata, "tokenizer.ggml.token_type", int, count)
    scores = values_of(metadata, "tokenizer.ggml.scores", float, count)
    if pieces and scores is None:
        raise wrong("tokenizer.ggml.scores", "scores, which SentencePiece needs", None)
    named: dict[str, Any] = {
        part: token_id(metadata, f"tokenizer.ggml.{part}_token_id", count)
        for part in ("bos", "eos", "unknown", "padding")
    }
    for part, usual in (("unknown", 0), ("bos", 1), ("eos", 2)):
        if pieces and f"tokenizer.ggml.{part}_token_id" not in metadata and usual < count:
            named[part] = usual
    pre = word(metadata, "tokenizer.ggml.pre", "default") or "default"
    found = Vocabulary(
        model,
        pre,
        texts,
        kinds or [NORMAL] * count,
        scores or [0.0] * count,
        [] if pieces else merges_of(metadata),
        **named,
        add_bos=flag(
            metadata,
            "tokenizer.ggml.add_bos_token",
            (pieces or pre in STARTS) and named["bos"] is not None,
        ),
        add_eos=flag(metadata, "tokenizer.ggml.add_eos_token", False),
        add_space_prefix=flag(metadata, "tokenizer.ggml.add_space_prefix", pieces),
        name=word(metadata, "general.name", "") or "",
        chat_template=word(metadata, "tokenizer.chat_template", None),
        ids=ids,
    )
    for part in ("bos", "eos"):
        if getattr(found, f"add_{part}") and named[part] is None:
            raise wrong(f"tokenizer.ggml.{part}_token_id", "an id, as it is to be added", None)
    settle_ends(found, metadata)
    return found


# Kinds of pre-tokenizer whose models start each text with a token unless the file says not to.
STARTS = frozenset({"llama-bpe", "llama3", "llama-v3"})
