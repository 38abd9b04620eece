"""`tilegrad serve --replicas N`: several servers of one model behind one address.

Invariant: what is not given is shared out: threads over the replicas of this machine, devices (with
commas between) round and round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.config import config
from .progress import Bars
from .terminal import put, status


def serve_replicas(settings: Any, count: int, ray: bool, ray_address: str | None) -> int:
    """Run replicas and the router before them until a signal, and say which."""
    import asyncio

    with Bars() as bars:
        bars.stage("starting replicas", 0, count)
        return asyncio.run(routed(settings, count, ray, ray_address, bars))


async def routed(settings: Any, count: int, ray: bool, ray_address: str | None, bars: Bars) -> int:
    """A router, with its replicas in processes or placed by Ray."""
    from ..serve.router.ray_replicas import RayReplicas
    from ..serve.router.replicas import Processes
    from ..serve.router.router_run import run_router

    def ready(router: Any, port: int) -> None:
        bars.close()
        put(f"http://{settings.host}:{port}")
        up = sum(one.up for one in router.replicas)
        status(f"{settings.name}: {up} of {count} replicas serve; Ctrl-C ends all of them")

    own = shared_out(settings, count, here=not ray)
    replicas: Any = RayReplicas(own, address=ray_address) if ray else Processes(own)
    return await run_router(settings, replicas, ready=ready, said=status)


def shared_out(settings: Any, count: int, here: bool) -> list[Any]:
    """The Settings of each replica."""
    devices = [one.strip() for one in str(settings.opening.get("device", "")).split(",")]
    found = []
    for number in range(count):
        opening = dict(settings.opening)
        if devices[number % len(devices)]:
            opening["device"] = devices[number % len(devices)]
        if here and "threads" not in opening:
            opening["threads"] = max(1, config().threads // count)
        found.append(replace(settings, opening=opening))
    return found
