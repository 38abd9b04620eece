"""The router: who is chosen, what is passed on, replicas that fail, numbers of all together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from live_server import LONG, scripted_server

from tilegrad.serve.resumed import HEADER, Passed
from tilegrad.serve.router import replicas as processes
from tilegrad.serve.router.balance import Balance, Replica
from tilegrad.serve.router.prefixes import CHUNK, Prefixes, chain, prompt_bytes
from tilegrad.serve.router.replica_process import settings_of, settings_text
from tilegrad.serve.router.replicas import Processes
from tilegrad.serve.router.router import Router, make_router_app
from tilegrad.serve.router.summed import summed_live, summed_metrics
from tilegrad.serve.run import listen_with
from tilegrad.serve.settings import Settings

HERE = Path(__file__).parent


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LONG))


# ---- prefixes and balance -----------------------------------------------------------------------


def test_chains_share_what_prompts_share() -> None:
    shared = b"s" * (3 * CHUNK)
    one, two = chain(shared + b"a" * CHUNK), chain(shared + b"b" * CHUNK + b"rest")
    assert one[:3] == two[:3] and one[3] != two[3] and len(two) == 4
    assert chain(shared, b"other key")[0] != one[0]
    assert chain(b"x" * (CHUNK - 1)) == []
    known = Prefixes(most=4)
    known.add(one)
    assert known.match(two) == 3 and known.match(one) == 4
    known.add(chain(b"z" * (2 * CHUNK)))
    assert len(known) == 4 and known.match(one) == 2, "the end of a prompt goes first"
    known.clear()
    assert known.match(one) == 0


def test_what_a_model_reads_of_a_body() -> None:
    a = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1}
    b = {
        "temperature": 0,
        "messages": [{"content": [{"type": "text", "text": "hi"}], "role": "user"}],
    }
    assert prompt_bytes(a) == prompt_bytes(b) == b"user\nhi"
    assert prompt_bytes({"prompt": [1, 2, 3]}) == b"[1, 2, 3]"
    assert prompt_bytes({"prompt": ["a", "b"]}) == b"a\nb" and prompt_bytes([1]) == b""
    assert prompt_bytes({"system": "s", "messages": "x", "input": "y"}) == b"s\nx\ny"


def test_the_replica_that_knows_a_prompt_is_chosen() -> None:
    one, two = Replica("1", "u", True), Replica("2", "u", True)
    balance = Balance([one, two], limit=3)
    hashes, others = chain(b"p" * 5 * CHUNK), chain(b"q" * 5 * CHUNK)
    first = balance.choose(hashes)
    assert first is not None
    first.prefixes.add(hashes)
    other = two if first is one else one
    assert all(balance.choose(hashes) is first for _ in range(5))
    assert balance.choose(others) is other, "it remembers less"
    first.load = 3
    assert balance.choose(hashes) is first
    first.load = 4
    assert balance.choose(hashes) is other, "too busy for the sake of its cache"
    first.load, first.up = 0, False
    assert balance.choose(hashes) is other
    assert balance.choose(hashes, [other]) is None
    first.moved("elsewhere")
    assert not len(first.prefixes) and first.url == "elsewhere"


def test_loads_stay_near_each_other() -> None:
    group = [Replica(str(i), "u", True) for i in range(3)]
    balance = Balance(group, limit=2)
    hashes = chain(b"p" * 2 * CHUNK)
    for _ in range(30):
        chosen = balance.choose(hashes)
        assert chosen is not None
        chosen.load += 1
        chosen.prefixes.add(hashes)
        loads = [one.load for one in group]
        assert max(loads) - min(loads) <= 3
    assert sum(loads) == 30


# ---- fake replicas ------------------------------------------------------------------------------


class Fake:
    """A replica that answers by a script: "fine", a status, or how it dies."""

    def __init__(self, name: str, does: str = "fine") -> None:
        self.name, self.does = name, does
        self.seen: list[web.Request] = []
        self.gone = asyncio.Event()
        self.hold: asyncio.Event | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        body = await request.json()
        if self.does.isdigit():
            return web.json_response({"error": {"message": "full"}}, status=int(self.does))
        if self.does == "dies":
            request.transport.abort()  # type: ignore[union-attr]
            return web.Response()
        if not body.get("stream"):
            return web.json_response({"who": self.name}, headers={"X-Request-Id": "abc"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.does == "dies after headers":
            request.transport.abort()  # type: ignore[union-attr]
            return response
        try:
            await response.write(b'data: {"who": "%b"}\n\n' % self.name.encode())
            if self.does == "dies later":
                request.transport.abort()  # type: ignore[union-attr]
                return response
            if self.hold is not None:
                await self.hold.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if self.does == "loading" else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'# TYPE a counter\na{{x="1"}} {len(self.seen)}\n')

    async def live(self, request: web.Request) -> web.Response:
        return web.json_response({"running": 1, "model": "m", "requests": [{"id": 7}]})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/{path:.*}", self.answer)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/live", self.live)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class Routed:
    """A router before some fakes, and a client of it."""

    def __init__(self, *fakes: Fake, urls: Sequence[str] = (), **settings: Any) -> None:
        self.fakes, self.urls = fakes, urls
        self.settings = Settings("m", "m", port=0, **settings)

    async def __aenter__(self) -> Routed:
        self.stack = contextlib.AsyncExitStack()
        urls = [await self.stack.enter_async_context(f.running()) for f in self.fakes]
        group = [Replica(f.name, url, True) for f, url in zip(self.fakes, urls, strict=True)]
        group += [Replica(url, url, True) for url in self.urls]
        self.router = Router(self.settings, group)
        await self.router.start()
        self.stack.push_async_callback(self.router.close)
        await self.router.look()
        self.runner, self.port = await listen_with(make_router_app(self.router), self.settings)
        self.stack.push_async_callback(self.runner.cleanup)
        self.client = await self.stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.stack.aclose()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, body: Any, path: str = "/v1/chat/completions", **more: Any) -> Any:
        return self.client.post(self.url + path, json=body, **more)


def routed(*fakes: Fake, **settings: Any) -> Callable[[Any], Any]:
    """Run an async test before a router over some fakes."""

    def go(work: Callable[[Routed], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with Routed(*fakes, **settings) as inside:
                await work(inside)

        run(whole())

    return go


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_conversations_stay_with_their_replica() -> None:
    fakes = Fake("a"), Fake("b")

    async def work(inside: Routed) -> None:
        where: dict[str, set[str]] = {}
        for turn in range(3):
            for talk in ("x", "y", "z", "w"):
                text = talk * 600 + "more" * turn
                async with inside.post(chat(text)) as answer:
                    assert answer.headers["X-Request-Id"] == "abc"
                    where.setdefault(talk, set()).add((await answer.json())["who"])
        assert all(len(names) == 1 for names in where.values()), where
        assert {name for names in where.values() for name in names} == {"a", "b"}
        assert all(one.load == 0 for one in inside.router.replicas)

    routed(*fakes)(work)


@pytest.mark.parametrize("does", ["dies", "dies after headers", "503", "429"])
def test_another_replica_answers_before_the_first_byte(does: str) -> None:
    bad, good = Fake("bad", does), Fake("good")

    async def work(inside: Routed) -> None:
        for number in range(4):
            async with inside.post(chat(f"{number}" * 600, stream=True)) as answer:
                assert answer.status == 200 and b"good" in await answer.read()
        assert len(good.seen) == 4 and bad.seen, "the bad one was asked too"
        assert all(one.load == 0 for one in inside.router.replicas)
        if does.startswith("dies"):
            assert len(bad.seen) == 1, "not again until it is seen"
            assert not inside.router.replicas[0].up and inside.router.retries == 1
            await inside.router.look()
            assert inside.router.replicas[0].up

    routed(bad, good)(work)


def test_a_replica_that_dies_in_the_middle_is_an_error_in_the_stream() -> None:
    bad = Fake("bad", "dies later")

    async def work(inside: Routed) -> None:
        async with inside.post(chat("x", stream=True)) as answer:
            events = (await answer.read()).decode().split("\n\n")
        assert "bad" in events[0] and "gone" in events[1] and events[2] == "data: [DONE]"
        assert json.loads(events[1].removeprefix("data: "))["error"]["message"]
        assert not inside.router.replicas[0].up

    routed(bad)(work)


def blocks(events: bytes) -> list[str]:
    """The events of a stream, without signs of life."""
    *found, last = events.decode().split("\n\n")
    assert last == ""
    return [block for block in found if not block.startswith(":")]


def test_marks_say_what_may_be_passed_on() -> None:
    """However a stream is cut, what comes out is what stands before the last mark."""
    stream = b"data: a\n\ndata: : made 9 9\n\n: made 0 5\n\n: made 1 7\n\n: ping\n\n"
    stream += b"data: b\n\n: made 0 6\n\ndata: c\n\ndata: d"
    for size in (1, 2, 7, 1000):
        passed = Passed()
        out = b"".join(passed.feed(stream[i : i + size]) for i in range(0, len(stream), size))
        assert out == b"data: a\n\ndata: : made 9 9\n\n: ping\n\ndata: b\n\n"
        assert passed.made == {0: [5, 6], 1: [7]} and passed.held == b"data: c\n\ndata: d"
        assert passed.body({"n": 3})["tilegrad_made"] == [[5, 6], [7], []]
        assert passed.finish() == b"" and passed.feed(b": ping\n\n") == b": ping\n\n"
    body = {"prompt": ["a", "b"], "n": 2}
    assert Passed().body(body) == {**body, "tilegrad_made": [[], [], [], []]}


STREAMS = {
    "/v1/chat/completions": chat("SLOW SAY one two three four", n=2),
    "/v1/responses": {"input": "SLOW SAY one two three four"},
    "/v1/messages": chat("SLOW SAY one two three four", max_tokens=90),
}


@pytest.fixture(scope="module")
def pair(tiny_path: Path) -> Iterator[tuple[Any, Any]]:
    """Two replicas that do what prompts say."""
    with scripted_server(tiny_path) as one, scripted_server(tiny_path) as two:
        yield one, two


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("kept", [0, 3, 8])
def test_a_stream_goes_on_in_another_replica(pair: Any, path: str, kept: int) -> None:
    """A replica breaks off after some marks: the client sees the stream of one that did not."""
    body = {**STREAMS[path], "stream": True}
    if path == "/v1/chat/completions":
        body["stream_options"] = {"include_usage": True}

    async def work(inside: Routed) -> None:
        async with inside.post(body, path) as answer:
            wanted = blocks(await answer.read())
            assert HEADER not in answer.headers
        with cutting(inside.router, kept):
            async with inside.post(body, path) as answer:
                found = blocks(await answer.read())
        assert inside.router.resumed == 1 and len(wanted) > 8
        assert alike(found) == alike(wanted)
        assert all(replica.load == 0 for replica in inside.router.replicas)

    routed(urls=[one.url for one in pair])(work)


@contextlib.contextmanager
def cutting(router: Router, marks: int) -> Iterator[None]:
    """The next stream breaks off after so many marks, in the middle of what follows."""
    copy, first = router._copy, [True]

    class Cut:
        def __init__(self, content: Any) -> None:
            self.content, self.seen = content, b""

        async def readany(self) -> bytes:
            data: bytes = await self.content.readany()
            self.seen += data
            parts = self.seen.split(b": made ")
            if len(parts) > marks + 1:
                raise aiohttp.ClientPayloadError("cut")
            return data

    async def _copy(asked: Any, one: Any, answer: Any, data: bytes, response: Any) -> bool:
        if first.pop() if first else False:
            cut = Cut(answer.content)
            cut.seen = data
            answer = SimpleNamespace(content=cut)
        return await copy(asked, one, answer, data, response)

    router._copy = _copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        router._copy = copy  # type: ignore[method-assign]


def alike(stream: list[str]) -> list[list[str]]:
    """The events of each choice, in order, without what is each answer's own."""
    found: dict[str, list[str]] = {}
    for block in stream:
        choice = re.search(r'"choices":\[\{"index":(\d+)', block)
        found.setdefault(choice[1] if choice else "", []).append(own(block))
    return [found[choice] for choice in sorted(found)]


