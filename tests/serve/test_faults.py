"""What goes wrong: clients that leave or do not read, requests that fail, engines that die."""

import asyncio
import concurrent.futures
import json
import logging
import os
import signal
import socket
import sys
import time

import pytest
from aiohttp import web
from live_server import LONG, scripted_server, until

from tilegrad.core.errors import UserError
from tilegrad.serve.engine import supervise
from tilegrad.serve.settings import Limits

LETTERS = "".join(chr(97 + i % 26) for i in range(200))


def raw(server, body):
    """A request on a socket of its own, sent."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.settimeout(LONG)
    link.connect(("127.0.0.1", server.port))
    link.sendall(head.encode() + b"\r\n\r\n" + data)
    return link


def asked(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def live(server):
    return len(server.server.engine.live)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(scripted, stream):
    link = raw(scripted, asked("SLOW", stream=stream))
    if stream:
        assert link.recv(100)
    until(lambda: live(scripted) == 1)
    link.close()
    until(lambda: live(scripted) == 0)
    until(lambda: scripted.server.metrics.now["running"] == 0 or scripted.chat("x", max_tokens=1))
    assert scripted.chat("SAY hi")[0] == 200


@pytest.mark.parametrize("blocks", [False, True])
def test_a_client_that_does_not_read(tiny_path, monkeypatch, blocks):
    """What it leaves unread has a limit, also while the first bytes still wait to be sent."""
    write = web.StreamResponse.write

    async def first_bytes(self, data):
        await write(self, data)
        await asyncio.sleep(LONG if blocks else 0)

    monkeypatch.setattr(web.StreamResponse, "write", first_bytes)
    with scripted_server(tiny_path, limits=Limits(slow=1 << 16)) as server:
        body = asked("go", stream=True, n=40, logprobs=True, top_logprobs=20)
        link = raw(server, body)
        status, found = server.chat("SAY fine")
        assert (status, found["choices"][0]["message"]["content"]) == (200, "fine")
        until(lambda: live(server) == 0)
        until(lambda: server.server.open == 0)
        with pytest.raises(OSError):
            while link.recv(1 << 20):
                pass
            raise ConnectionResetError  # ended without an end
        link.close()
        assert server.server.metrics.finished["abort"] > 0


BROKEN = [
    (b"GARBAGE\r\n\r\n", b" 400 "),
    (b"GET / HTTP/9.9\r\n\r\n", b" 400 "),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b" 400 "),
    (b"POST PATH HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", b" 400 "),
    (
        b"POST PATH HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b" 400 ",
    ),
    (
        b"POST PATH HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n"
        b"Content-Length: 20\r\n\r\n" + b"not of that encoding",
        b"the body cannot be read",
    ),
]


@pytest.mark.parametrize(("data", "said"), BROKEN)
@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_bytes_that_are_no_request(scripted, caplog, data, said, level):
    """The client is told; nobody can fill the log with tracebacks."""
    caplog.set_level(level, "tilegrad.serve")
    link = socket.create_connection(("127.0.0.1", scripted.port), LONG)
    link.sendall(data.replace(b"PATH", b"/v1/chat/completions"))
    answer = b""
    while said not in answer:
        more = link.recv(4096)
        assert more, answer
        answer += more
    link.close()
    assert b" 500 " not in answer
    assert scripted.chat("SAY hi")[0] == 200
    assert not [one for one in caplog.records if one.exc_info or one.levelno > logging.INFO]


def test_a_request_that_fails_fails_alone(scripted):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        good = [pool.submit(scripted.chat, "SLOW", max_tokens=20) for _ in range(3)]
        bad = [pool.submit(scripted.chat, word) for word in ("NAN", "BEYOND")]
        for one in good:
            status, found = one.result(LONG)
            assert status == 200
            assert found["choices"][0]["message"]["content"] == LETTERS[:20]
        assert bad[0].result(LONG)[0] == 500
        assert "not finite" in bad[0].result(LONG)[1]["error"]["message"]
        assert bad[1].result(LONG)[0] == 500
        assert bad[1].result(LONG)[1]["error"]["message"] == "internal error"


def test_a_step_that_fails(scripted):
    status, found = scripted.chat("BOOM")
    assert status == 500 and found["error"]["message"] == "internal error"
    assert "secret" not in json.dumps(found)
    assert scripted.chat("SAY hi")[0] == 200
    assert scripted.server.engine.deaths == 0


def counted(server) -> dict[str, float]:
    """All counters of a server, by name."""
    text = server.ask("GET", "/metrics")[1].decode()
    lines = [line for line in text.splitlines() if "_total{" in line]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_engine_is_killed_while_many_run(tiny_path, tmp_path):
    hold, closed = tmp_path / "hold", tmp_path / "closed"
    hold.touch()
    opening = {"hold": str(hold), "closed": str(closed)}
    with scripted_server(tiny_path, requests=40, opening=opening) as server:
        engine = server.server.engine
        with concurrent.futures.ThreadPoolExecutor(60) as pool:
            lost = pool.submit(server.chat, "HOLD", max_tokens=200, presence_penalty=1.0)
            until(lambda: any(one.made for one in list(engine.live.values())))
            many = [
                pool.submit(server.events, "/v1/chat/completions", asked("HOLD", max_tokens=60))
                for _ in range(50)
            ]
            until(lambda: sum(bool(one.made) for one in list(engine.live.values())) >= 40)
            before = counted(server)
            closed.touch()
            os.kill(engine._process.pid, signal.SIGKILL)
            until(lambda: engine.state != "ready")
            assert server.ask("GET", "/health")[0] == 503
            late = pool.submit(server.chat, "SAY late")  # comes while there is no engine
            until(lambda: live(server) == 51)
            hold.unlink()
            closed.unlink()
            for one in many:
                *chunks, last = one.result(LONG)
                choices = [json.loads(c)["choices"][0] for c in chunks]
                assert last == "[DONE]" and choices[-1]["finish_reason"] == "length"
                assert "".join(c["delta"].get("content", "") for c in choices) == LETTERS[:60]
            status, found = lost.result(LONG)
            assert status == 500 and "engine died" in found["error"]["message"]
            assert late.result(LONG)[0] == 200
        assert engine.deaths == 1 and engine.live == {}
        assert server.ask("GET", "/health")[0] == 200
        after = counted(server)  # by two engines
        assert before.keys() <= after.keys()
        assert all(after[name] >= count for name, count in before.items())
        assert (
            after["tilegrad:prefix_cache_queries_total"]
            > before["tilegrad:prefix_cache_queries_total"]
            > 0
        )


def test_a_request_that_kills_engines_is_given_up(tiny_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_WAIT", 0.01)
    with scripted_server(tiny_path) as server:
        status, found = server.chat("DIE")
        assert status == 500 and "engine died" in found["error"]["message"]
        assert server.chat("SAY hi")[0] == 200


def test_an_engine_that_hangs_is_ended(tiny_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_WAIT", 0.01)
    with scripted_server(tiny_path, silence=1.0) as server:
        status, found = server.chat("HANG")
        assert status == 500 and "engine died" in found["error"]["message"]
        assert server.chat("SAY hi")[0] == 200


def test_too_many_wait(tiny_path):
    with scripted_server(tiny_path, requests=1, queue=1) as server:
        links = [raw(server, asked("STUCK", stream=True)) for _ in range(2)]
        until(lambda: live(server) == 2)
        status, found, headers = server.ask("POST", "/v1/chat/completions", asked("SAY hi"))
        assert status == 429 and headers["Retry-After"] == "1"
        assert found["error"]["type"] == "rate_limit_error"
        assert server.ask("POST", "/v1/chat/completions", asked("x", n=3))[0] == 429
        for link in links:
            link.close()
        until(lambda: live(server) == 0)
        assert server.chat("SAY hi")[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_requests_have_a_time_limit(tiny_path, stream):
    with scripted_server(tiny_path, timeout=0.2) as server:
        status, found = server.chat("STUCK", stream=stream)
        assert status == 504 and found["error"]["code"] == "timeout"
        until(lambda: live(server) == 0)


def test_a_stream_that_has_begun_ends_at_the_time_limit(tiny_path):
    opening = {"hold": __file__}
    for seconds in (0.5, 5.0, 50.0):  # a machine may be too slow for a first token in that time
        with scripted_server(tiny_path, timeout=seconds, opening=opening) as server:
            status, text = server.post("/v1/chat/completions", asked("HOLD", stream=True))
            until(lambda server=server: live(server) == 0)
        if status == 200:
            break
    text = text.decode()
    assert '"code":"timeout"' in text and text.endswith("data: [DONE]\n\n")


def test_a_stream_that_waits_shows_signs_of_life(tiny_path):
    for seconds in (1.0, 10.0, 100.0):  # a slow machine has fewer pings in that time
        with scripted_server(tiny_path, timeout=seconds, limits=Limits(ping=0.1)) as server:
            status, text = server.post("/v1/chat/completions", asked("STUCK", stream=True))
            assert status == 200 and b'"code":"timeout"' in text
        if text.count(b": ping\n\n") >= 3:
            return
    raise AssertionError(text)


def test_while_it_loads(tiny_path):
    with scripted_server(tiny_path, ready=False) as server:
        assert server.ask("GET", "/health")[:2] == (503, {"status": "loading"})
        status, _, headers = server.ask("POST", "/v1/chat/completions", asked("SAY hi"))
        assert status == 503 and headers["Retry-After"]
        server.call(server.server.start())
        assert server.chat("SAY hi")[0] == 200


def test_a_model_that_cannot_be_opened(tiny_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(supervise, "MOST_STARTS", 2)
    for wrong, words in (("fails", "cannot be opened"), ("dies", "again and again")):
        with scripted_server(tiny_path, ready=False, opening={wrong: True}) as server:
            with pytest.raises(UserError, match=words):
                server.call(server.server.start())
            assert server.ask("GET", "/health")[:2] == (503, {"status": "dead"})
            assert server.chat("SAY hi")[0] == 503


def test_draining(tiny_path, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    opening = {"hold": str(hold)}
    with (
        scripted_server(tiny_path, opening=opening) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        slow = pool.submit(server.chat, "HOLD", max_tokens=30)
        until(lambda: live(server) == 1)
        drained = pool.submit(server.call, server.server.drain(LONG))
        until(lambda: server.server.draining)
        assert server.chat("SAY hi")[0] == 503
        assert server.ask("GET", "/health")[:2] == (503, {"status": "draining"})
        hold.unlink()
        status, answer = slow.result(LONG)
        assert status == 200 and drained.result(LONG) is True
        assert answer["choices"][0]["message"]["content"] == LETTERS[:30]


def test_an_engine_that_is_being_opened_is_ended_at_once():
    """Ctrl-C at a terminal is the server's: the engine is in a session of its own."""

    async def ended():
        command = (sys.executable, "-c", "import time; time.sleep(600)")
        engine = supervise.Supervisor({}, command=command)
        engine.start()
        while engine._process is None:
            await asyncio.sleep(0.01)
        process = engine._process
        assert os.getsid(process.pid) == process.pid
        begun = time.monotonic()
        await engine.close()
        assert process.returncode == -signal.SIGKILL and time.monotonic() - begun < 1.5

    asyncio.run(ended())
