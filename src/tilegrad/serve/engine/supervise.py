"""The engine process, kept alive: started, fed, watched, started again when it dies.

Requests that ran in an engine that died go on in the next one, from the tokens that their clients
have; those that cannot (see `Generation.resumes`) end in an error. Invariant: every Generation that
was taken ends; there is at most one engine process, and none after `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ...core.errors import UserError
from ..refused import Refused
from .generation import Generation
from .process import ENDS
from .protocol import Frames, frame

COMMAND = (sys.executable, "-m", "tilegrad.serve.engine.process")
FIRST_WAIT, MOST_WAIT = 0.1, 30.0  # seconds between two starts
MOST_STARTS = 8  # in a row that did not come to a token
log = logging.getLogger("tilegrad.serve")


class Wire(asyncio.Protocol):
    """The HTTP process's end of the socket."""

    def __init__(self, got: Callable[[str, Any], None]) -> None:
        self.got, self.frames = got, Frames()
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Take what came: all streams of a step are served in this one call."""
        for kind, body in self.frames.feed(data):
            self.got(kind, body)

    def connection_lost(self, error: Exception | None) -> None:
        """The engine is gone."""
        if not self.closed.done():
            self.closed.set_result(None)


class Supervisor:
    """The engine as the HTTP process sees it.

    `state` is "loading", "ready", "restarting", "dead" or "closed".
    """

    def __init__(
        self,
        opening: dict[str, Any],
        *,
        command: tuple[str, ...] = (),
        tell: Callable[[str, float, float], None] | None = None,
        stepped: Callable[[dict[str, Any], float], None] | None = None,
        died: Callable[[], None] | None = None,
        silence: float = 300.0,
    ) -> None:
        """`silence`: seconds without a frame, while there is work, after which an engine hangs."""
        self.opening, self.command = opening, command or COMMAND
        self.tell, self.stepped, self.died = tell, stepped, died
        self.state = "loading"
        self.facts: dict[str, Any] = {}
        self.live: dict[int, Generation] = {}
        self.deaths = 0  # of engines that had been ready
        self.reason = ""  # why it cannot be opened
        self._numbers = itertools.count(1)
        self._transport: Any = None
        self._process: asyncio.subprocess.Process | None = None
        self.given_up = asyncio.Event()  # no engine is started any more
        self._settled = asyncio.Event()  # not on its way to being ready
        self._adds: list[dict[str, Any]] = []
        self._cancels: list[int] = []
        self._starts = 0  # in a row without a token
        self._tasks: list[asyncio.Task[None]] = []
        self._silence, self._heard = silence, time.monotonic()

    # ---- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep an engine alive."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep()), loop.create_task(self._watch())]

    async def ready(self) -> None:
        """Wait until the engine is ready; an error if it cannot be opened."""
        await self._settled.wait()
        if self.state != "ready":
            raise UserError("the engine did not start", op="serve", got=self.reason or self.state)

    async def close(self) -> None:
        """End the engine, by force if it is being opened or does not end by itself."""
        opened = self.state == "ready"
        self._become("closed")
        if self._transport is not None:
            self._transport.close()
        if opened and self._process is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), 2.0)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._kill()
        if self._process is not None:
            await self._process.wait()
        self._fail_all(Refused("the server is shutting down", status=503))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _keep(self) -> None:
        """Start engines, one after the other."""
        while self.state != "closed":
            try:
                await self._run_one()
            except OSError as error:  # no process or no socket could be had
                log.error("the engine process cannot be started: %s", error.strerror)
            if self.state == "closed":
                return
            self._starts += 1
            if self.reason or self._starts >= MOST_STARTS:
                self.reason = self.reason or "the engine process died again and again"
                self._become("dead")
                self.given_up.set()
                self._fail_all(Refused("the engine is not running", status=503))
                return
            self._after_death()
            self._become("restarting")
            await asyncio.sleep(min(MOST_WAIT, FIRST_WAIT * 2 ** (self._starts - 1)))

    async def _watch(self) -> None:
        """End an engine that has work and says nothing: it hangs."""
        while True:
            await asyncio.sleep(min(1.0, self._silence / 4))
            idle = self.state != "ready" or not self.live
            if idle:
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > self._silence:
                log.error("the engine process says nothing any more: it is ended")
                self._heard = time.monotonic()
                self._kill()

    async def _run_one(self) -> None:
        """One engine, from its start to its end."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the server's to act on
            )
        finally:
            theirs.close()
        transport, wire = await loop.create_unix_connection(lambda: Wire(self._got), sock=ours)
        self._transport = transport
        transport.write(frame("open", self.opening))
        try:
            await wire.closed
            status = await self._process.wait()
        finally:
            self._transport = None
            transport.close()
            self._kill()
        if self.state != "closed":
            log.error("the engine process ended (status %s)", status)

    def _become(self, state: str) -> None:
        if self.state != "closed":
            self.state = state
        if state == "restarting":
            self._settled.clear()
        else:
            self._settled.set()

    def _after_death(self) -> None:
        """Decide what becomes of the requests that the engine had."""
        self._adds, self._cancels = [], []
        for one in list(self.live.values()):
            one.deaths += 1
            if not one.resumes:
                self._drop(one.id)
                one.fail(Refused("the engine died while it made this answer", status=500))
        if self.state == "ready":
            self.deaths += 1
        if self.died is not None:
            self.died()

    def _fail_all(self, error: Refused) -> None:
        live, self.live = list(self.live.values()), {}
        for one in live:
            one.fail(error)

    # ---- requests -------------------------------------------------------------------------------

    def add(self, one: Generation) -> None:
        """Give the engine a request, now or as soon as there is one again."""
        one.id = next(self._numbers)
        one.leave = self.cancel
        self.live[one.id] = one
        if self.state == "ready":
            self._adds.append(one.rest())
            self._soon()

    def cancel(self, one: Generation) -> None:
        """Have the engine forget a request."""
        if self._drop(one.id) and self.state == "ready":
            self._cancels.append(one.id)
            self._soon()

    def _drop(self, id: int) -> bool:
        return self.live.pop(id, None) is not None

    def _soon(self) -> None:
        """Send what is there at the end of this turn of the loop: one frame for many requests."""
        if len(self._adds) + len(self._cancels) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        adds, self._adds = self._adds, []
        cancels, self._cancels = self._cancels, []
        if self._transport is None:
            return
        if adds:
            gone = set(cancels)
            self._transport.write(frame("add", [a for a in adds if a["id"] not in gone]))
        if cancels:
            self._transport.write(frame("cancel", cancels))

    # ---- frames ---------------------------------------------------------------------------------

    def _got(self, kind: str, body: Any) -> None:
        self._heard = time.monotonic()
        if kind == "step":
            self._step(body)
        elif kind == "progress":
            if self.tell is not None:
                self.tell(*body)
        elif kind == "ready":
            self.facts = body
            self._resume()
        elif kind == "failed":
            self.reason = body

    def _resume(self) -> None:
        """A new engine is ready: it gets all that there is to do."""
        self._become("ready")
        waiting = [one.rest() for one in self.live.values()]
        if waiting and self._transport is not None:
            self._transport.write(frame("add", waiting))

    def _step(self, body: dict[str, Any]) -> None:
        now, live = time.perf_counter(), self.live
        for id in body["began"]:
            if id in live:
                live[id].started = live[id].started or now - body["now"]["seconds"]
        for id, count in body["cached"]:
            if id in live and not live[id].made:  # not of one that was resumed
                live[id].cached = count
        for id, scores in body["scored"]:
            if id in live:
                live[id].scores = scores
        if self.stepped is not None:
            self.stepped(body, now)
        made = body["made"]
        more = {place: rest for place, *rest in body["more"]} if body["more"] else {}
        if made:
            self._starts = 0
        for place in range(0, len(made), 3):
            one = live.get(made[place])
            if one is None:
                continue
            end = made[place + 2]
            if end:
                del live[one.id]
            try:
                one.take(made[place + 1], ENDS[end], more.get(place), now)
            except Exception:  # of this answer alone
                log.exception("an answer failed")
                self.cancel(one)
                one.fail(Refused("internal error", status=500))
        for id, status, message in body["failed"]:
            one = live.pop(id, None)
            if one is not None:
                one.fail(Refused(message, status=status))


__all__ = ["Supervisor"]