def own(block: str) -> str:
    """An event without its ids and its time."""
    block = re.sub(r'"(chatcmpl|cmpl|resp|msg|rs|fc)-[0-9a-f]{32}"', '"ID"', block)
    return re.sub(r'"created(_at)?":\d+', '"created"', block)


@pytest.mark.parametrize(
    ("count", "path", "more"),
    [
        (2, "/v1/chat/completions", {"presence_penalty": 0.5}),  # counts an answer by itself
        (1, "/v1/chat/completions", {}),  # nobody is left
        (1, "/v1/messages", {}),
    ],
)
def test_what_cannot_be_gone_on_with_is_an_error(
    pair: Any, count: int, path: str, more: dict[str, Any]
) -> None:
    async def work(inside: Routed) -> None:
        with cutting(inside.router, 3):
            body = chat("SLOW", stream=True, max_tokens=30, **more)
            async with inside.post(body, path) as answer:
                text = "".join(blocks(await answer.read()))
        assert text.count("the replica that answered is gone") == 1
        assert inside.router.resumed == 0
        assert ("event: error" in text) == (path == "/v1/messages")

    routed(urls=[one.url for one in pair[:count]])(work)


def test_tokens_that_cannot_have_been_made_are_refused(pair: Any) -> None:
    path, headers = "/v1/chat/completions", {HEADER: Passed().name}
    for made in ([["a"]], [[True]], [[-1]], [[258]], [[97], [97]], [97], {}):
        body = chat("x", stream=True, tilegrad_made=made)
        status, found, _ = pair[0].ask("POST", path, body, headers)
        assert status == 400 and found["error"]["param"] == "tilegrad_made", made
    whole = chat("x", stream=True, max_tokens=1, tilegrad_made=[[97]])
    assert pair[0].ask("POST", path, whole, headers)[0] == 409


