"""Several replicas behind one address: requests go to one, answers come back as they are made.

A request goes to the replica that `Balance` chooses. If that one cannot be reached, dies before the
first byte of its answer, or says that it is full, the next one is asked; what the client sent is
kept until then. Invariant: a client that goes away takes its request with it; an answer that has
begun is never begun again; a replica gets the path of a request and nothing else to say where it
goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import yarl
from aiohttp import web

from ...core.errors import TilegradError
from ..access import Access, key_of
from ..refused import Refused
from ..settings import Settings
from ..stream import DONE, event
from .balance import LIMIT, Balance, Replica
from .prefixes import chain, prompt_bytes
from .summed import summed_live, summed_metrics

EVERY = 2.0  # seconds between two looks at a replica
HEALTH = 5.0  # seconds that a look may take
LARGE = 1 << 15  # bytes of a body that is parsed off the event loop
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
        self.retries = self.open = 0
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
                level = logging.INFO if up else logging.WARNING
                log.log(level, "replica %s is %s", one.name, "up" if up else "down")
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
        body = await request.read()
        hashes = await self.hashes(request, body)
        self.open += 1
        self._idle.clear()
        try:
            return await self._try_all(request, body, hashes)
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()

    async def hashes(self, request: web.Request, body: bytes) -> list[bytes]:
        """The chunks of a prompt; whoever has another key shares none of them."""
        if request.method != "POST" or not body:
            return []

        def work() -> list[bytes]:
            try:
                prompt = prompt_bytes(json.loads(body))
            except (ValueError, RecursionError):
                return []
            return chain(prompt, hashlib.sha256(key_of(request).encode()).digest())

        return work() if len(body) < LARGE else await asyncio.to_thread(work)

    async def _try_all(
        self, request: web.Request, body: bytes, hashes: list[bytes]
    ) -> web.StreamResponse:
        tried: list[Replica] = []
        refused: web.Response | None = None
        while (one := self.balance.choose(hashes, tried)) is not None:
            self.retries += bool(tried)
            tried.append(one)
            one.load += 1
            one.sent += 1
            try:
                async with self._begun(request, one, body) as (answer, first):
                    if answer.status not in FULL:
                        one.prefixes.add(hashes)
                        return await self._pass(request, one, answer, first)
                    refused = web.Response(
                        body=first + await answer.read(),
                        status=answer.status,
                        headers=kept(answer.headers),
                    )
            except NotBegun:
                self.lost(one)
            finally:
                one.load -= 1
        if refused is not None:
            return refused
        raise Refused("no replica is ready", status=503, retry_after=2)

    def headers(self, request: web.Request) -> list[tuple[str, str]]:
        """The headers that a replica gets."""
        found = kept(request.headers)
        if not self.inner_key:
            return found
        found = [pair for pair in found if pair[0].lower() not in ("authorization", "x-api-key")]
        return [*found, ("Authorization", f"Bearer {self.inner_key}")]

    @contextlib.asynccontextmanager
    async def _begun(
        self, request: web.Request, one: Replica, body: bytes
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes]]:
        """A replica's answer and its first bytes; NotBegun if it came to none."""
        url = yarl.URL(one.url + request.rel_url.raw_path_qs, encoded=True)
        headers = self.headers(request)
        answer = None
        try:
            try:
                answer = await self.session.request(
                    request.method, url, data=body or None, headers=headers, allow_redirects=False
                )
                first = await answer.content.readany()
            except GONE as error:
                raise NotBegun("no byte of an answer came") from error
            yield answer, first
        finally:
            if answer is not None:
                answer.close()

    async def _pass(
        self, request: web.Request, one: Replica, answer: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """Write an answer as it comes."""
        response = web.StreamResponse(status=answer.status, headers=kept(answer.headers))
        if answer.headers.get("Content-Length"):
            response.content_length = int(answer.headers["Content-Length"])
        await response.prepare(request)
        await response.write(first)
        try:
            async for data in answer.content.iter_any():
                await response.write(data)
        except aiohttp.ClientError:
            self.lost(one)
            if answer.content_type != "text/event-stream":
                if request.transport is not None:
                    request.transport.abort()  # an answer that is cut off must not look whole
                return response
            error = Refused("the replica that answered is gone", status=502)
            await response.write(event(error.openai()) + DONE)
        await response.write_eof()
        return response

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
