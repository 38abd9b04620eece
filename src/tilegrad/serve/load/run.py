"""Sends the Asks of a load when they are due, so many at once at most.

An Ask whose moment has come while all places are taken waits, and its clock starts when it is
sent; how late it was is in the Result. Invariant: every Ask has one Reply, in the order in
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
from .script import Ask, as_text

Sleep = Callable[[float], Awaitable[Any]]
Told = Callable[[int, int], None]  # how many are done, of how many


@dataclass
class Result:
    """The Replies of a load and how it went."""

    replies: list[Reply]
    seconds: float  # from the first request to the last token
    most_at_once: int
    late: float = 0.0  # the longest that an Ask waited for a place
    notes: list[str] = field(default_factory=list)


@dataclass
class Load:
    """A load under way; `send` gives the Reply of an Ask."""

    send: Callable[[Ask], Awaitable[Reply]]
    concurrency: int | None = None
    now: Callable[[], float] = time.perf_counter
    sleep: Sleep = asyncio.sleep
    told: Told = lambda done, total: None
    at_once: int = 0
    most_at_once: int = 0
    done: int = 0
    late: float = 0.0

    async def run(self, asks: Sequence[Ask]) -> Result:
        """Send all of them; wait for the last."""
        places = asyncio.Semaphore(self.concurrency or len(asks) or 1)
        start = self.now()
        tasks = []
        try:
            for ask in sorted(asks, key=lambda ask: ask.at):
                wait = start + ask.at - self.now()
                if wait > 0:
                    await self.sleep(wait)
                await places.acquire()
                self.late = max(self.late, self.now() - start - ask.at)
                tasks.append(asyncio.create_task(self._one(ask, places, len(asks))))
            replies = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        first = min((reply.begun for reply in replies), default=start)
        last = max((reply.end for reply in replies), default=start)
        return Result(replies, last - first, self.most_at_once, self.late)

    async def _one(self, ask: Ask, places: asyncio.Semaphore, total: int) -> Reply:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.send(ask)
        finally:
            self.at_once -= 1
            self.done += 1
            places.release()
            self.told(self.done, total)


async def run_load(
    endpoint: Endpoint,
    asks: Sequence[Ask],
    *,
    concurrency: int | None = None,
    warm_up: int = 0,
    prompts: str = "auto",
    told: Told = lambda done, total: None,
) -> Result:
    """Put a load on an endpoint: requests that do not count first, then the Asks.

    `prompts` is "ids", "text", or "auto": ids where the endpoint takes them.
    """
    async with new_session(endpoint) as session:
        client = Client(session, endpoint)
        notes: list[str] = []
        if prompts == "text" or (prompts == "auto" and not await takes_ids(client, asks, notes)):
            asks = as_text(asks)
        first = [Ask(ask.prompt, ask.max_tokens) for ask in list(asks)[:warm_up]]
        if first:
            warm = await Load(client.send, concurrency).run(first)
            failed = [reply.error for reply in warm.replies if reply.error]
            notes += [f"{len(failed)} warm-up requests failed: {failed[0]}"] if failed else []
        result = await Load(client.send, concurrency, told=told).run(asks)
    result.notes = notes + result.notes
    return result


async def takes_ids(client: Client, asks: Sequence[Ask], notes: list[str]) -> bool:
    """Whether prompts may be ids: one is tried. The note says what is sent instead."""
    if client.endpoint.chat or not any(isinstance(ask.prompt, tuple) for ask in asks):
        if client.endpoint.chat:
            notes.append("prompts are words, about one a token: a chat takes no ids")
        return False
    reply = await client.send(Ask((1, 2, 3), 1))
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
