"""Tokens a second over HTTP beside those of the same engine without HTTP, on one machine.

    python bench/serve_rate.py                                  Llama-3-8B's shape on a GPU
    python bench/serve_rate.py --shape tiny --device cpu --few 16 --streams 8

Random weights. The load is the mini-sglang script: 256 requests with prompts and answers of 100 to
1024 tokens, temperature 0.6, of which 128 run at once. The engine process opens the model, runs the
load by itself (`--runs` times), and then serves it: the same engine, programs and pages. The server
is another process, and the 128 clients, which stream with one event a token, are this one; when one
ends the next begins. No two runs have a prompt in common, so nothing is cached. Told are both
rates, their ratio (bar 95%), the CPU time of the HTTP process for a token, the time to the first
token and the time of each later one. A stream that fails, or has not an event for each token, ends
the script in an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import facts, save
from serve_http import used
from shapes import SHAPES, write_shape

from tilegrad.serve.load.load_run import Load
from tilegrad.serve.load.reply import Reply
from tilegrad.serve.load.script import Call, mini_sglang
from tilegrad.serve.load.summary import summed_up

BAR = 0.95
CPU_BAR, CPU_GOAL = 30.0, 20.0  # microseconds of the HTTP process, a token
CONTEXT = 2048 + 64
USAGE = re.compile(rb'"prompt_tokens":\s*(\d+).*?"completion_tokens":\s*(\d+)')
EVENT = b"data: {"
KEPT = 4096  # bytes of a stream's end in which its usage stands


def calls_of(few: int, longest: int, vocabulary: int, run: int) -> list[Call]:
    """The script, or its beginning, with other ids in each run; answers of so many at most."""
    return [
        Call(
            tuple((t + run) % vocabulary for t in call.prompt),  # type: ignore[operator]
            min(call.max_tokens, longest),
        )
        for call in mini_sglang()[: few or None]
    ]


# ---- the engine process -------------------------------------------------------------------------


def offline(engine: Any, calls: Sequence[Call]) -> dict[str, float]:
    """The load without HTTP."""
    from tilegrad.generate.request import Request
    from tilegrad.generate.sampling import Sampling

    begun, made = time.perf_counter(), 0
    for number, call in enumerate(calls):
        sampling = Sampling(temperature=0.6, seed=number)
        engine.add(Request(number, call.prompt, sampling, max_tokens=call.max_tokens))
    while engine.busy:
        for one in engine.step():
            if one.error is not None:
                raise one.error
            made += 1
    seconds = time.perf_counter() - begun
    return {"tokens": made, "seconds": seconds, "tokens_per_second": made / seconds}


def engine_process(descriptor: int) -> int:
    """The engine's side of the socket; the load runs before it is ready."""
    from tilegrad.serve.engine.process import open_llm, serve

    def opened(given: dict[str, Any], tell: Any) -> tuple[Any, dict[str, Any]]:
        runs, load = given.pop("runs"), given.pop("load")
        begun = time.perf_counter()
        engine, found = open_llm(given, tell)
        found["open_seconds"] = time.perf_counter() - begun
        calls = [calls_of(*load, found["vocabulary"], run) for run in range(runs)]
        found["offline"] = [offline(engine, some) for some in calls]
        return engine, found

    return serve(descriptor, opened)


def server_process(given: argparse.Namespace) -> None:
    """The server; says where it is and what its engine did alone."""
    from tilegrad.serve.run import run_server
    from tilegrad.serve.settings import Settings

    opening = {"requests": given.streams, "context": CONTEXT, "device": given.device}
    opening |= {"random_weights": True, "runs": given.runs, "load": [given.few, given.longest]}
    settings = Settings(
        given.server,
        "shape",
        port=0,
        silence=3600.0,
        command=(sys.executable, __file__, "--engine"),
        opening=opening,
    )

    def ready(server: Any, port: int) -> None:
        print(json.dumps({"port": port, **server.model.facts}), flush=True)

    asyncio.run(run_server(settings, ready=ready))


# ---- the clients --------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One request whose events are counted as they come."""

    def __init__(self, request: bytes, reply: Reply, over: asyncio.Future[None]) -> None:
        self.request, self.reply, self.over = request, reply, over
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Note when events came; the last two are the reason of the end and the usage."""
        now, reply = time.perf_counter(), self.reply
        if not reply.status:
            reply.status = int(data[9:12])
        joined = self.tail[1 - len(EVENT) :] + data  # what begins in the last piece ends here
        reply.parts += [now] * joined.count(EVENT)
        self.tail = (self.tail + data)[-KEPT:]
        if b"[DONE]" in joined:
            self.ended(now)

    def ended(self, now: float) -> None:
        """The whole stream is there."""
        reply, found = self.reply, USAGE.search(self.tail)
        del reply.parts[-2:]
        reply.end = reply.parts[-1] if reply.parts else now
        if found is None or reply.status != 200:
            reply.error = f"HTTP {reply.status}: {self.tail[-200:].decode('utf-8', 'replace')}"
        else:
            reply.prompt_tokens, reply.answer_tokens = map(int, found.groups())
            if reply.answer_tokens != len(reply.parts):
                reply.error = f"{len(reply.parts)} events for {reply.answer_tokens} tokens"
        self.transport.close()
        self.over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Too early, if it was not over."""
        if not self.over.done():
            text = self.tail[-200:].decode("utf-8", "replace")
            self.reply.error = f"the stream broke off: {error or text}"
            self.over.set_result(None)


