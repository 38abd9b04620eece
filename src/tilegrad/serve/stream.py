"""Streamed responses: server-sent events, written as a step's tokens come, without a task each.

A step's frame is taken in one call (`engine/supervise.py`), and every stream writes its event
straight to its connection from there; the task of a request wakes for its first event and its end.
Invariant: nothing is written before the first token, so that what is refused until then has its own
status; a client that does not read is cut off once it leaves more than `limits.slow` bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
from json.encoder import encode_basestring_ascii
from typing import Any

from aiohttp import HttpVersion11, web

from .engine.generation import Generation
from .refused import Refused
from .settings import Limits

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
dumps = json.JSONEncoder(separators=(",", ":")).encode


def quoted(text: str) -> bytes:
    """A text as a JSON string."""
    return encode_basestring_ascii(text).encode()


def event(body: Any) -> bytes:
    """One event that holds JSON."""
    return b"data: " + dumps(body).encode() + b"\n\n"


class Events:
    """The body of one streamed response."""

    def __init__(self, request: web.Request, limits: Limits) -> None:
        loop = asyncio.get_running_loop()
        self.request, self.limits = request, limits
        self.chunked = request.version >= HttpVersion11
        self.first: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.held: list[bytes] | None = []  # until the response's first bytes are written
        self.waiting = 0  # bytes of them
        self.error: Refused | None = None
        self.unsent = b""  # the event of an error that came before all others
        self.transport: Any = None
        self.cut = self.muted = False
        self.last = time.monotonic()

    def send(self, data: bytes) -> None:
        """Write some events, at once; a client that has them from another replica gets none."""
        if self.muted:
            return
        if self.held is not None:
            self.held.append(data)
            self.waiting += len(data)
            if not self.first.done():
                self.first.set_result(None)
            if self.transport is not None:  # it is begun, and its first bytes wait to be read
                self.check_unread()
            return
        transport = self.transport
        if transport.is_closing():  # the client has left; whoever waits for it hears that soon
            return
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)
        self.check_unread()

    def check_unread(self) -> None:
        """Cut a client off that leaves too much unread."""
        unread = self.transport.get_write_buffer_size() + self.waiting
        if unread > self.limits.slow and not self.cut:
            self.cut = True
            self.finish()
            self.transport.abort()

    def finish(self) -> None:
        """Nothing more comes."""
        for future in (self.first, self.done):
            if not future.done():
                future.set_result(None)

    def fail(self, error: Refused, data: bytes) -> None:
        """End in an error: a status of its own if nothing was written, else an event."""
        if self.done.done():
            return
        self.error, self.unsent = error, data
        if self.held is None or self.held:
            self.unsent = b""
            self.send(data)
        self.finish()

    async def run(self, headers: dict[str, str]) -> web.StreamResponse:
        """Write the response as it comes, to its end."""
        await asyncio.wait([self.first], timeout=self.limits.ping)
        if self.error is not None and not self.held:
            raise self.error
        response = web.StreamResponse(headers={**HEADERS, **headers})
        await response.prepare(self.request)
        self.transport = self.request.transport
        while True:  # more may come while it is written
            data, self.held, self.waiting = b"".join(self.held or ()), [], 0
            await response.write(data or self.unsent or PING)  # headers go with the first bytes
            if not self.held or self.cut:
                break
        if self.transport is None or self.transport.is_closing():
            return response
        self.held = None
        while not self.done.done():
            await asyncio.wait([self.done], timeout=self.limits.ping)
            if not self.done.done():
                self.send(PING)
        if not self.cut and not self.transport.is_closing():  # the client may have left just now
            await response.write_eof()
        return response


class Streamed:
    """A Listener that writes events; each API shapes its own."""

    def __init__(self, events: Events, count: int) -> None:
        self.events, self.left = events, count

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """Write the event of a token."""

    def ended(self, one: Generation) -> None:
        """Write the end of a choice, and of the response after the last."""
        if one.error is not None:
            self.events.fail(one.error, self.error(one.error))
            return
        self.closed(one)
        self.left -= 1
        if not self.left:
            self.complete()
            self.events.finish()

    def closed(self, one: Generation) -> None:
        """Write the end of a choice."""

    def complete(self) -> None:
        """Write what comes after all choices."""

    def error(self, error: Refused) -> bytes:
        """The event of an error."""
        return event(error.openai()) + DONE


class Collected:
    """A Listener that keeps what comes, for a response in one piece."""

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.texts: list[list[str]] = [[] for _ in range(count)]
        self.tokens: list[list[tuple[int, Any]]] = [[] for _ in range(count)]
        self.left = count

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """Keep a token."""
        if text:
            self.texts[one.index].append(text)
        if more is not None and token >= 0:
            self.tokens[one.index].append((token, more))

    def ended(self, one: Generation) -> None:
        """Count a choice off; an error is everybody's."""
        self.left -= 1
        if self.done.done():
            return
        if one.error is not None:
            self.done.set_exception(one.error)
        elif not self.left:
            self.done.set_result(None)

    def text(self, index: int) -> str:
        """All of a choice's text."""
        return "".join(self.texts[index])


__all__ = ["DONE", "Collected", "Events", "Streamed", "dumps", "event", "quoted"]
