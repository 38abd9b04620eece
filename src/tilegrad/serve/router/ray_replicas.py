"""Replicas as Ray actors: Ray places them on its machines and starts them anew when they die.

An actor holds the HTTP process of a replica; its engine is a child that ends with it. Invariant:
replicas on other machines are reachable only with a key: the clients' own, or one that is made here
and that the router adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...core.errors import UserError
from ..settings import LOOPBACK, Settings
from .balance import Replica

EVERY = 1.0  # seconds between two looks at an actor


class Served:
    """What an actor is: a Server that listens on its machine."""

    def __init__(self, settings: Settings, home: str) -> None:
        self.settings, self.home = settings, home
        self.url = ""
        self.server: Any = None

    async def address(self) -> str:
        """Where it listens, once it serves; an engine that is gone ends the actor."""
        from ..model import ServedModel, read_tokenizer
        from ..run import listen
        from ..server import Server

        if self.server is None:
            host = own_address()
            host = LOOPBACK if host == self.home else host
            settings = replace(self.settings, host=host, port=0)
            tokenizer = await asyncio.to_thread(read_tokenizer, settings.model)
            model = ServedModel(settings.name, tokenizer, settings.sampling)
            self.server = Server(settings, model)
            _, port = await listen(self.server)
            await self.server.start()
            self.url = f"http://{host}:{port}"
        if self.server.engine.given_up.is_set():
            import os

            os._exit(1)  # Ray starts another one
        return self.url

    async def close(self) -> None:
        """End its requests and its engine."""
        if self.server is not None:
            await self.server.drain(self.settings.drain)
            await self.server.close()


def own_address() -> str:
    """This machine's address in Ray's network."""
    import ray

    return str(ray.util.get_node_ip_address())


class RayReplicas:
    """Replicas that Ray keeps alive; `address` is Ray's head, or a Ray of this machine alone."""

    def __init__(
        self,
        settings: Sequence[Settings],
        *,
        address: str | None = None,
        processors: float = 1.0,
        accelerators: float = 0.0,
    ) -> None:
        keys = settings[0].keys
        self.inner_key = "" if keys else secrets.token_urlsafe(32)
        self.settings = [replace(one, keys=keys or (self.inner_key,)) for one in settings]
        self.replicas = [Replica(str(number)) for number in range(len(settings))]
        self.given_up = asyncio.Event()
        self.address = address
        self.needs = {"num_cpus": processors, "num_gpus": accelerators}
        self.actors: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._own = False  # whether this process started Ray

    async def start(self) -> None:
        """Have Ray place all of them."""
        ray = _ray()
        if not ray.is_initialized():
            await asyncio.to_thread(
                ray.init, address=self.address, log_to_driver=False, include_dashboard=False
            )
            self._own = True
        actor = ray.remote(Served).options(max_restarts=-1, max_task_retries=0, **self.needs)
        home = own_address()
        self.actors = [actor.remote(one, home) for one in self.settings]
        self._tasks = [
            asyncio.create_task(self._follow(replica, actor))
            for replica, actor in zip(self.replicas, self.actors)
        ]

    async def close(self) -> None:
        """End all of them."""
        ray = _ray()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for actor in self.actors:
            with contextlib.suppress(ray.exceptions.RayError, asyncio.TimeoutError):
                await asyncio.wait_for(_awaited(actor.close.remote()), self.settings[0].drain + 5)
            ray.kill(actor)
        if self._own:
            await asyncio.to_thread(ray.shutdown)

    async def _follow(self, replica: Replica, actor: Any) -> None:
        """Know where a replica is."""
        ray = _ray()
        while True:
            try:
                replica.moved(await _awaited(actor.address.remote()))
            except ray.exceptions.RayError:
                replica.moved("")
            await asyncio.sleep(EVERY)


async def _awaited(reference: Any) -> Any:
    return await reference


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError(
            "ray is not installed", op="serve --ray", hint="pip install 'tilegrad[ray]'"
        ) from None
    return ray


__all__ = ["RayReplicas"]
