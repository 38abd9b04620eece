"""Several replicas behind one address: requests go to one, answers come back as they are made.

A request goes to the replica that `Balance` chooses. If that one cannot be reached, dies before the
first byte of its answer, or says that it is full, the next one is asked. A stream whose replica
dies later goes on in another one, after the tokens that its client has (`resumed.py`); where that
cannot be, it ends in an error event. Invariant: a client that goes away takes its request with it;
what it has of an answer never changes; a replica gets the path of a request and nothing else to say
where it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import yarl
from aiohttp import web

from ...core.errors import TilegradError
from ..access import Access, key_of
from ..refused import UNREADABLE, Refused
from ..resumed import HEADER, Passed
from ..settings import Settings
from ..stream import DONE, event
from .balance import LIMIT, Balance, Replica
from .prefixes import chain, prompt_bytes
from .summed import summed_live, summed_metrics

EVERY = 2.0  # seconds between two looks at a replica
HEALTH = 5.0  # seconds that a look may take
LARGE_BODY = 1 << 15  # bytes of a body that is parsed off the event loop
FULL = (429, 503)  # another replica may have room
HOP = frozenset(  # of one connection, not of the request
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "origin",
        "expect",
        HEADER.lower(),
    ]
)
GONE = (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError)
log = logging.getLogger("tilegrad.serve")


class Router:
    """Passes requests on."""

    def __init__(
        self,
        settings: Settings,
        replicas: Sequence[Replica],
        limit: int = LIMIT,
        inner_key: str = "",
    ) -> None:
        """`inner_key` is what replicas ask for where clients need no key."""
        self.settings, self.inner_key = settings, inner_key
        self.balance = Balance(list(replicas), limit)
        self.retries = self.resumed = self.open = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._looking: asyncio.Task[None] | None = None
        self.session: aiohttp.ClientSession

    @property
    def replicas(self) -> list[Replica]:
        """All of them, in order."""
        return self.balance.replicas

    async def start(self) -> None:
        """Begin to look after the replicas."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=HEALTH),
            auto_decompress=False,
            read_bufsize=1 << 20,
        )
        self._looking = asyncio.get_running_loop().create_task(self._look_after())

    async def drain(self, seconds: float) -> bool:
        """Let nobody in any more and wait for those inside; whether all ended."""
        self.draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self.open == 0

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await self.session.close()

    # ---- replicas -------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(EVERY)

    async def look(self) -> None:
        """Ask every replica how it is."""
        await asyncio.gather(*[self._look_at(one) for one in self.replicas if one.url])

    async def _look_at(self, one: Replica) -> None:
        url = one.url
        timeout = aiohttp.ClientTimeout(total=HEALTH)
        try:
            async with self.session.get(f"{url}/health", timeout=timeout) as answer:
                up = answer.status == 200
        except GONE:
            up = False
        if one.url == url:
            if one.up != up:
                severity = logging.INFO if up else logging.WARNING
                log.log(severity, "replica %s is %s", one.name, "up" if up else "down")
            one.up = up

    def lost(self, one: Replica) -> None:
        """A replica did not answer: no more requests until it is seen again."""
        one.up = False
        one.failed += 1
        log.warning("replica %s is lost", one.name)

    # ---- a request ------------------------------------------------------------------------------

    async def passed_on(self, request: web.Request) -> web.StreamResponse:
        """The answer of some replica."""
        if self.draining:
            raise Refused("the server is shutting down", status=503, retry_after=5)
        data = await request.read()
        body = await self.parsed(request, data)
        asked = Asked(request, data, body, self.hashes(request, body))
        self.open += 1
        self._idle.clear()
        try:
            return await self._try_all(asked)
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()

    async def parsed(self, request: web.Request, data: bytes) -> Any:
        """The body of a request as data; None where it is none."""
        if request.method != "POST" or not data:
            return None

        def work() -> Any:
            try:
                return json.loads(data)
            except (ValueError, RecursionError):
                return None

        return work() if len(data) < LARGE_BODY else await asyncio.to_thread(work)

    def hashes(self, request: web.Request, body: Any) -> list[bytes]:
        """The chunks of a prompt; who has another key, or asks another model, shares none."""
        if body is None:
            return []
        model = body.get("model") if isinstance(body, dict) else None
        apart = f"{key_of(request)}\n{model}"  # an adapter's pages are its own
        return chain(prompt_bytes(body), hashlib.sha256(apart.encode("utf-8", "replace")).digest())

    async def _try_all(self, asked: Asked) -> web.StreamResponse:
        refused: web.Response | None = None
        async with contextlib.aclosing(self._each(asked, asked.data)) as each:
            async for one, answer, first in each:
                if answer.status not in FULL:
                    one.prefixes.add(asked.hashes)
                    return await self._pass(asked, one, answer, first)
                refused = web.Response(
                    body=first + await answer.read(),
                    status=answer.status,
                    headers=kept(answer.headers),
                )
        if refused is not None:
            return refused
        raise Refused("no replica is ready", status=503, retry_after=2)

    async def _each(
        self, asked: Asked, data: bytes
    ) -> AsyncGenerator[tuple[Replica, aiohttp.ClientResponse, bytes]]:
        """Replicas that were not tried yet, best first, each with the begin of its answer."""
        while (one := self.balance.choose(asked.hashes, asked.tried)) is not None:
            self.retries += bool(asked.tried)
            asked.tried.append(one)
            one.load += 1
            one.sent += 1
            try:
                async with self._begun(asked, one, data) as (answer, first):
                    yield one, answer, first
            except NotBegun:
                self.lost(one)
            finally:
                one.load -= 1

    def headers(self, request: web.Request) -> list[tuple[str, str]]:
        """The headers that a replica gets."""
        found = kept(request.headers)
        if not self.inner_key:
            return found
        found = [pair for pair in found if pair[0].lower() not in ("authorization", "x-api-key")]
        return [*found, ("Authorization", f"Bearer {self.inner_key}")]

    @contextlib.asynccontextmanager
    async def _begun(
        self, asked: Asked, one: Replica, data: bytes
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes]]:
        """A replica's answer and its first bytes; NotBegun if it came to none."""
        request = asked.request
        url = yarl.URL(one.url + request.rel_url.raw_path_qs, encoded=True)
        headers = self.headers(request)
        if asked.passed is not None:
            headers.append((HEADER, asked.passed.name))
        answer = None
        try:
            try:
                answer = await self.session.request(
                    request.method, url, data=data or None, headers=headers, allow_redirects=False
                )
                first = await answer.content.readany()
            except GONE as error:
                raise NotBegun("no byte of an answer came") from error
            yield answer, first
        finally:
            if answer is not None:
                answer.close()

    async def _pass(
        self, asked: Asked, one: Replica, answer: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """Write an answer as it comes."""
        response = web.StreamResponse(status=answer.status, headers=kept(answer.headers))
        if answer.headers.get("Content-Length"):
            response.content_length = int(answer.headers["Content-Length"])
        await response.prepare(asked.request)
        if HEADER not in answer.headers:
            asked.passed = None
        if not await self._copy(asked, one, answer, first, response):
            if answer.content_type != "text/event-stream":
                if asked.request.transport is not None:
                    asked.request.transport.abort()  # what is cut off must not look whole
                return response
            if not await self._go_on(asked, response):
                await response.write(gone(asked.request))
        await response.write_eof()
        return response

    async def _copy(
        self,
        asked: Asked,
        one: Replica,
        answer: aiohttp.ClientResponse,
        data: bytes,
        response: web.StreamResponse,
    ) -> bool:
        """Pass on what a replica writes; whether it came to its end."""
        passed = asked.passed
        while data:
            await response.write(data if passed is None else passed.feed(data))
            try:
                data = await answer.content.readany()
            except GONE:
                self.lost(one)
                return False
        if passed is not None:
            await response.write(passed.finish())
        return True

    async def _go_on(self, asked: Asked, response: web.StreamResponse) -> bool:
        """Have another replica go on with a stream; whether one came to its end."""
        lost = True
        while asked.passed is not None and lost:
            data, lost = json.dumps(asked.passed.body(asked.body)).encode(), False
            async with contextlib.aclosing(self._each(asked, data)) as each:
                async for one, answer, first in each:
                    if answer.status == 200:
                        self.resumed += 1
                        if await self._copy(asked, one, answer, first, response):
                            return True
                        lost = True  # again, by those that are left
                        break
                    if answer.status not in FULL:
                        break
        return False

    # ---- all replicas ---------------------------------------------------------------------------

    async def asked(self, request: web.Request, path: str) -> list[bytes]:
        """What all replicas that are up answer to a question."""

        async def one(replica: Replica) -> bytes | None:
            timeout = aiohttp.ClientTimeout(total=HEALTH)
            try:
                async with self.session.get(
                    replica.url + path, headers=self.headers(request), timeout=timeout
                ) as answer:
                    return await answer.read() if answer.status == 200 else None
            except GONE:
                return None

        found = await asyncio.gather(*[one(r) for r in self.replicas if r.up])
        return [body for body in found if body is not None]


@dataclass
class Asked:
    """A request that is passed on."""

    request: web.Request
    data: bytes
    body: Any  # as data, if it is any
    hashes: list[bytes]
    tried: list[Replica] = field(default_factory=list)
    passed: Passed | None = None  # of a stream

    def __post_init__(self) -> None:
        if isinstance(self.body, dict) and self.body.get("stream") is True:
            self.passed = Passed()


def gone(request: web.Request) -> bytes:
    """The end of a stream whose replica is gone, as clients of its route know it."""
    error = Refused("the replica that answered is gone", status=502)
    if request.path.startswith("/v1/messages"):
        return f"event: error\ndata: {json.dumps(error.anthropic())}\n\n".encode()
    return event(error.openai()) + DONE


class NotBegun(TilegradError):
    """A replica gave no byte of an answer."""


def kept(headers: Any) -> list[tuple[str, str]]:
    """The headers that are passed on."""
    return [(name, value) for name, value in headers.items() if name.lower() not in HOP]


# ---- routes -------------------------------------------------------------------------------------

ROUTER: web.AppKey[Router] = web.AppKey("router", Router)


def make_router_app(router: Router) -> web.Application:
    """The application of a router."""
    access = Access(router.settings)

    @web.middleware
    async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
        """Only those who may ask; errors as clients know them."""
        try:
            access.check(request)
            if request.method == "OPTIONS":
                return access.preflight()
            response: web.StreamResponse = await handler(request)
            return response
        except Refused as error:
            return error_response(request, error)
        except web.RequestPayloadError:
            return error_response(request, Refused(UNREADABLE, status=400))
        except web.HTTPRequestEntityTooLarge:
            return error_response(request, Refused("the body is too large", status=413))

    async def marked(request: web.Request, response: web.StreamResponse) -> None:
        access.mark(request, response)

    app = web.Application(middlewares=[guarded], client_max_size=router.settings.limits.body)
    app.on_response_prepare.append(marked)
    app[ROUTER] = router
    app.router.add_get("/health", health)
    app.router.add_get("/ping", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/live", live)
    app.router.add_route("*", "/{path:.*}", router.passed_on)
    return app


def error_response(request: web.Request, error: Refused) -> web.Response:
    """An error as the clients of a route know it."""
    shaped = error.anthropic if request.path.startswith("/v1/messages") else error.openai
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="tilegrad", charset="UTF-8"'
    return web.json_response(shaped(), status=error.status, headers=headers)


async def health(request: web.Request) -> web.StreamResponse:
    """200 while some replica serves."""
    router = request.app[ROUTER]
    up = sum(one.up for one in router.replicas)
    state = "draining" if router.draining else "ready" if up else "loading"
    body = {"status": state, "replicas": len(router.replicas), "up": up}
    return web.json_response(body, status=200 if state == "ready" else 503)


async def metrics(request: web.Request) -> web.StreamResponse:
    """What all replicas counted, and the router."""
    router = request.app[ROUTER]
    texts = [body.decode() for body in await router.asked(request, "/metrics")]
    lines = [
        "# TYPE tilegrad:router_replica_up gauge",
        *[f'tilegrad:router_replica_up{{replica="{r.name}"}} {int(r.up)}' for r in router.replicas],
        "# TYPE tilegrad:router_requests_total counter",
        *[
            f'tilegrad:router_requests_total{{replica="{r.name}"}} {r.sent}'
            for r in router.replicas
        ],
        "# TYPE tilegrad:router_failures_total counter",
        *[
            f'tilegrad:router_failures_total{{replica="{r.name}"}} {r.failed}'
            for r in router.replicas
        ],
        "# TYPE tilegrad:router_retries_total counter",
        f"tilegrad:router_retries_total {router.retries}",
        "# TYPE tilegrad:router_resumed_total counter",
        f"tilegrad:router_resumed_total {router.resumed}",
    ]
    text = summed_metrics(texts) + "\n".join(lines) + "\n"
    return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def live(request: web.Request) -> web.StreamResponse:
    """What happens now, over all replicas."""
    router = request.app[ROUTER]
    views = [json.loads(body) for body in await router.asked(request, "/v1/live")]
    shown = [{"name": r.name, "up": r.up, "load": r.load} for r in router.replicas]
    return web.json_response({**summed_live(views), "replicas": shown})


__all__ = ["Router", "make_router_app"]
