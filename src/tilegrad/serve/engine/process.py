"""The process that owns the model: frames in, steps, frames out.

`python -m tilegrad.serve.engine.process FD` has one end of a socket pair. It opens the model that
the first frame names, says `ready`, and then takes requests, runs a step while there is work and
sends all that a step made in one frame:

    {"made": [id, token, end, id, token, end, ...], "more": [[place, logprob, top], ...],
     "began": [id, ...], "cached": [[id, tokens], ...],
     "scored": [[id, [[logprob, top], ...]], ...],
     "failed": [[id, status, message], ...], "now": {...}}

`end` is 0, or which of ENDS ended the request; `more` is there for tokens whose logprobs were
asked for, by their place; `began` are requests that waited until this step; `cached` says, with the
first token of a request, how much of its prompt was in the prefix cache; `scored` has the logprobs
of prompts, but for their first tokens, and comes before all tokens of a request. Invariant: a
request that cannot be served fails alone; the process ends when its socket does, and by nothing
else but two failing steps in a row.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...core.errors import TilegradError, UserError
from ...generate.constraint import Constraint
from ...generate.request import Produced, Request
from ...generate.sampling_limits import Sampling
from ..refused import said
from .protocol import Frames, frame
from .scores import Scores

ENDS = ("", "stop", "length")
MOST_FAILURES = 2  # steps in a row
CHUNK = 1 << 16
POLL = 0.002  # seconds, while a grammar is compiled and nothing else is to do
log = logging.getLogger("tilegrad.serve")

Opener = Callable[[dict[str, Any], Callable[[str, float, float], None]], tuple[Any, dict[str, Any]]]


class Closed(TilegradError):
    """The HTTP process is gone."""


class EngineLoop:
    """An engine at one end of a socket."""

    def __init__(self, link: socket.socket, opener: Opener) -> None:
        self.link, self.opener = link, opener
        self.frames = Frames()
        self.engine: Any = None
        self.scores = Scores(None)
        self.told, self.stage = 0.0, ""
        self.failures = 0
        self.failed: list[list[Any]] = []  # requests that were refused, since the last step
        self.scored: list[list[Any]] = []  # prompts that were scored since then
        self.known: set[Any] = set()  # ids that the engine has, as far as was told
        self.fresh: set[Any] = set()  # those of them without a token
        # whose grammars are not ready
        self.compiling: dict[int, tuple[dict[str, Any], Request, Future[Any]]] = {}
        self.compiler = ThreadPoolExecutor(1, "grammars")

    def run(self) -> None:
        """Open the model, then serve until the socket ends."""
        kind, body = self._first()
        if kind != "open":
            raise Closed("the first frame opens the model")
        try:
            self.engine, facts = self.opener(body, self.tell)
        except UserError as error:
            self.link.sendall(frame("failed", str(error)))
            return
        self.scores.engine = self.engine
        self.link.sendall(frame("ready", facts))
        while True:
            self._read(0 if self.engine.busy or self.scores.waiting else None)
            if self.compiling:
                self._take_compiled()
            if self.scores.waiting:
                self._score()
            if self.engine.busy:
                self._step()
            elif self.failed or self.scored:
                self._send([], 0.0)

    def tell(self, stage: str, done: float, total: float) -> None:
        """Say how far opening is, now and then."""
        now = time.monotonic()
        if now - self.told > 0.1 or done >= total or stage != self.stage:
            self.told, self.stage = now, stage
            self.link.sendall(frame("progress", [stage, done, total]))

    # ---- in -----------------------------------------------------------------------------------

    def _first(self) -> tuple[str, Any]:
        while True:
            for found in self.frames.feed(self._bytes()):
                return found

    def _bytes(self) -> bytes:
        data = self.link.recv(CHUNK)
        if not data:
            raise Closed("the socket ended")
        return data

    def _read(self, seconds: float | None) -> None:
        """Take all frames that are there; wait for one if there is nothing else to do."""
        if seconds is None and (self.compiling or self.failed):
            seconds = POLL
        while select.select([self.link], [], [], seconds)[0]:
            for kind, body in self.frames.feed(self._bytes()):
                if kind == "add":
                    for given in body:
                        self._add(given)
                elif kind == "cancel":
                    for id in body:
                        self.compiling.pop(id, None)
                        self.scores.cancel(id)
                        self.engine.cancel(id)
                        self.known.discard(id)
                        self.fresh.discard(id)
            seconds = 0

    def _add(self, given: dict[str, Any]) -> None:
        """Take a request; one whose grammar must be compiled waits, and others go on."""
        with self._alone(given["id"]):
            request = request_of(given)
            if request.constraint is not None and self.engine.grammars is not None:
                future = self.compiler.submit(self.engine.grammars.matcher, request.constraint)
                self.compiling[given["id"]] = (given, request, future)
            else:
                self._begin(given, request)

    def _take_compiled(self) -> None:
        for id, (given, request, future) in list(self.compiling.items()):
            if future.done():
                del self.compiling[id]
                with self._alone(id):
                    future.result()
                    self._begin(given, request)

    def _begin(self, given: dict[str, Any], request: Request) -> None:
        """Score the prompt of a request that asks for it, else give it to the engine."""
        if given.get("scores"):
            self.scores.add(given["id"], request, given["scores"])
        else:
            self._give(request)

    def _score(self) -> None:
        """Score a part of a prompt; a request whose prompt is done begins."""
        id = self.scores.first
        with self._alone(id):
            try:
                found = self.scores.step()
            except Exception:
                self.scores.drop()
                raise
            if found is not None:
                request, scores = found
                self._give(request)
                self.scored.append([id, scores])

    def _give(self, request: Request) -> None:
        self.engine.add(request)
        self.known.add(request.id)
        self.fresh.add(request.id)

    @contextlib.contextmanager
    def _alone(self, id: int) -> Iterator[None]:
        """What fails within is an error of one request."""
        try:
            yield
        except UserError as error:
            self.failed.append([id, 400, said(error)])
        except Exception:
            log.exception("a request cannot be taken")
            self.failed.append([id, 500, "internal error"])

    # ---- out ----------------------------------------------------------------------------------

    def _step(self) -> None:
        begun = time.perf_counter()
        waited = list(self.engine.waiting)
        try:
            produced = self.engine.step()
            self.failures = 0
        except Exception as error:
            log.exception("a step failed")
            self.failures += 1
            if self.failures >= MOST_FAILURES:
                raise
            lost = self.known - {*self.engine.running, *self.engine.waiting}
            self.failed += [[id, 500, said(error)] for id in lost]
            produced = []
        still = self.engine.waiting
        self._send(produced, time.perf_counter() - begun, [i for i in waited if i not in still])

    def _send(
        self, produced: Sequence[Produced], seconds: float, began: Sequence[Any] = ()
    ) -> None:
        body = step_body(produced)
        body["began"] = began
        body["failed"] += self.failed
        body["scored"], self.scored = self.scored, []
        self.known.difference_update(one.id for one in produced if one.finished)
        self.known.difference_update(id for id, *_ in self.failed)
        if self.fresh:
            first = [one for one in produced if one.id in self.fresh]
            body["cached"] = [[one.id, one.cached] for one in first if one.cached]
            self.fresh.difference_update(one.id for one in first)
            self.fresh &= self.known
        self.failed = []
        body["now"] = state_of(self.engine, seconds)
        self.link.sendall(frame("step", body))


def step_body(produced: Sequence[Produced]) -> dict[str, Any]:
    """What a step made, as plain data."""
    made: list[int] = []
    more: list[Any] = []
    failed: list[Any] = []
    for one in produced:
        if one.error is not None:
            failed.append([one.id, 500, said(one.error)])
            continue
        if one.logprob is not None:
            more.append([len(made), one.logprob, one.top])
        made += (one.id, one.token, ENDS.index(one.finished or ""))  # type: ignore[arg-type]
    return {"made": made, "more": more, "cached": [], "failed": failed}


def state_of(engine: Any, seconds: float) -> dict[str, Any]:
    """How full an engine is, and how long its last step took."""
    pool = engine.pool
    adapters = {} if engine.adapters is None else {"adapters": adapters_of(engine)}
    return {
        **adapters,
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "pages": pool.pages,
        "used": pool.pages - pool.available,
        "queried": pool.prefixes.asked,
        "hits": pool.prefixes.found,
        "preempted": engine.batcher.preemptions,
        **guesses_of(engine),
        "seconds": seconds,
    }


def adapters_of(engine: Any) -> list[Any]:
    """How many adapters there are, and which ones requests have that run, and that wait."""
    used = [{w.request.adapter for w in part.values()} for part in (engine.running, engine.waiting)]
    return [len(engine.adapters.names), *(sorted(names - {""}) for names in used)]


def guesses_of(engine: Any) -> dict[str, int]:
    """How often tokens were guessed, how many, and how many came true; nothing where none are."""
    found = engine.speculation
    if found is None:
        return {}
    return {"drafts": found.asked, "guessed": found.guessed, "true": found.true}


def request_of(given: dict[str, Any]) -> Request:
    """The Request of a frame; its parts check themselves."""
    sampling = dict(given["sampling"])
    if sampling.get("logit_bias"):
        sampling["logit_bias"] = {int(token): v for token, v in sampling["logit_bias"]}
    return Request(
        given["id"],
        tuple(given["tokens"]),
        Sampling(**sampling),
        frozenset(given["stop_tokens"]),
        given["max_tokens"],
        given["priority"],
        given.get("salt", ""),
        given["min_tokens"],
        constraint_of(given),
        given.get("adapter", ""),
        location=None,
    )


def constraint_of(given: dict[str, Any]) -> Constraint | None:
    """The Constraint of a frame's request."""
    found = given.get("constraint")
    return None if found is None else Constraint(*found)