async def sent(port: int, call: Call) -> Reply:
    """Ask for one answer and read it to its end."""
    body = {"model": "shape", "prompt": call.prompt, "max_tokens": call.max_tokens}
    body |= {"temperature": 0.6, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    loop, reply = asyncio.get_running_loop(), Reply(time.perf_counter(), call.max_tokens)
    over: asyncio.Future[None] = loop.create_future()
    request = head.encode() + data
    await loop.create_connection(lambda: Stream(request, reply, over), "127.0.0.1", port)
    await over
    return reply


async def over_http(port: int, pid: int, calls: Sequence[Call], streams: int) -> dict[str, Any]:
    """The load over HTTP: rates, latencies, CPU of the HTTP process and of this one."""
    before, mine = used(pid), time.process_time()
    result = await Load(lambda call: sent(port, call), streams).run(calls)
    after, mine = used(pid), time.process_time() - mine
    found = summed_up(result)
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} streams failed: {found['errors']}")
    tokens = found["answer_tokens"]
    user, system = ((b - a) / tokens for a, b in zip(before, after, strict=True))
    return {
        "tokens": tokens,
        "seconds": found["seconds"],
        "tokens_per_second": tokens / found["seconds"],
        "http_us_per_token": user + system,
        "clients_busy": mine / found["seconds"],
        **{name: found[name] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")},
    }


async def measured(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Start the server, wait for what its engine did alone, then load it."""
    words = [sys.executable, __file__, "--server", folder, "--device", given.device]
    for name in ("streams", "runs", "few", "longest"):
        words += [f"--{name}", str(getattr(given, name))]
    server = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        line = await server.stdout.readline()
        if not line:
            raise RuntimeError("the server did not start")
        said = json.loads(line)
        print(f"opened and prepared in {said['open_seconds']:.1f} s", flush=True)
        for row in said["offline"]:
            print(f"offline: {row['tokens_per_second']:.1f} tok/s, {row['seconds']:.2f} s")
        rows = []
        for run in range(given.runs, 2 * given.runs):
            calls = calls_of(given.few, given.longest, said["vocabulary"], run)
            rows.append(await over_http(said["port"], server.pid, calls, given.streams))
            print(shown(rows[-1]), flush=True)
    finally:
        server.terminate()
        await server.wait()
    alone, together = (
        statistics.median(row["tokens_per_second"] for row in some)
        for some in (said["offline"], rows)
    )
    about = {n: said[n] for n in ("device", "dtype", "context", "pages", "open_seconds")}
    return {**about, "offline": said["offline"], "http": rows, "ratio": together / alone}


def shown(row: dict[str, Any]) -> str:
    """One run over HTTP on a few lines."""
    lines = [
        f"over HTTP: {row['tokens_per_second']:.1f} tok/s, {row['seconds']:.2f} s; "
        f"the HTTP process {row['http_us_per_token']:.1f} us a token "
        f"(bar {CPU_BAR:g}, goal {CPU_GOAL:g}); "
        f"the clients {100 * row['clients_busy']:.0f}% of a core"
    ]
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        values = ", ".join(f"{key} {value:.2f}" for key, value in row[name].items())
        lines.append(f"  {name[:-3].upper()} ms: {values}")
    return "\n".join(lines)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--streams", type=int, default=128, help="requests at once")
    parser.add_argument("--runs", type=int, default=2, help="of each kind")
    parser.add_argument("--few", type=int, default=0, help="only so many requests of the script")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of an answer at most")
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results")
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine is not None:
        return engine_process(given.engine)
    if given.server:
        server_process(given)
        return 0
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = write_shape(Path(place) / "model", SHAPES[given.shape])
        found = asyncio.run(measured(given, str(folder)))
    print(f"{100 * found['ratio']:.1f}% of the offline rate (bar {100 * BAR:g}%)")
    print(f"all of it took {time.perf_counter() - begun:.0f} s")
    if given.write:
        names = ("shape", "streams", "runs", "few", "longest")
        kept = {name: getattr(given, name) for name in names}
        save(f"serve-rate-{given.shape}", facts(what="tokens a second over HTTP", **kept, **found))
    return int(found["ratio"] < BAR)


if __name__ == "__main__":
    sys.exit(main())