def test_all_full_and_none_up() -> None:
    async def full(inside: Routed) -> None:
        async with inside.post(chat("x")) as answer:
            assert answer.status == 429 and (await answer.json())["error"]["message"] == "full"

    routed(Fake("a", "429"), Fake("b", "429"))(full)

    async def none(inside: Routed) -> None:
        async with inside.post(chat("x"), "/v1/messages") as answer:
            assert answer.status == 503 and answer.headers["Retry-After"] == "2"
            assert (await answer.json())["type"] == "error"
        async with inside.client.get(inside.url + "/health") as answer:
            assert answer.status == 503 and (await answer.json())["up"] == 0

    routed(Fake("a", "loading"))(none)


def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    fake = Fake("a")

    async def work(inside: Routed) -> None:
        fake.hold = asyncio.Event()
        answer = await inside.post(chat("x", stream=True))
        assert b"who" in await answer.content.readany()
        assert inside.router.open == inside.router.replicas[0].load == 1
        answer.close()
        await fake.gone.wait()
        while inside.router.open:
            await asyncio.sleep(0.01)
        assert inside.router.replicas[0].load == 0

    routed(fake)(work)


def test_draining() -> None:
    fake = Fake("a")

    async def work(inside: Routed) -> None:
        fake.hold = asyncio.Event()
        answer = await inside.post(chat("x", stream=True))
        await answer.content.readany()
        assert not await inside.router.drain(0.01)
        async with inside.post(chat("y")) as other:
            assert other.status == 503
        fake.hold.set()
        assert b"[DONE]" in await answer.read()
        assert await inside.router.drain(LONG)

    routed(fake)(work)


