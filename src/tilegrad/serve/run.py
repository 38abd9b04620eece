"""From Settings to a server that listens, until a signal ends it.

It listens before the model is loaded, so that a port that is taken is known at once and /health
can say 503 meanwhile. SIGTERM or Ctrl-C lets the requests inside end, for `settings.drain` seconds;
a second signal does not wait. Invariant: when this returns, the engine process is gone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import sys
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..core.errors import UserError
from .app import make_app
from .model import ServedModel, read_tokenizer
from .server import Server
from .settings import Settings

SWITCH = 0.0005  # seconds that a thread that tokenises may keep streams waiting
CLOSING = 5.0  # seconds for connections that are still open at the end


class Faults(logging.Filter):
    """Bytes that are no request are the fault of who sent them: a line where requests are logged,
    without a traceback, and nothing elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written, made short where it is of such a fault."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            return True
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.exc_info, record.exc_text = None, None
        record.msg, record.args = "no request: %s", (repr(str(error))[:200],)
        return log.isEnabledFor(logging.INFO)


log = logging.getLogger("tilegrad.serve")
http_log = logging.getLogger("tilegrad.serve.http")
http_log.addFilter(Faults())


async def listen(server: Server) -> tuple[web.AppRunner, int]:
    """Begin to listen; the port."""
    return await listen_with(make_app(server), server.settings)


async def listen_with(app: web.Application, settings: Settings) -> tuple[web.AppRunner, int]:
    """Begin to listen for an application; the port."""
    limits = settings.limits
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=http_log,
        keepalive_timeout=75,
        max_line_size=limits.header,
        max_field_size=limits.header,
        shutdown_timeout=CLOSING,
    )
    await runner.setup()
    site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            f"port {settings.port} is taken" if taken else "cannot listen",
            op="serve",
            got=f"{settings.host}:{settings.port}" + ("" if taken else f" ({error.strerror})"),
            hint="--port 0 takes any free port" if taken else None,
        ) from None
    return runner, runner.addresses[0][1]


async def run_server(
    settings: Settings,
    tell: Callable[[str, float, float], None] | None = None,
    listening: Callable[[int], None] | None = None,
    ready: Callable[[Server, int], None] | None = None,
    *,
    said: Callable[[str], None] | None = None,
) -> int:
    """Serve until a signal, and say which; `ready` is called once requests are served."""
    sys.setswitchinterval(SWITCH)
    loop = asyncio.get_running_loop()
    stopping: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.put_nowait, number)
    tokenizer = await asyncio.to_thread(read_tokenizer, settings.model)
    server = Server(settings, ServedModel(settings.name, tokenizer, settings.sampling), tell)
    runner, port = await listen(server)
    if listening is not None:
        listening(port)
    stop = loop.create_task(stopping.get())
    start = loop.create_task(server.start())
    dead = loop.create_task(_death(server))
    try:
        await asyncio.wait([stop, start], return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            if ready is not None:
                ready(server, port)
            await asyncio.wait([stop, dead], return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            raise UserError("the engine is gone", op="serve", got=server.engine.reason)
        await _drain(server, stopping, said)
        return stop.result()
    finally:
        for task in (stop, start, dead):
            task.cancel()
        await server.close()
        await runner.cleanup()


async def _death(server: Server) -> None:
    """Wait until the engine is given up."""
    await server.engine.given_up.wait()


async def _drain(
    server: Server, stopping: asyncio.Queue[int], said: Callable[[str], None] | None
) -> None:
    """Let requests end, unless somebody insists."""
    if server.open and said is not None:
        said(f"{server.open} requests are still answered; again to end them now")
    loop = asyncio.get_running_loop()
    second_signal = loop.create_task(stopping.get())
    over = loop.create_task(server.drain(server.settings.drain))
    await asyncio.wait([second_signal, over], return_when=asyncio.FIRST_COMPLETED)
    second_signal.cancel()
    over.cancel()


__all__ = ["listen", "listen_with", "run_server"]
