"""The client of a load: one streamed request at a time over aiohttp, timed part by part.

Bytes are stamped when they arrive, before anything is parsed. They are read in whatever pieces
come (`iter_any`), over a large buffer: lines have no greatest length, and a slow reader here would
look like a slow server. Invariant: whatever fails is in the Reply; nothing is raised but a
cancellation.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from .events import Events
from .reply import Reply
from .script import Call

BUFFER = 4 << 20  # bytes; aiohttp's own 64 KiB make a fast server wait
MOST_ERROR = 300  # characters of an error that are kept
DONE = b"[DONE]"
Now = Callable[[], float]


@dataclass(frozen=True)
class Endpoint:
    """Where a load goes, and how each request is written."""

    url: str  # without /v1
    model: str
    api_key: str = ""
    chat: bool = False  # /v1/chat/completions; else /v1/completions
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout: float = 3600.0

    @property
    def path(self) -> str:
        """The address that requests are posted to."""
        return self.url + ("/v1/chat/completions" if self.chat else "/v1/completions")

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, call: Call) -> dict[str, Any]:
        """The JSON of a request."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": call.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            body["messages"] = [{"role": "user", "content": call.prompt}]
        else:
            body["prompt"] = list(call.prompt) if isinstance(call.prompt, tuple) else call.prompt
        return body


def new_session(endpoint: Endpoint) -> aiohttp.ClientSession:
    """A session with as many connections as requests."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context()),
        timeout=aiohttp.ClientTimeout(total=endpoint.timeout),
        headers=endpoint.headers,
        read_bufsize=BUFFER,
    )


class Client:
    """Sends Calls to an Endpoint."""

    def __init__(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, now: Now = time.perf_counter
    ) -> None:
        self.session, self.endpoint, self.now = session, endpoint, now

    async def send(self, call: Call) -> Reply:
        """Send one, read its stream to the end."""
        body = json.dumps(self.endpoint.body(call)).encode()
        reply = Reply(self.now(), call.max_tokens)
        reply.end = reply.begun
        try:
            await self._read(body, reply)
        except asyncio.TimeoutError:
            reply.error = f"no answer within {self.endpoint.timeout:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"[:MOST_ERROR]
        if reply.error:
            reply.end = self.now()
        elif not reply.parts:
            reply.error = "the stream had no token"
        return reply

    async def _read(self, body: bytes, reply: Reply) -> None:
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.endpoint.path, data=body, headers=headers) as response:
            reply.status = response.status
            if response.status != 200:
                reply.error = error_text(response.status, await response.read())
                return
            events, over = Events(), False
            async for data in response.content.iter_any():
                moment = self.now()
                for event in events.add(data):
                    over = over or event == DONE
                    if not over:
                        take(reply, json.loads(event), moment, self.endpoint.chat)
            if not over and not reply.error:
                reply.error = "the stream ended before [DONE]"
            if not reply.counted:
                reply.answer_tokens = len(reply.parts)


def take(reply: Reply, event: dict[str, Any], moment: float, chat: bool) -> None:
    """Note one event of a stream."""
    if event.get("error"):
        error = event["error"]
        reply.error = str(error.get("message", error) if isinstance(error, dict) else error)
        reply.error = reply.error[:MOST_ERROR]
        return
    for choice in event.get("choices") or ():
        if has_token(choice, chat, first=not reply.parts):
            reply.parts.append(moment)
            reply.end = moment
            break
    usage = event.get("usage")
    if usage:
        reply.counted = True
        reply.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        reply.answer_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = int(details.get("cached_tokens") or 0)


def has_token(choice: dict[str, Any], chat: bool, first: bool) -> bool:
    """Whether a choice of an event brings a token: a role alone, or an end alone, is none."""
    if chat:
        delta = choice.get("delta") or {}
        words = ("content", "reasoning_content", "reasoning", "tool_calls")
        return any(delta.get(word) for word in words)
    # A token may be a part of a letter and have no text yet; only an end alone has none.
    return bool(choice.get("text")) or first or not choice.get("finish_reason")


def error_text(status: int, body: bytes) -> str:
    """What an endpoint said of an error."""
    text = body[:100_000].decode("utf-8", "replace")
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return f"HTTP {status}: {text}"[:MOST_ERROR]


__all__ = ["Client", "Endpoint", "new_session"]
