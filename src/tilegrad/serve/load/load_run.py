"""Sends the Calls of a load when they are due, so many at once at most.

A Call whose moment has come while all places are taken waits, and its clock starts when it is
sent; how late it was is in the Result. Invariant: every Call has one Reply, in the order in
which they are due, unless the load is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ...core.errors import UserError
from .client import Client, Endpoint, error_text, new_session
from .reply import Reply
from .script import Call, as_text

Sleep = Callable[[float], Awaitable[Any]]
Told = Callable[[int, int], None]  # how many are done, of how many


@dataclass
class Result:
    """The Replies of a load and how it went."""

    replies: list[Reply]
    seconds: float  # from the first request to the last token
    most_at_once: int
    late: float = 0.0  # the longest that a Call waited for a place
    notes: list[str] = field(default_factory=list)


@dataclass
class Load:
    """A load under way; `send` gives the Reply of a Call."""

    send: Callable[[Call], Awaitable[Reply]]
    concurrency: int | None = None
    now: Callable[[], float] = time.perf_counter
    sleep: Sleep = asyncio.sleep
    told: Told = lambda done, total: None
    at_once: int = 0
    most_at_once: int = 0
    done: int = 0
    late: float = 0.0

    async def run(self, calls: Sequence[Call]) -> Result:
        """Send all of them; wait for the last."""
        free = asyncio.Semaphore(self.concurrency or len(calls) or 1)
        start = self.now()
        tasks = []
        try:
            for call in sorted(calls, key=lambda call: call.at):
                wait = start + call.at - self.now()
                if wait > 0:
                    await self.sleep(wait)
                await free.acquire()
                self.late = max(self.late, self.now() - start - call.at)
                tasks.append(asyncio.create_task(self._one(call, free, len(calls))))
            replies = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        first = min((reply.begun for reply in replies), default=start)
        last = max((reply.end for reply in replies), default=start)
        return Result(replies, last - first, self.most_at_once, self.late)

    async def _one(self, call: Call, free: asyncio.Semaphore, total: int) -> Reply:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.send(call)
        finally:
            self.at_once -= 1
            self.done += 1
            free.release()
            self.told(self.done, total)


async def run_load(
    endpoint: Endpoint,
    calls: Sequence[Call],
    *,
    concurrency: int | None = None,
    warm_up: int = 0,
    prompts: str = "auto",
    told: Told = lambda done, total: None,
) -> Result:
    """Put a load on an endpoint: requests that do not count first, then the Calls.

    `prompts` is "ids", "text", or "auto": ids where the endpoint takes them.
    """
    async with new_session(endpoint) as session:
        client = Client(session, endpoint)
        notes: list[str] = []
        if prompts == "text" or (prompts == "auto" and not await takes_ids(client, calls, notes)):
            calls = as_text(calls)
        first = [Call(call.prompt, call.max_tokens) for call in list(calls)[:warm_up]]
        if first:
            warm = await Load(client.send, concurrency).run(first)
            failed = [reply.error for reply in warm.replies if reply.error]
            notes += [f"{len(failed)} warm-up requests failed: {failed[0]}"] if failed else []
        result = await Load(client.send, concurrency, told=told).run(calls)
    result.notes = notes + result.notes
    return result


async def takes_ids(client: Client, calls: Sequence[Call], notes: list[str]) -> bool:
    """Whether prompts may be ids: one is tried. The note says what is sent instead."""
    if client.endpoint.chat or not any(isinstance(call.prompt, tuple) for call in calls):
        if client.endpoint.chat:
            notes.append("prompts are words, about one a token: a chat takes no ids")
        return False
    reply = await client.send(Call((1, 2, 3), 1))
    if not 400 <= reply.status < 500:
        return True
    notes.append(f"prompts are words, about one a token: ids were refused ({reply.error})")
    return False


async def model_of(url: str, api_key: str = "") -> str:
    """The first model that an endpoint names."""
    endpoint = Endpoint(url, "", api_key, timeout=60.0)
    try:
        async with new_session(endpoint) as session, session.get(url + "/v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise UserError(error_text(response.status, body), op="bench serve")
            return str(json.loads(body)["data"][0]["id"])
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise UserError(
            f"{url} cannot be reached: {error}",
            op="bench serve",
            hint="is the server running? --url says where",
        ) from None
    except (ValueError, LookupError, TypeError):
        raise UserError(
            f"{url}/v1/models names no model", op="bench serve", hint="name it: --model"
        ) from None


__all__ = ["Load", "Result", "model_of", "run_load"]
