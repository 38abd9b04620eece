"""One server: the model's words, the engine process, what is counted, and how an answer is made.

Invariant: a request that was let in ends in an answer, an error or a cancelled Generation, and
leaves nothing in the engine; once draining has begun no other is let in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from ..core.errors import UserError
from .access import ID, SALT
from .api.fields import Fields, parsed
from .api.parameters import Ask
from .engine.generation import Generation
from .engine.supervise import Supervisor
from .metrics import Metrics
from .model import ServedModel
from .refused import Refused
from .resumed import HEADER, mark
from .settings import Settings
from .stream import Collected, Events

LARGE_BODY = 1 << 15  # bytes of a body that is parsed off the event loop
WORKERS = 4
log = logging.getLogger("tilegrad.serve")

Parse = Callable[[Fields], Ask]
Body = Callable[[list[Generation], Collected], Any]
Shape = Callable[[Events], Any]


class Watched:
    """A Listener before another one: it times and counts, and marks tokens for a router."""

    def __init__(self, listener: Any, metrics: Metrics, marks: bool) -> None:
        self.listener, self.metrics, self.marks = listener, metrics, marks

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """Note when a token came, and pass it on."""
        now = one.last
        if one.first:
            self.metrics.between.observe(now - one.before)
        else:
            one.first = now
            self.metrics.first.observe(now - one.begun)
        one.before = now
        self.listener.piece(one, text, token, more)
        if self.marks and one.finish is None:
            self.listener.events.send(mark(one.index, one.made[-1]))

    def ended(self, one: Generation) -> None:
        """Count an end, and pass it on."""
        self.metrics.ended(one)
        self.listener.ended(one)
        if self.marks and self.listener.left and one.error is None:
            self.listener.events.send(mark(one.index, one.made[-1]))


class Server:
    """What the routes work with."""

    def __init__(self, settings: Settings, model: ServedModel, tell: Any = None) -> None:
        if model.name in settings.opening.get("adapters", {}):
            raise UserError(
                "an adapter has the name of the model", op="serve", got=model.name, hint="--name"
            )
        self.settings, self.model = settings, model
        self.metrics = Metrics(model.name)
        self.engine = Supervisor(
            {"model": settings.model, **settings.opening},
            command=settings.command,
            tell=tell,
            stepped=self.metrics.stepped,
            died=self.metrics.restarted,
            silence=settings.silence,
        )
        self.pool = ThreadPoolExecutor(WORKERS, "words")
        self.draining = False
        self.open = 0  # requests of clients that are not answered yet
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Start the engine and wait until it is ready."""
        self.engine.start()
        await self.engine.ready()
        self.model.learn(self.engine.facts)

    async def drain(self, seconds: float) -> bool:
        """Let nobody in any more and wait for those inside; whether all ended."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the engine."""
        await self.engine.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    # ---- a request ------------------------------------------------------------------------------

    def admit(self, count: int = 1) -> None:
        """Refuse what cannot be served now."""
        if self.draining:
            raise Refused("the server is shutting down", status=503, retry_after=5)
        if self.engine.state in ("loading", "dead", "closed"):
            word = "loading" if self.engine.state == "loading" else "not running"
            raise Refused(f"the model is {word}", status=503, retry_after=5)
        room = self.model.requests + self.settings.queue - len(self.engine.live)
        if count > room:
            raise Refused(
                "too many requests wait already; try again later",
                status=429,
                code="queue_full",
                retry_after=1,
            )

    async def body(self, request: web.Request) -> Fields:
        """The fields of a request's body."""
        limits = self.settings.limits
        try:
            data = await asyncio.wait_for(request.read(), limits.read)
        except asyncio.TimeoutError:
            raise Refused("the body did not come in time", status=408) from None
        if len(data) < LARGE_BODY:
            return parsed(data, limits.depth)
        return await self.off_loop(parsed, data, limits.depth)

    async def off_loop(self, work: Callable[..., Any], *given: Any) -> Any:
        """Run something slow in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *given)

    async def answer(
        self, request: web.Request, ask: Ask, body: Body, shape: Shape
    ) -> web.StreamResponse:
        """Make an answer: in one piece, shaped by `body`, or as the events of `shape`."""
        self.admit(len(ask.prompts) * ask.n)
        salt = request.get(SALT, "")
        self.open += 1
        self._idle.clear()
        try:
            if ask.stream:
                events = Events(request, self.settings.limits)
                listener: Any = shape(events)
                ones = self.begin(ask, salt, listener)
                return await self._finish(ones, events.run, request, ask.name)
            listener = Collected(len(ask.prompts) * ask.n)

            async def whole(headers: dict[str, str]) -> web.StreamResponse:
                await listener.done
                return web.json_response(body(ones, listener), headers=headers)

            ones = self.begin(ask, salt, listener)
            return await self._finish(ones, whole, request)
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()

    def begin(self, ask: Ask, salt: str, listener: Any) -> list[Generation]:
        """Give the engine all that is asked for."""
        watched = Watched(listener, self.metrics, bool(ask.name))
        ones = []
        for index, spec in enumerate(ask.specs()):
            if salt:
                spec["salt"] = salt
            text = self.model.detokenizer(
                ask.stop, ask.include_stop, ask.show_special, spec["min_tokens"]
            )
            ones.append(Generation(spec, text, listener, index))
        listener.ones = ones
        if ask.made is not None:
            replay(ones, ask.made, listener)
        for one in ones:
            one.listener = watched
            if one.finish is None:
                self.engine.add(one)
                self.metrics.began(one)
        return ones

    async def _finish(
        self, ones: list[Generation], run: Any, request: web.Request, name: str = ""
    ) -> web.StreamResponse:
        """See an answer to its end, or to its time limit, or to its client's leaving."""

        def expire() -> None:
            for one in ones:
                if one.finish is None:
                    self.engine.cancel(one)
                    one.fail(Refused("the request took too long", status=504, code="timeout"))

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.settings.timeout, expire)
        try:
            return await run({"X-Request-Id": request[ID], **({HEADER: name} if name else {})})
        finally:
            timer.cancel()
            for one in ones:
                if one.finish is None:
                    self.engine.cancel(one)
                    one.finish = "abort"
                    self.metrics.ended(one)


def replay(ones: list[Generation], made: list[list[int]], listener: Any) -> None:
    """Bring answers to where another replica left them, without a word to their client."""
    listener.events.muted = True
    for one, tokens in zip(ones, made, strict=True):
        one.replay(tokens)
    listener.events.muted = False
    if not listener.left or not all(one.finish or one.resumes for one in ones):
        raise Refused("this answer cannot be gone on with", status=409)


SERVER: web.AppKey[Server] = web.AppKey("server", Server)


__all__ = ["SERVER", "Server"]
