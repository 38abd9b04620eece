"""Chromium without a screen, driven over its own protocol: open a page, run JavaScript, look.

Nothing but the browser and aiohttp is needed. It may reach 127.0.0.1 alone.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp

LONG = 600.0  # seconds; only against hanging
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update --disable-dev-shm-usage"
    " --hide-scrollbars --remote-debugging-port=0"
)


def browser_path() -> str | None:
    """Where the browser is, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


class Refused(AssertionError):
    """The browser did not do a command: it is wrong, or the page went away meanwhile."""


class Chromium:
    """A context in which a browser runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Chromium:
        command = [str(browser_path()), *FLAGS.split(), f"--user-data-dir={self.folder}"]
        self.process = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.thread.start()
        self.call(self._connect())
        return self

    def __exit__(self, *_: Any) -> None:
        self.call(self._leave())
        self.process.terminate()
        self.process.wait(LONG)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LONG)

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG)

    async def _connect(self) -> None:
        port = self.folder / "DevToolsActivePort"
        end = time.monotonic() + LONG
        while not (port.exists() and port.read_text().count("\n")):
            assert time.monotonic() < end, "the browser did not start"
            await asyncio.sleep(0.05)
        base = f"http://127.0.0.1:{port.read_text().splitlines()[0]}"
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"{base}/json") as response:
            targets = [t for t in await response.json() if t["type"] == "page"]
        self.socket = await self.session.ws_connect(
            targets[0]["webSocketDebuggerUrl"], max_msg_size=0
        )
        self.reader = asyncio.ensure_future(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send(f"{domain}.enable")

    async def _leave(self) -> None:
        self.reader.cancel()
        await self.socket.close()
        await self.session.close()

    async def _read(self) -> None:
        async for message in self.socket:
            found = json.loads(message.data)
            if "id" in found:
                self.waiting.pop(found["id"]).set_result(found)
            else:
                self.events.append(found)
                if found["method"] == "Page.javascriptDialogOpening":
                    self.agreed = asyncio.ensure_future(
                        self._send("Page.handleJavaScriptDialog", {"accept": True})
                    )

    async def _send(self, method: str, params: dict[str, Any] | None = None) -> Any:
        number = next(self.numbers)
        future = self.waiting[number] = self.loop.create_future()
        await self.socket.send_str(
            json.dumps({"id": number, "method": method, "params": params or {}})
        )
        found = await asyncio.wait_for(future, LONG)
        if "error" in found:
            raise Refused(found["error"])
        return found["result"]

    # ---- what tests do ------------------------------------------------------------------------

    def send(self, method: str, **params: Any) -> Any:
        """One command of the protocol."""
        return self.call(self._send(method, params))

    def open(self, url: str) -> None:
        """Load a page."""
        self.run("window.leaving = true")
        self.send("Page.navigate", url=url)
        self.until("!window.leaving && document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the page again."""
        self.run("window.leaving = true")
        self.send("Page.reload")
        self.until("!window.leaving && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true; it is not where it fails, or while pages change."""
        end = time.monotonic() + LONG
        while not self._holds(
            f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()"
        ):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.03)

    def _holds(self, script: str) -> bool:
        try:
            return bool(self.run(script))
        except Refused:
            return False

    def key(self, name: str, text: str = "", modifiers: int = 0) -> None:
        """Press a key."""
        more = {"text": text} if text else {}
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9}
        shared = {"key": name, "modifiers": modifiers}
        shared["windowsVirtualKeyCode"] = codes.get(name, ord(name[0].upper()))
        self.send("Input.dispatchKeyEvent", type="keyDown", **shared, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", **shared)

    def type(self, text: str) -> None:
        """Put text where the cursor is."""
        self.send("Input.insertText", text=text)

    def size(self, width: int, height: int, scheme: str = "light") -> None:
        """The window's size, and whether the system is light or dark."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """What it looks like."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def troubles(self) -> list[str]:
        """Errors that the page had: of scripts, of its policy, of the network."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def addresses(self) -> set[str]:
        """All that was asked for over the network."""
        wanted = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return {event["params"]["request"]["url"] for event in wanted}
