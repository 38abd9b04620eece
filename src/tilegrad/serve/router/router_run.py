"""From Settings and replicas to a router that listens, until a signal ends it.

Invariant: when this returns, the replicas are gone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from ...core.errors import UserError
from ..run import listen_with
from ..settings import Settings
from .balance import LIMIT
from .router import Router, make_router_app

FIRST_LOOKS = 0.1  # seconds between two looks until a replica serves


async def run_router(
    settings: Settings,
    replicas: Any,
    *,
    limit: int = LIMIT,
    ready: Callable[[Router, int], None] | None = None,
    said: Callable[[str], None] | None = None,
) -> int:
    """Serve until a signal, and say which; `replicas` are Processes or RayReplicas."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.put_nowait, number)
    router = Router(settings, replicas.replicas, limit, getattr(replicas, "inner_key", ""))
    runner, port = await listen_with(make_router_app(router), settings)
    stop = loop.create_task(stopping.get())
    lost = loop.create_task(_lost(replicas))
    up = loop.create_task(_up(router))
    try:
        await router.start()
        await replicas.start()
        await asyncio.wait([stop, lost, up], return_when=asyncio.FIRST_COMPLETED)
        if up.done() and ready is not None:
            ready(router, port)
        await asyncio.wait([stop, lost], return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            raise UserError("no replica can be started", op="serve", hint="see what they said")
        if router.open and said is not None:
            said(f"{router.open} requests are still answered; again to end them now")
        second_signal = loop.create_task(stopping.get())
        over = loop.create_task(router.drain(settings.drain))
        await asyncio.wait([second_signal, over], return_when=asyncio.FIRST_COMPLETED)
        second_signal.cancel()
        over.cancel()
        return stop.result()
    finally:
        for task in (stop, lost, up):
            task.cancel()
        await router.close()
        await replicas.close()
        await runner.cleanup()


async def _lost(replicas: Any) -> None:
    """Wait until no replica is started any more."""
    await replicas.given_up.wait()


async def _up(router: Router) -> None:
    """Wait until a replica serves."""
    while not any(one.up for one in router.replicas):
        await asyncio.sleep(FIRST_LOOKS)
        if any(one.url for one in router.replicas):
            await router.look()


__all__ = ["run_router"]