def test_who_may_ask() -> None:
    fake = Fake("a")

    async def work(inside: Routed) -> None:
        async with inside.post(chat("x")) as answer:
            assert answer.status == 401 and "WWW-Authenticate" in answer.headers
        headers = {"Authorization": "Bearer k", "Origin": inside.url, "Connection": "close"}
        async with inside.post(chat("x"), headers=headers) as answer:
            assert answer.status == 200
        sent = fake.seen[0].headers
        assert sent["Authorization"] == "Bearer k" and "Origin" not in sent
        for more in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            async with inside.post(chat("x"), headers={**headers, **more}) as answer:
                assert answer.status == 403, more
        async with inside.post({"prompt": "x" * 5000}, headers=headers) as answer:
            assert answer.status == 413
        assert len(fake.seen) == 1

    limits = replace(Settings("m", "m").limits, body=4096)
    routed(fake, keys=("k",), limits=limits)(work)


def test_numbers_of_all_replicas() -> None:
    async def work(inside: Routed) -> None:
        for number in range(4):
            await (await inside.post(chat(f"{number}"))).read()
        async with inside.client.get(inside.url + "/metrics") as answer:
            text = await answer.text()
        assert 'a{x="1"} 4\n' in text and text.count("# TYPE a counter") == 1
        assert 'tilegrad:router_replica_up{replica="b"} 1' in text
        async with inside.client.get(inside.url + "/v1/live") as answer:
            view = await answer.json()
        assert view["running"] == 2 and [r["id"] for r in view["requests"]] == ["0/7", "1/7"]
        assert [r["name"] for r in view["replicas"]] == ["a", "b"]

    routed(Fake("a"), Fake("b"))(work)


def test_sums() -> None:
    one = '# HELP h x\nh_bucket{le="1"} 2\nh_sum 1.5\ncache_perc 0.5\ncfg_info{a="b c"} 1\n'
    two = '# HELP h x\nh_bucket{le="1"} 3\nh_sum 2\ncache_perc 1\ncfg_info{a="b c"} 1\nnew 4\n'
    assert summed_metrics([one, two]) == (
        '# HELP h x\nh_bucket{le="1"} 5\nh_sum 3.5\ncache_perc 0.75\ncfg_info{a="b c"} 1\nnew 4\n'
    )
    pages = [{"used": 1, "all": 4}, {"used": 2, "all": 4}]
    views = [{"pages": p, "step_seconds": s} for p, s in zip(pages, (0.1, 0.3), strict=True)]
    found = summed_live(views)
    assert found["pages"] == {"used": 3, "all": 8} and found["step_seconds"] == 0.3
    assert summed_live([])["state"] == "dead"


