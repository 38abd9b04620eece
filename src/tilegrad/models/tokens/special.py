"""Special tokens in text: where they are taken for tokens, and where they stay plain words.

A user who writes `<|im_end|>` must not end their own message. So text is cut at control tokens
only where a caller says that the text is to be trusted, and a chat is rendered with a mark inside
every look-alike that came from a message, which is taken out again once the text is cut.

Invariant: a marked look-alike is never cut out as a token, and no mark reaches the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import UserError

MARKS = [chr(point) for point in range(0xFDD0, 0xFDF0)]  # never characters of a text
BLANK = " \t\n\v\f\r"


@dataclass(frozen=True)
class SpecialToken:
    """A token cut out of text before anything else looks at it."""

    text: str
    id: int
    control: bool
    strips_left: bool = False
    strips_right: bool = False


def cut(text: str, tokens: Sequence[SpecialToken], control: bool) -> list[str | SpecialToken]:
    """Text cut at special tokens, longest ones first; at control tokens only if `control`.

    `tokens` come sorted by `by_length`.
    """
    parts: list[str | SpecialToken] = [text] if text else []
    for token in tokens:
        if (token.control and not control) or token.text not in text:
            continue
        out: list[str | SpecialToken] = []
        for part in parts:
            if isinstance(part, str) and token.text in part:
                out += cut_at(part, token)
            else:
                out.append(part)
        parts = out
    return parts


def cut_at(text: str, token: SpecialToken) -> list[str | SpecialToken]:
    """Text cut at one special token."""
    out: list[str | SpecialToken] = []
    place = text.find(token.text)
    while place >= 0:
        left, text = text[:place], text[place + len(token.text) :]
        if token.strips_left:
            left = left.rstrip(BLANK)
        if token.strips_right:
            text = text.lstrip(BLANK)
        out += [left, token] if left else [token]
        place = text.find(token.text)
    return [*out, text] if text else out


def by_length(tokens: Iterable[SpecialToken]) -> list[SpecialToken]:
    """Special tokens in the order they are cut: longest text first, then by id."""
    return sorted(tokens, key=lambda token: (-len(token.text.encode("utf-8")), token.id))


def strings_in(value: Any) -> Iterable[str]:
    """Every string in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def free_mark(value: Any) -> str:
    """A mark that is in none of the strings."""
    left = set(MARKS)
    for text in strings_in(value):
        left -= left & set(text)
    if not left:
        raise UserError(
            "the messages hold every code point kept for marks",
            op="chat",
            hint="take out the non-characters U+FDD0 to U+FDEF",
        )
    return min(left)


def mark(text: str, control: Sequence[str], sign: str) -> str:
    """Text with a mark inside every look-alike of a control token."""
    starts = set()
    for token in control:
        place = text.find(token)
        while place >= 0:
            starts.add(place + 1)
            place = text.find(token, place + 1)
    if not starts:
        return text
    ends = sorted(starts)
    return sign.join(text[a:b] for a, b in zip([0, *ends], [*ends, len(text)]))


def mark_all(value: Any, control: Sequence[str], sign: str) -> Any:
    """Plain data with every string marked."""
    if isinstance(value, str):
        return mark(value, control, sign)
    if isinstance(value, dict):
        return {mark(k, control, sign): mark_all(v, control, sign) for k, v in value.items()}
    if isinstance(value, list):
        return [mark_all(item, control, sign) for item in value]
    return value
