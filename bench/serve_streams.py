"""Many streams at once for minutes: each equal to its solo run, no error, no growth of memory.

    python bench/serve_streams.py                     64 streams for 10 minutes, smollm2
    python bench/serve_streams.py --minutes 0.5 --streams 16

`tilegrad serve --determinism invariant` is started as a person would. Each kind of request (prompts
of 3 to 150 tokens; every third kind draws, with a seed) first runs alone; then so many clients ask
at once, again and again, and one stream in twenty is left by its client in the middle. What a
stream gave (text, tokens, logprobs, the likeliest three beside each) is compared with the solo run
as it stands in the JSON, where a float has all its bits. The resident memory of both processes is
read every second. The record goes to bench/results/serve-streams-<date>.json; the status is 1 if a
stream failed or differed, or if memory grew after the first minute.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).resolve().parent
TEXT = (HERE.parent / "README.md").read_text()
LENGTHS = (3, 9, 17, 33, 48, 65, 80, 100, 120, 150)  # tokens of prompts
LEAVES = 20  # one stream in so many is left
SHARE, SLACK = 0.02, 8 << 20  # of growth that is none: noise of allocators
Stream = list[Any]  # of each event: text, tokens, logprobs, likeliest


def bodies_of(ids: list[int], tokens: int) -> list[dict[str, Any]]:
    """One request of each kind; texts that are too short begin again."""
    found = []
    for kind, length in enumerate(LENGTHS):
        prompt = list(itertools.islice(itertools.cycle(ids), 100 * kind, 100 * kind + length))
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": kind} if kind % 3 == 0 else {}
        body = {"prompt": prompt, "max_tokens": tokens - 5 * (kind % 2), "logprobs": 3}
        found.append({"temperature": 0, **body, **drawn, "ignore_eos": True, "stream": True})
    return found


async def stream_of(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any], most: int | None = None
) -> Stream:
    """What a stream gives, or its first events if the client leaves then."""
    found: Stream = []
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                return found
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            (choice,) = event["choices"]
            found.append([choice["text"], choice["logprobs"], choice["finish_reason"]])
            if len(found) == most:
                return found
    raise RuntimeError("the stream broke off")


class Load:
    """Clients that compare what they get."""

    def __init__(self, url: str, ids: list[int], tokens: int) -> None:
        self.url, self.bodies = url, bodies_of(ids, tokens)
        self.alone: list[Stream] = []
        self.numbers = itertools.count()
        self.equal = self.left = self.tokens = 0
        self.different: list[int] = []  # kinds
        self.errors: list[str] = []

    async def run(
        self,
        streams: int,
        seconds: float,
        sample: Callable[[], None] = lambda: None,
        least: int = 0,
    ) -> dict[str, Any]:
        """Solo runs, then as many clients as `streams` until the time is over, and so many streams
        at least were begun."""
        timeout = aiohttp.ClientTimeout(total=3600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            self.alone = [await stream_of(client, self.url, body) for body in self.bodies]
            begun = time.monotonic()
            clients = [self.client(client, begun + seconds, least) for _ in range(streams)]
            watch = asyncio.create_task(every_second(sample))
            await asyncio.gather(*clients)
            watch.cancel()
        return {
            "streams_at_once": streams,
            "seconds": round(time.monotonic() - begun, 1),
            "streams": self.equal + self.left + len(self.different) + len(self.errors),
            "equal": self.equal,
            "left": self.left,
            "different": len(self.different),
            "errors": len(self.errors),
            "tokens": self.tokens,
        }

    async def client(self, client: aiohttp.ClientSession, end: float, least: int) -> None:
        """One after the other, until the end."""
        number = 0
        while time.monotonic() < end or number < least:
            number = next(self.numbers)
            kind = number % len(self.bodies)
            most = 3 if number % LEAVES == LEAVES - 1 else None
            try:
                found = await stream_of(client, self.url, self.bodies[kind], most)
            except (RuntimeError, ValueError, aiohttp.ClientError, TimeoutError) as error:
                self.errors.append(f"kind {kind}: {type(error).__name__}: {error}")
                continue
            self.tokens += len(found)
            if found != self.alone[kind][:most]:
                self.different.append(kind)
            elif most is None:
                self.equal += 1
            else:
                self.left += 1


async def every_second(sample: Callable[[], None]) -> None:
    """Call something until it is cancelled."""
    while True:
        sample()
        await asyncio.sleep(1.0)


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} is gone")


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Memory:
    """The memory of both processes of a server, as it was."""

    def __init__(self, pid: int) -> None:
        (engine,) = children(pid)
        self.pids = {"http": pid, "engine": engine}
        self.samples: list[tuple[float, dict[str, int]]] = []

    def sample(self) -> None:
        """Read it once."""
        now = time.monotonic()
        self.samples.append((now, {name: resident(pid) for name, pid in self.pids.items()}))

    def record(self, settled: float) -> dict[str, Any]:
        """Growth from the minute after `settled` seconds of load to the last one."""
        found: dict[str, Any] = {}
        begin = self.samples[0][0]
        samples = [(t - begin, s) for t, s in self.samples]
        end = samples[-1][0]
        for name in self.pids:
            early = [s[name] for t, s in samples if settled <= t < settled + 60]
            late = [s[name] for t, s in samples if t >= end - 60]
            before, after = statistics.median(early), statistics.median(late)
            found[name] = {
                "begin_mb": round(self.samples[0][1][name] / 1e6, 1),
                "settled_mb": round(before / 1e6, 1),
                "end_mb": round(after / 1e6, 1),
                "most_mb": round(max(s[name] for _, s in self.samples) / 1e6, 1),
                "grew": after - before > max(SLACK, SHARE * before),
            }
        every = max(1, len(samples) // 60)
        series = [[round(t), *(round(n / 1e6, 1) for n in s.values())] for t, s in samples[::every]]
        return {**found, "series": series}


async def measured(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    """The record of one run."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/tokenize", json={"prompt": TEXT[:8000]}) as answer,
    ):
        ids = (await answer.json())["tokens"]
    load, memory = Load(url, ids, given.tokens), Memory(pid)
    record = await load.run(given.streams, 60 * given.minutes, memory.sample)
    record["memory"] = memory.record(min(60.0, 20 * given.minutes))
    record["tokens_per_second"] = round(load.tokens / record["seconds"], 1)
    for text in [*load.errors[:5], *(f"kind {kind} differs" for kind in load.different[:5])]:
        print(text)
    return record


def main() -> int:
    """Start a server, load it, end it, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--no-prepare", action="store_true", help="compile as it goes")
    parser.add_argument("--out", type=Path, help="where the record goes")
    given = parser.parse_args()
    words = ["serve", given.model, "--port", "0", "--requests", str(given.streams)]
    words += ["--context", str(given.context), "--determinism", "invariant"]
    words += ["--no-prepare"] * given.no_prepare
    command = [sys.executable, "-m", "tilegrad.cli.main", *words]
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            ready = time.monotonic() - begun
            record = asyncio.run(measured(url, process.pid, given))
        finally:
            process.terminate()
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {"date": day, "model": given.model, "machine": platform.machine()}
    record = {**about, "ready_seconds": round(ready, 1), "status": process.returncode, **record}
    place = given.out or HERE / "results" / f"serve-streams-{day}.json"
    place.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "memory"}))
    print(json.dumps({k: v for k, v in record["memory"].items() if k != "series"}))
    grew = any(record["memory"][name]["grew"] for name in ("http", "engine"))
    return int(bool(record["errors"] or record["different"] or grew or process.returncode))


if __name__ == "__main__":
    sys.exit(main())
