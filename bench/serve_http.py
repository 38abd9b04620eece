"""CPU time of the HTTP process for a token: many streams, an engine process that only pretends.

    python bench/serve_http.py                       128 streams, one event a token
    python bench/serve_http.py --streams 32 --write

Three processes: this one reads the streams and throws them away; the server under test is another,
and its engine a third, which gives a token to every stream each `--pace` milliseconds. Measured is
what the kernel says the server used (user and system) from when all streams run until the first
ends, over the tokens sent in between. Words are those of a tiny model, or of `--model`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measure import facts, save

ROOT = Path(__file__).resolve().parents[1]
BAR, GOAL = 30.0, 20.0  # microseconds a token
TICK = 1e6 / os.sysconf("SC_CLK_TCK")
CONTEXT = 1 << 20


# ---- the engine process -------------------------------------------------------------------------


class PretendedEngine:
    """Gives each request the next letter, one step after the other at a pace."""

    grammars = None

    def __init__(self, requests: int, pace: float) -> None:
        self.requests, self.pace = requests, pace
        self.running: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.waiting: dict[int, Any] = {}
        prefixes = SimpleNamespace(asked=0, found=0)
        self.pool = SimpleNamespace(pages=1024, page=16, available=1024, prefixes=prefixes)
        self.batcher = SimpleNamespace(preemptions=0)
        self.next = time.perf_counter()

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, request: Any) -> None:
        self.running[request.id], self.most[request.id] = 0, request.max_tokens

    def cancel(self, id: int) -> bool:
        return self.running.pop(id, None) is not None

    def step(self) -> list[Any]:
        from tilegrad.generate.request import Produced

        now = time.perf_counter()
        self.next = max(self.next + self.pace, now)
        time.sleep(max(0.0, self.next - now))
        found = []
        for id, made in list(self.running.items()):
            self.running[id] = made + 1
            ends = made + 1 >= self.most[id]
            found.append(Produced(id, 97 + made % 26, finished="length" if ends else None))
            if ends:
                del self.running[id]
        return found


def engine_process(descriptor: int) -> int:
    """The engine's side of the socket."""
    from tilegrad.serve.engine.process import serve

    def opened(given: dict[str, Any], tell: Any) -> tuple[Any, dict[str, Any]]:
        facts = {"context": CONTEXT, "requests": given["requests"], "vocabulary": 258}
        facts |= {"defaults": {}, "device": "none", "dtype": "none", "family": "none"}
        facts |= {"page": 16, "pages": 1024, "bytes": 0, "determinism": "none"}
        return PretendedEngine(given["requests"], given["pace"]), facts

    return serve(descriptor, opened)


def server_process(model: str, streams: int, pace: float) -> None:
    """The server under test."""
    from tilegrad.serve.run import run_server
    from tilegrad.serve.settings import Settings

    settings = Settings(
        model,
        "none",
        port=0,
        command=(sys.executable, __file__, "--engine"),
        opening={"requests": streams, "pace": pace},
    )
    asyncio.run(run_server(settings, ready=lambda _, port: print(port, flush=True)))


# ---- the client ---------------------------------------------------------------------------------


class Streams(asyncio.Protocol):
    """One stream that is read and counted."""

    def __init__(self, request: bytes, totals: Totals) -> None:
        self.request, self.totals = request, totals
        self.begun = self.over = False

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.totals.events += data.count(b"data: ")
        self.totals.bytes += len(data)
        if not self.begun:
            self.begun = True
            self.totals.started()
        if b"[DONE]" in data and not self.over:
            self.over = True
            self.totals.ended()


class Totals:
    """What all streams have counted."""

    def __init__(self, streams: int) -> None:
        self.streams, self.events, self.bytes = streams, 0, 0
        self.all_begun, self.one_over = asyncio.Event(), asyncio.Event()

    def started(self) -> None:
        self.streams -= 1
        if not self.streams:
            self.all_begun.set()

    def ended(self) -> None:
        self.one_over.set()


def used(pid: int) -> tuple[float, float]:
    """Microseconds that a process used: user and system."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) * TICK, int(words[12]) * TICK


async def measure(given: argparse.Namespace, model: str) -> dict[str, Any]:
    """One run."""
    words = [sys.executable, __file__, "--server", "--model", model]
    words += ["--streams", str(given.streams), "--pace", str(given.pace)]
    server = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": given.tokens}
        data = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        )
        loop, totals = asyncio.get_running_loop(), Totals(given.streams)
        request = f"{head}\r\n\r\n".encode() + data
        for _ in range(given.streams):
            await loop.create_connection(lambda: Streams(request, totals), "127.0.0.1", port)
        await totals.all_begun.wait()
        before, events, begun = used(server.pid), totals.events, time.perf_counter()
        await totals.one_over.wait()
        after, seconds = used(server.pid), time.perf_counter() - begun
        count = totals.events - events
        user, system = ((b - a) / count for a, b in zip(before, after, strict=True))
    finally:
        server.terminate()
        await server.wait()
    return {
        "tokens": count,
        "tokens_per_second": round(count / seconds, 1),
        "user_us": round(user, 2),
        "system_us": round(system, 2),
        "us_per_token": round(user + system, 2),
    }


def tiny_model(folder: str) -> str:
    """The tests' tiny model, whose tokens are bytes."""
    sys.path.insert(0, str(ROOT / "tests" / "generate"))
    from tiny_model import write_file

    return str(write_file(Path(folder) / "tiny.gguf", context=CONTEXT))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--pace", type=float, default=10.0, help="milliseconds a step")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", help="whose words are used; a tiny one's, else")
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine is not None:
        sys.exit(engine_process(given.engine))
    if given.server:
        server_process(given.model, given.streams, given.pace / 1000)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or tiny_model(folder)
        runs = [asyncio.run(measure(given, model)) for _ in range(given.runs)]
    best = min(run["us_per_token"] for run in runs)
    middle = sorted(run["us_per_token"] for run in runs)[len(runs) // 2]
    found = facts(
        what="CPU of the HTTP process a token, one event a token",
        streams=given.streams,
        pace_ms=given.pace,
        us_per_token={"best": best, "median": middle, "bar": BAR, "goal": GOAL},
        runs=runs,
    )
    print(json.dumps(found, indent=1))
    if given.write:
        save("serve-http", found)


if __name__ == "__main__":
    main()
