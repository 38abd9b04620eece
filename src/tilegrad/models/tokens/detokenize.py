"""Text of an answer while its tokens arrive: whole characters only, ending at stop strings.

Bytes go through an incremental UTF-8 decoder, characters through an automaton of the stop strings
(Aho-Corasick), whose state is how much of the end of the text could still become a stop string.
Just that much is held back. A token costs time in proportion to its own length.

Invariant: what `add` and `finish` gave, put together, is the decoded text up to the first stop
string, and nothing that was given is ever taken back.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import UserError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

MOST_STOPS, MOST_LENGTH = 64, 4096


class StopStrings:
    """An automaton over characters: states are prefixes of stop strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = checked_stops(stops)
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in a state
        for stop in self.stops:
            state = 0
            for letter in stop:
                state = self.next[state].setdefault(letter, len(self.next))
                if state == len(self.next):
                    self.next.append({})
                    self.depth.append(0)
                    self.match.append(None)
            self.match[state] = stop
        self.link_states()

    def link_states(self) -> None:
        """Give each state the state of its longest proper suffix."""
        self.suffix = [0] * len(self.next)
        states = deque(self.next[0].values())
        for state in states:
            self.depth[state] = 1
        while states:
            state = states.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self.suffix[state]]
            for letter, child in self.next[state].items():
                self.depth[child] = self.depth[state] + 1
                self.suffix[child] = self.step(self.suffix[state], letter)
                states.append(child)

    def step(self, state: int, letter: str) -> int:
        """The state after one more character."""
        while state and letter not in self.next[state]:
            state = self.suffix[state]
        return self.next[state].get(letter, 0)


def checked_stops(stops: Sequence[str]) -> list[str]:
    """Stop strings within limits."""
    if isinstance(stops, str):
        stops = [stops]
    stops = list(stops)
    if all(isinstance(stop, str) for stop in stops):
        stops = list(dict.fromkeys(stops))
    if len(stops) > MOST_STOPS:
        raise UserError(
            "too many stop strings", op="stop", expected=f"at most {MOST_STOPS}", got=len(stops)
        )
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MOST_LENGTH:
            raise UserError(
                "a stop string does not fit",
                op="stop",
                expected=f"1 to {MOST_LENGTH} characters",
                got=repr(stop)[:60],
            )
    return stops


class Detokenizer:
    """Ids in, text out: `add(id)` gives what is new and certain, `finish()` the rest."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        minimum_tokens: int = 0,
        show_special: bool = False,
        continues: bool = False,
    ) -> None:
        """`continues`: the text goes on after a prompt, so its first space is its own.

        Stop strings that begin before `minimum_tokens` tokens are no stop.
        """
        self.tokenizer, self.show_special = tokenizer, show_special
        self.include_stop, self.minimum_tokens = include_stop, minimum_tokens
        self.automaton = StopStrings(stop)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.strips = tokenizer.strips_first_space and not continues
        self.state, self.held, self.count = 0, "", 0
        self.stopped: str | None = None  # the stop string that ended the answer
        self.finished = False

    def add(self, token: int) -> str:
        """Text that is certain after one more token; nothing once a stop string came."""
        if self.stopped is not None or self.finished:
            return ""
        data = self.tokenizer.piece(token, show_special=self.show_special)
        self.count += 1
        if self.strips and data:
            self.strips = False
            data = data[1:] if data.startswith(b" ") else data
        return self.advance(self.decoder.decode(data))

    def add_all(self, tokens: Sequence[int]) -> str:
        """Text that is certain after several tokens."""
        return "".join(self.add(token) for token in tokens)

    def finish(self) -> str:
        """What was held back, when no more tokens come; half a character becomes U+FFFD."""
        if self.stopped is not None or self.finished:
            return ""
        text = self.advance(self.decoder.decode(b"", True))
        self.finished = True
        if self.stopped is None:
            text, self.held = text + self.held, ""
        return text

    def advance(self, text: str) -> str:
        """Run characters through the automaton; what cannot become a stop string comes out."""
        automaton = self.automaton
        if not automaton.stops or self.count <= self.minimum_tokens:
            return text
        state, given = self.state, self.held + text
        start = len(self.held)
        for place, letter in enumerate(text, start + 1):
            state = automaton.step(state, letter)
            found = automaton.match[state]
            if found is not None:
                self.stopped, self.held = found, ""
                return given[: place if self.include_stop else place - len(found)]
        self.state = state
        certain = len(given) - automaton.depth[state]
        self.held = given[certain:]
        return given[:certain]