def test_replicas_share_out_threads_and_devices() -> None:
    from tilegrad.cli.replicas import shared_out
    from tilegrad.core.config import override

    settings = Settings("m", "m", opening={"device": "cuda:0, cuda:1", "requests": 4})
    with override(threads=8):
        found = [one.opening for one in shared_out(settings, 3, here=True)]
    assert [one["device"] for one in found] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [one["threads"] for one in found] == [2, 2, 2]
    plain = shared_out(Settings("m", "m", opening={"threads": 3}), 1, here=False)
    assert plain[0].opening == {"threads": 3}


# ---- real processes -----------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replicas that are started anew at once."""
    monkeypatch.setattr(processes, "FIRST_WAIT", 0.05)
    yield


def test_processes_are_started_anew(tiny_path: Path, quick: None) -> None:
    command = (sys.executable, str(HERE / "scripted_engine.py"))
    settings = Settings(
        str(tiny_path),
        "tiny",
        port=0,
        command=command,
        drain=1.0,
        keys=("k1", "k2"),
        opening={"requests": 4},
    )
    assert settings_of(settings_text(settings)) == settings

    async def work() -> None:
        group = Processes([settings, settings])
        router = Router(settings, group.replicas)
        await router.start()
        await group.start()
        runner, port = await listen_with(make_router_app(router), settings)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        headers = {"Authorization": "Bearer k2"}
        try:
            await both_up(router)
            async with aiohttp.ClientSession(headers=headers) as client:
                async with client.post(url, json=chat("SAY hi")) as answer:
                    found = await answer.json()
                assert found["choices"][0]["message"]["content"] == "hi"
                first = group.replicas[0]
                before = first.url
                group.children[first].kill()
                for number in range(6):  # whoever is left answers
                    async with client.post(url, json=chat(f"{number} SAY yes")) as answer:
                        assert answer.status == 200
                while first.url in ("", before):
                    await asyncio.sleep(0.02)
                await both_up(router)
        finally:
            await router.close()
            await group.close()
            await runner.cleanup()
        assert all(child.returncode is not None for child in group.children.values())

    run(work())


def test_a_killed_replica_s_stream_goes_on(tiny_path: Path) -> None:
    """Real models: a stream that draws with a seed is the one that was not interrupted."""
    opening = {"requests": 2, "threads": 1, "prepare": False, "determinism": "invariant"}
    settings = Settings(str(tiny_path), "tiny", port=0, drain=1.0, opening=opening)
    body = {"prompt": ["a stone", "sea"], "max_tokens": 300, "temperature": 1, "seed": 5}
    body |= {"ignore_eos": True, "stream": True, "logprobs": 1, "echo": True}

    async def work() -> None:
        group = Processes([settings, settings])
        router = Router(settings, group.replicas)
        await router.start()
        await group.start()
        runner, port = await listen_with(make_router_app(router), settings)
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            await both_up(router)
            async with aiohttp.ClientSession() as client:
                async with client.post(url, json=body) as answer:
                    wanted = blocks(await answer.read())
                for first in group.replicas:  # both have it compiled then
                    async with client.post(first.url + "/v1/completions", json=body) as answer:
                        assert len(blocks(await answer.read())) == len(wanted)
                while not router.resumed:  # until it was killed in the middle of the stream
                    await both_up(router)
                    async with client.post(url, json=body) as answer:
                        found = await answer.content.readany()
                        for busy in (one for one in group.replicas if one.load):
                            group.children[busy].kill()
                        found += await answer.read()
        finally:
            await router.close()
            await group.close()
            await runner.cleanup()
        assert router.resumed == 1
        assert alike(blocks(found)) == alike(wanted)

    run(work())


async def both_up(router: Router) -> None:
    while not all(one.up for one in router.replicas):
        await asyncio.sleep(0.05)
        await router.look()


def test_a_replica_that_never_serves_is_given_up(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_STARTS", 1)
    settings = Settings(str(tmp_path / "none.gguf"), "none", drain=0.1)

    async def work() -> None:
        group = Processes([settings])
        await group.start()
        await asyncio.wait_for(group.given_up.wait(), LONG)
        assert group.given_up.is_set()
        await group.close()

    run(work())
