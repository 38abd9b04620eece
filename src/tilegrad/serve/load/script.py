"""What a load asks for, and when: prompts, lengths of answers, moments.

A Script is made before anything is sent, from a seed alone, so two endpoints get the same
requests in the same order. Invariant: the same choices and the same seed give the same Calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core.errors import UserError

VOCABULARY = 10_000  # ids below this are in the vocabulary of every model people serve
CHARACTERS = 4  # of English text, about one token
TEXT = """
the of and to in is it you that he was for on are with as his they be at one have this from or had
by hot but some what there we can out other were all your when up use word how said an each she
which do their time if will way about many then them would write like so these her long make thing
see him two has look more day could go come did my sound no most number who over know water than
call first people may down side been now find any new work part take get place made live where
after back little only round man year came show every good me give our under name very through
just form much great think say help low line before turn cause same mean differ move right boy old
too does tell set three want air well also play small end put home read hand port large spell add
even land here must big high such follow act why ask
"""
WORDS = TEXT.split()


@dataclass(frozen=True)
class Call:
    """One request of a load: its prompt, how long the answer is, when it is sent."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    at: float = 0.0  # seconds after the start


@dataclass(frozen=True)
class Lengths:
    """A length between two numbers, each as likely; one number where both are the same."""

    least: int
    most: int

    @staticmethod
    def of(text: str) -> Lengths:
        """Lengths from "128" or "100-1024"."""
        parts = text.split("-")
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or numbers[0] < 1 or numbers[-1] < numbers[0]:
            raise UserError(
                "bad lengths", op="bench serve", expected="a number, or least-most", got=text
            )
        return Lengths(numbers[0], numbers[-1])

    def drawn(self, source: random.Random) -> int:
        """A length."""
        return source.randint(self.least, self.most)


@dataclass(frozen=True)
class Prefixes:
    """Tokens that prompts share at their start: each of `groups` has its own."""

    tokens: int = 0
    groups: int = 1


def mini_sglang() -> list[Call]:
    """256 requests with prompts and answers of 100 to 1024 tokens, seed 0, as nano-vllm and
    mini-sglang publish them: 142,827 tokens of prompts, 133,966 of answers."""
    source = random.Random(0)
    prompts = [
        tuple(source.randint(0, VOCABULARY) for _ in range(source.randint(100, 1024)))
        for _ in range(256)
    ]
    return [Call(prompt, source.randint(100, 1024)) for prompt in prompts]


def drawn(
    count: int,
    prompt: Lengths,
    answer: Lengths,
    *,
    seed: int = 0,
    prefixes: Prefixes = Prefixes(),
    vocabulary: int = VOCABULARY,
) -> list[Call]:
    """Calls with random ids; those of one group of prefixes come round in turn."""
    source = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocabulary) for _ in range(length))

    shared = [ids(prefixes.tokens) for _ in range(max(1, prefixes.groups))]
    return [
        Call(shared[i % len(shared)] + ids(prompt.drawn(source)), answer.drawn(source))
        for i in range(count)
    ]


def as_text(calls: Sequence[Call]) -> list[Call]:
    """The same Calls in words for an endpoint that takes no ids: about a word a token.

    An id is always the same word, so prompts that share ids share words.
    """

    def words(prompt: str | tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        return " ".join(WORDS[i % len(WORDS)] for i in prompt)

    return [replace(call, prompt=words(call.prompt)) for call in calls]


# ---- files --------------------------------------------------------------------------------------


def of_file(path: Path, count: int, answer: Lengths | None, *, seed: int = 0) -> list[Call]:
    """Calls from a file of conversations as ShareGPT has them: the first turn and its answer.

    Without `answer` an answer is as long as the one in the file, by its characters.
    """
    pairs = [pair for record in records(path) if (pair := first_turns(record))]
    if not pairs:
        raise UserError(
            f"{path} has no conversations",
            op="bench serve",
            expected='records with "conversations": [{"from": "human", "value": ...}, ...]',
        )
    source = random.Random(seed)
    source.shuffle(pairs)
    found = []
    for number in range(count):
        prompt, reply = pairs[number % len(pairs)]
        length = max(1, len(reply) // CHARACTERS) if answer is None else answer.drawn(source)
        found.append(Call(prompt, length))
    return found


def records(path: Path) -> list[Any]:
    """The records of a JSON list, or of a file with one on each line."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            whole: list[Any] = json.loads(text)
            return whole
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", op="bench serve") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", op="bench serve") from None


def first_turns(record: Any) -> tuple[str, str] | None:
    """What a person asked first and what came back; None where a record has no such pair."""
    if not isinstance(record, dict):
        return None
    turns = record.get("conversations") or record.get("conversation") or record.get("messages")
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn_text(turn) for turn in turns[:2]]
    return (texts[0], texts[1]) if texts[0] and texts[1] else None


def turn_text(turn: Any) -> str:
    """The words of one turn."""
    if not isinstance(turn, dict):
        return ""
    value = turn.get("value", turn.get("content", ""))
    return value if isinstance(value, str) else ""


# ---- moments ------------------------------------------------------------------------------------


def at_rate(
    calls: Sequence[Call], rate: float, *, poisson: bool = True, seed: int = 0
) -> list[Call]:
    """The Calls at `rate` a second: by chance (Poisson) or evenly; all at once if infinite."""
    moments = moments_of(rate, poisson, random.Random(f"moments {seed}"))
    return [replace(call, at=next(moments)) for call in calls]


def moments_of(rate: float, poisson: bool, source: random.Random) -> Iterator[float]:
    """Moments of a rate, the first at 0."""
    now = 0.0
    while True:
        yield now
        if rate != float("inf"):
            now += source.expovariate(rate) if poisson else 1.0 / rate


__all__ = [
    "Call",
    "Lengths",
    "Prefixes",
    "as_text",
    "at_rate",
    "drawn",
    "mini_sglang",
    "of_file",
]