def open_llm(
    given: dict[str, Any], tell: Callable[[str, float, float], None]
) -> tuple[Any, dict[str, Any]]:
    """The engine of a model and what the HTTP process needs to know of it."""
    from ...generate.llm import LLM
    from .roofline import known_rate, read_rate

    prepares = given.pop("prepare", True)
    llm = LLM(given.pop("model"), progress=tell, **given)
    if prepares:  # nothing is compiled while a client waits
        llm.engine.prepare(tell)
    # a step reads every weight once at least; a CPU's rate is measured where there is time for it
    size = llm.file_bytes
    rate = read_rate(llm.device, size) if prepares else known_rate(llm.device, size)
    return llm.engine, {
        "roofline_seconds": None if rate is None else size / rate.bytes_per_second,
        "context": llm.context,
        "requests": llm.engine.requests,
        "vocabulary": llm.config.vocabulary,
        "defaults": llm.defaults,
        "device": str(llm.device),
        "dtype": str(llm.dtype),
        "kv_cache_dtype": llm.kv_cache_dtype,
        "determinism": llm.engine.determinism,
        "family": llm.config.family,
        "page": llm.engine.pool.page,
        "pages": llm.engine.pool.pages,
        "bytes": llm.file_bytes,
        "adapters": [] if llm.adapters is None else llm.adapters.names,
    }


def serve(descriptor: int, opener: Opener = open_llm) -> int:
    """Run an engine at a socket that was handed over; the status of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started this process ends it
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    link.setblocking(True)
    try:
        EngineLoop(link, opener).run()
    except (Closed, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception:
        log.exception("the engine ends")
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))


__all__ = ["EngineLoop", "serve"]
