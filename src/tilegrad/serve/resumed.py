"""Streams that another replica can go on with: what a router says and is told besides the answer.

A router names each stream in a header: a seed for its ids, and its time. A replica says that name
again in its answer, and writes a mark, a comment that no client sees, after all that a token gave.
The router passes on what stands before a mark, and knows by it which tokens the client has. If the
replica dies, another one gets the same body with those tokens, and writes what comes after them.
Invariant: no event of a stream is there twice or missing; the last token of an answer has no mark:
the end of the stream is one.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

from aiohttp import web

from .api.fields import Fields
from .api.ids import Ids
from .api.parameters import Ask
from .model import ServedModel

HEADER = "X-Tilegrad-Stream"
FIELD = "tilegrad_made"  # in the body: ids of each choice
NAME = re.compile(r"([0-9a-f]{32})\.(\d{1,12})")
MARK = b": made "


def new_name() -> str:
    """A name for a stream."""
    return f"{secrets.token_hex(16)}.{int(time.time())}"


def mark(choice: int, token: int) -> bytes:
    """What is written after all that a token gave."""
    return b"%b%d %d\n\n" % (MARK, choice, token)


def read_name(request: web.Request, fields: Fields, ask: Ask, model: ServedModel) -> None:
    """Take over the name of a stream, and what was made of it before."""
    found = NAME.fullmatch(request.headers.get(HEADER, ""))
    if found is None or not ask.stream:
        return
    ask.ids, ask.created, ask.name = Ids(found[1]), int(found[2]), found[0]
    given = fields.any(FIELD)
    if given is None:
        return
    count = len(ask.prompts) * ask.n
    if not isinstance(given, list) or len(given) != count or not all(map(_ids(model), given)):
        raise fields.wrong(FIELD, f"{count} lists of ids")
    ask.made = given


def _ids(model: ServedModel) -> Any:
    def good(ids: Any) -> bool:
        if not isinstance(ids, list) or len(ids) > model.context:
            return False
        return all(type(one) is int and 0 <= one < model.vocabulary for one in ids)

    return good


class Passed:
    """A stream on its way through a router: what was passed on, and what waits for its mark."""

    def __init__(self) -> None:
        self.name = new_name()
        self.made: dict[int, list[int]] = {}
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        """Take some bytes; what can be passed on."""
        *blocks, self.held = (self.held + data).split(b"\n\n")
        ready = 0
        for place, block in enumerate(blocks):
            if block.startswith(MARK):
                choice, token = block[len(MARK) :].split()
                self.made.setdefault(int(choice), []).append(int(token))
                ready = place + 1
            elif (
                block.startswith(b":") and ready == place
            ):  # a sign of life, before which is nothing
                ready = place + 1
        passed = [b for b in blocks[:ready] if not b.startswith(MARK)]
        self.held = b"\n\n".join([*blocks[ready:], self.held])
        return b"".join(block + b"\n\n" for block in passed)

    def finish(self) -> bytes:
        """The stream ended as it should: the rest."""
        rest, self.held = self.held, b""
        return rest

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        """What another replica is asked."""
        self.held = b""
        count = 1 + max(self.made, default=0)
        count = max(count, choices_of(body))
        return {**body, FIELD: [self.made.get(i, []) for i in range(count)]}


def choices_of(body: dict[str, Any]) -> int:
    """How many answers a body asks for; a replica checks that they are as many."""
    prompt, n = body.get("prompt"), body.get("n")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = len(prompt) if several else 1  # type: ignore[arg-type]
    return prompts * (n if isinstance(n, int) else 1)


__all__ = ["HEADER", "Passed", "mark", "new_name", "read_name"]
