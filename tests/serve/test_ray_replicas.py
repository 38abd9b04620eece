"""Replicas that Ray places, kills and starts anew, behind a router."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="ray is missing: pip install 'tilegrad[ray]'")

import aiohttp  # noqa: E402
from live_server import LONG  # noqa: E402

from tilegrad.serve.router.ray_replicas import RayReplicas  # noqa: E402
from tilegrad.serve.router.router import Router, make_router_app  # noqa: E402
from tilegrad.serve.run import listen_with  # noqa: E402
from tilegrad.serve.settings import Settings  # noqa: E402

HERE = Path(__file__).parent


@pytest.mark.slow
def test_an_actor_that_dies_is_started_anew(tiny_path: Path) -> None:
    command = (sys.executable, str(HERE / "scripted_engine.py"))
    settings = Settings(
        str(tiny_path), "tiny", port=0, command=command, drain=1.0, opening={"requests": 4}
    )

    async def up(router: Router) -> None:
        while not all(one.up for one in router.replicas):
            await asyncio.sleep(0.1)
            await router.look()

    async def work() -> None:
        group = RayReplicas([settings, settings], processors=0.1)
        router = Router(settings, group.replicas, inner_key=group.inner_key)
        await router.start()
        await group.start()
        runner, port = await listen_with(make_router_app(router), settings)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "SAY placed"}]}
        try:
            await up(router)
            async with aiohttp.ClientSession() as client:
                async with client.post(url, json=body) as answer:
                    found = await answer.json()
                assert found["choices"][0]["message"]["content"] == "placed"
                async with client.post(group.replicas[0].url + "/v1/models") as answer:
                    assert answer.status == 401, "a replica asks for a key of its own"
                before = group.replicas[0].url
                ray.kill(group.actors[0], no_restart=False)
                for _ in range(5):
                    async with client.post(url, json=body) as answer:
                        assert answer.status == 200
                while group.replicas[0].url in ("", before):
                    await asyncio.sleep(0.1)
                await up(router)
        finally:
            await router.close()
            await group.close()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(work(), LONG))
    assert not ray.is_initialized()
