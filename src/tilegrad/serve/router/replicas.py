"""Replicas as processes of this machine: started, watched, started again when they end.

Invariant: every process that was started is gone when `close` returns; one that ends is started
anew after a while, longer each time until it has served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..settings import LOOPBACK, Settings
from .balance import Replica
from .replica_process import settings_text

COMMAND = (sys.executable, "-m", "tilegrad.serve.router.replica_process")
FIRST_WAIT, MOST_WAIT = 0.5, 30.0  # seconds between two starts
MOST_STARTS = 5  # of one replica in a row that did not come to serve
CLOSING = 5.0  # seconds that a process has after its drain
log = logging.getLogger("tilegrad.serve")


class Processes:
    """Replicas that are children of this process."""

    def __init__(self, settings: Sequence[Settings]) -> None:
        self.settings = [replace(one, host=LOOPBACK, port=0) for one in settings]
        self.replicas = [Replica(str(number)) for number in range(len(settings))]
        self.children: dict[Replica, asyncio.subprocess.Process] = {}
        self.given_up = asyncio.Event()  # no replica is left that could serve
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(settings)

    async def start(self) -> None:
        """Start all of them; each has its address once it serves."""
        self._tasks = [
            asyncio.create_task(self._keep(replica, settings))
            for replica, settings in zip(self.replicas, self.settings)
        ]

    async def close(self) -> None:
        """End all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*[self._end(child) for child in self.children.values()])

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                await asyncio.wait_for(child.wait(), self.settings[0].drain + CLOSING)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    async def _keep(self, replica: Replica, settings: Settings) -> None:
        starts, wait = 0, FIRST_WAIT
        while starts < MOST_STARTS:
            starts += 1
            if await self._run(replica, settings):
                starts, wait = 0, FIRST_WAIT
            await asyncio.sleep(wait)
            wait = min(2 * wait, MOST_WAIT)
        log.error("replica %s is given up", replica.name)
        self._left -= 1
        if not self._left:
            self.given_up.set()

    async def _run(self, replica: Replica, settings: Settings) -> bool:
        """Run one process to its end; whether it came to serve."""
        child = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the router's to act on
        )
        self.children[replica] = child
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(ConnectionError):
            child.stdin.write(settings_text(settings).encode() + b"\n")
            await child.stdin.drain()
        address = (await child.stdout.readline()).decode().strip()
        if address:
            replica.moved(address)
        status = await child.wait()
        replica.moved("")
        log.warning("replica %s has ended with status %s", replica.name, status)
        return bool(address)


__all__ = ["Processes"]
