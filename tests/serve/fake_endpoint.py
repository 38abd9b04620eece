"""An OpenAI endpoint of a script, in the test's own event loop; and a clock that only it moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class Clock:
    """Seconds that pass when somebody says so; counts who looked."""

    def __init__(self) -> None:
        self.time = 0.0
        self.looked = 0

    def __call__(self) -> float:
        self.looked += 1
        return self.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.time += seconds


class FakeEndpoint:
    """Answers as a server of OpenAI's kind; gaps are what passes before each part.

    With a Clock it moves that and waits until the client has looked; without one it sleeps.
    """

    def __init__(self, gaps: Sequence[float] = (0.0, 0.0), clock: Clock | None = None) -> None:
        self.gaps, self.clock = gaps, clock
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.usage = True
        self.takes_ids = True
        self.per_part = 1  # tokens
        self.fails: dict[int, Any] = {}  # by number: a status, or "torn", or "event"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        failure = self.fails.get(number)
        if isinstance(failure, int):
            error = {"error": {"message": f"refused with {failure}", "type": "x"}}
            return web.json_response(error, status=failure)
        chat = "messages" in body
        if not chat and isinstance(body["prompt"], list) and not self.takes_ids:
            return web.json_response({"error": {"message": "no ids here"}}, status=400)
        return await self._stream(request, body, failure, chat)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], failure: Any, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if chat:
            await self._put(response, {"choices": [{"delta": {"role": "assistant"}}]})
        for number, gap in enumerate(self.gaps):
            await self._pass(gap)
            choice = {"delta": {"content": "a"}} if chat else {"text": "a"}
            if number == 1 and failure == "event":
                await self._put(response, {"error": {"message": "broke"}})
            if number == 1 and failure == "torn":
                return response
            await self._put(response, {"choices": [{**choice, "finish_reason": None}]})
        end = {"delta": {}} if chat else {"text": ""}
        await self._put(response, {"choices": [{**end, "finish_reason": "length"}]})
        if self.usage:
            prompt = 7 if chat or isinstance(body["prompt"], str) else len(body["prompt"])
            made = len(self.gaps) * self.per_part
            used = {"prompt_tokens": prompt, "completion_tokens": made}
            await self._put(response, {"choices": [], "usage": used})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _pass(self, seconds: float) -> None:
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            self.clock.time += seconds

    async def _put(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        looked = self.clock.looked if self.clock else 0
        text = json.dumps(event)
        # Cut where it hurts: the client must put events together again.
        await response.write(b": ping\n\ndata: " + text[:9].encode())
        await response.write(text[9:].encode() + b"\r\n\r\n")
        while self.clock is not None and self.clock.looked == looked:
            await asyncio.sleep(0.001)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address while it runs."""
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()
