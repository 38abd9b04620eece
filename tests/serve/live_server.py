"""A server in a thread of the test's own process, its engine in a process as always."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilegrad.serve.model import ServedModel, read_tokenizer
from tilegrad.serve.run import listen
from tilegrad.serve.server import Server
from tilegrad.serve.settings import Limits, Settings

HERE = Path(__file__).parent
LONG = 600.0  # seconds; only against hanging


def until(found: Callable[[], Any], what: str = "it did not come") -> None:
    """Wait for something."""
    end = time.monotonic() + LONG
    while not found():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class LiveServer:
    """A context in which a server answers at `url`."""

    def __init__(
        self, model: Any, *, limits: Limits = Limits(), ready: bool = True, **settings: Any
    ):
        settings.setdefault("sampling", {"temperature": 1.0})
        self.settings = Settings(str(model), "tiny", port=0, limits=limits, **settings)
        self.wait = ready
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> LiveServer:
        self.thread.start()
        self.call(self._start())
        return self

    async def _start(self) -> None:
        tokenizer = read_tokenizer(self.settings.model)
        model = ServedModel(self.settings.name, tokenizer, self.settings.sampling)
        self.server = Server(self.settings, model)
        self.runner, self.port = await listen(self.server)
        if self.wait:
            await self.server.start()

    def __exit__(self, *_: Any) -> None:
        self.call(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LONG)

    async def _stop(self) -> None:
        await self.server.close()
        await self.runner.cleanup()

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """One request over plain HTTP: status, body (parsed where it is JSON), headers."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        try:
            link.request(method, path, data, headers or {})
            response = link.getresponse()
            text = response.read()
            kind = response.headers.get("Content-Type", "")
            found = json.loads(text) if kind.startswith("application/json") else text
            return response.status, found, response.headers
        finally:
            link.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """A body to a path: status and what came back."""
        return self.ask("POST", path, body, headers)[:2]

    def chat(self, text: str, **more: Any) -> tuple[int, Any]:
        """A chat of one message."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
        return self.post("/v1/chat/completions", body)

    def events(self, path: str, body: Any) -> list[str]:
        """The data of a stream's events."""
        status, text = self.post(path, {**body, "stream": True})
        assert status == 200, text
        parts = text.decode().split("\n\n")
        assert parts.pop() == ""
        return [p.split("data: ", 1)[1] for p in parts if not p.startswith(":")]


def scripted_server(model: Any, *, requests: int = 64, **settings: Any) -> LiveServer:
    """A server whose engine is scripted."""
    command = (sys.executable, str(HERE / "scripted_engine.py"))
    opening = {"requests": requests, **settings.pop("opening", {})}
    return LiveServer(model, command=command, opening=opening, **settings)
