"""A file of requests answered by a Server that listens nowhere: the same parsing, the same engine
process, the same bodies as over HTTP.

Invariant: a request that fails is a line with its error, and ends nothing else; whatever ends a
run, the lines that were written are whole and the next run goes on after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api.fields import Fields, deeper
from ..api.ids import Ids
from ..api.openai_chat import chat_body, parse_chat
from ..api.openai_completions import completion_body, parse_completions
from ..engine.generation import Generation
from ..model import ServedModel, read_tokenizer
from ..refused import Refused, said
from ..server import Server
from ..settings import Settings
from ..stream import Collected
from .file import CHAT, COMPLETIONS, Answered, Line, check_ids, is_good, read_lines

AHEAD = 2  # requests that are parsed and wait, for each that runs
PARSERS: dict[str, Any] = {CHAT: parse_chat, COMPLETIONS: parse_completions}
BODIES: dict[str, Any] = {CHAT: chat_body, COMPLETIONS: completion_body}
Told = Callable[[str, float, float], None]


@dataclass
class Counts:
    """How far a batch is."""

    total: int = 0
    skipped: int = 0  # answered by an earlier run
    good: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    @property
    def done(self) -> int:
        """Lines that are answered."""
        return self.skipped + self.good + self.failed

    def take(self, record: dict[str, Any]) -> None:
        """Count an answer."""
        if not is_good(record):
            self.failed += 1
            return
        self.good += 1
        usage = record["response"]["body"].get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.answer_tokens += usage.get("completion_tokens", 0)


async def run_batch(
    settings: Settings,
    source: Path,
    answered: Answered,
    counts: Counts,
    *,
    tell: Told | None = None,
    told: Callable[[Counts], None] = lambda counts: None,
) -> None:
    """Answer the lines of a file that are not answered yet."""
    counts.total = check_ids(source)
    lines = (line for line in read_lines(source) if line.id not in answered.ids)
    counts.skipped = sum(line.id in answered.ids for line in read_lines(source))
    if counts.skipped == counts.total:
        return
    tokenizer = await asyncio.to_thread(read_tokenizer, settings.model)
    server = Server(settings, ServedModel(settings.name, tokenizer, settings.sampling), tell)
    try:
        await server.start()
        told(counts)
        with answered:
            await _all(server, lines, answered, counts, told)
    finally:
        await server.close()


async def _all(
    server: Server, lines: Any, answered: Answered, counts: Counts, told: Callable[[Counts], None]
) -> None:
    """Answer lines, as many at once as the engine takes and some that wait."""
    free = asyncio.Semaphore(AHEAD * server.model.requests)
    running: set[asyncio.Task[None]] = set()

    async def one(line: Line) -> None:
        try:
            record = await answer(server, line)
            answered.add(record)
            counts.take(record)
            told(counts)
        finally:
            free.release()

    try:
        for line in lines:
            await free.acquire()
            for task in [task for task in running if task.done()]:
                running.discard(task)
                task.result()
            running.add(asyncio.create_task(one(line)))
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def answer(server: Server, line: Line) -> dict[str, Any]:
    """The line of the output for a line of the input."""
    record: dict[str, Any] = {"id": Ids().new("batch_req-"), "custom_id": line.id}
    if line.error is not None:
        error = {"code": line.error.code, "message": line.error.message}
        return {**record, "response": None, "error": error}
    status = 200
    ones: list[Generation] = []
    try:
        body = await _body(server, line, ones)
    except Refused as error:
        status, body = error.status, error.openai()
    except Exception as error:  # of this line alone
        status, body = 500, Refused(said(error), status=500).openai()
    finally:
        for one in ones:
            if one.finish is None:
                server.engine.cancel(one)
    response = {"status_code": status, "request_id": record["id"], "body": body}
    return {**record, "response": response, "error": None}


async def _body(server: Server, line: Line, ones: list[Generation]) -> dict[str, Any]:
    """The body that a route would answer with."""
    limits, model = server.settings.limits, server.model
    if not isinstance(line.body, dict):
        raise Refused("'body' must be an object", param="body")
    if deeper(line.body, limits.depth):
        raise Refused(f"the body is nested deeper than {limits.depth} levels")
    # The command says which model answers; a line may have been written for another one.
    fields = Fields({name: value for name, value in line.body.items() if name != "model"})
    fields.refuse("stream", why="is not for batches")
    ask = await server.off_loop(PARSERS[line.url], fields, model, limits)
    listener = Collected(len(ask.prompts) * ask.n)
    ones += server.begin(ask, "", listener)
    await listener.done
    found: dict[str, Any] = BODIES[line.url](ask, model, ones, listener)
    return found


__all__ = ["Counts", "run_batch"]
