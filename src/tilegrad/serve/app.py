"""Routes: which path is served by what, who may ask, and what errors look like.

Invariant: every route but /health asks for a key where keys are set; an error has the shape that
the route's clients know, and says nothing of the server's inside.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from .. import __version__
from .access import ID, Access
from .fields import Fields
from .openai_chat import ChatStream, chat_body, parse_chat
from .parameters import Ask
from .refused import Refused
from .server import Server
from .static import add_page

SERVER: web.AppKey[Server] = web.AppKey("server", Server)
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("tilegrad.serve")


def make_app(server: Server) -> web.Application:
    """The application of a server."""
    settings = server.settings
    access = Access(settings)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever happens, an answer of a known shape."""
        begun = time.perf_counter()
        asked = request.headers.get("X-Request-Id", "")
        request[ID] = asked if NAME.fullmatch(asked) else f"req-{time.time_ns():x}"
        try:
            access.check(request)
            response = await handler(request)
        except Refused as error:
            response = error_response(request, error, server)
        except web.HTTPException as error:
            response = error_response(request, http_error(error), server)
        except (ConnectionResetError, BrokenPipeError):
            raise  # nobody is there any more
        except Exception:
            log.exception("a request failed")
            response = error_response(request, Refused("internal error", status=500), server)
        if not response.prepared:
            response.headers.setdefault("X-Request-Id", request[ID])
            access.mark(request, response)
        seconds = time.perf_counter() - begun
        log.info("%s %s %s %.3f s", request.method, request.path[:80], response.status, seconds)
        return response

    limits = settings.limits
    app = web.Application(middlewares=[guarded], client_max_size=limits.body)
    app[SERVER] = server
    app.router.add_get("/health", health)
    app.router.add_get("/ping", health)
    app.router.add_get("/version", version)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", one_model)
    app.router.add_get("/v1/live", live)
    app.router.add_post("/v1/chat/completions", chat)
    add_page(app)
    return app


def http_error(error: web.HTTPException) -> Refused:
    """What an error of the library is to a client."""
    words = {404: "there is no such route", 405: "this route has other methods"}
    words[413] = "the body is too large"
    return Refused(words.get(error.status, "bad request"), status=error.status)


def error_response(request: web.Request, error: Refused, server: Server) -> web.Response:
    """An error as the clients of a route know it."""
    server.metrics.refused[error.status] = server.metrics.refused.get(error.status, 0) + 1
    shaped = error.anthropic if request.path.startswith("/v1/messages") else error.openai
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="tilegrad", charset="UTF-8"'
    return web.json_response(shaped(), status=error.status, headers=headers)


# ---- what there is -----------------------------------------------------------------------------


async def health(request: web.Request) -> web.StreamResponse:
    """200 while requests are served."""
    server = request.app[SERVER]
    state = "draining" if server.draining else server.engine.state
    return web.json_response({"status": state}, status=200 if state == "ready" else 503)


async def version(request: web.Request) -> web.StreamResponse:
    """Which tilegrad this is."""
    return web.json_response({"version": __version__})


async def metrics(request: web.Request) -> web.StreamResponse:
    """What was counted, for Prometheus."""
    server = request.app[SERVER]
    data = await server.off_loop(server.metrics.text)
    return web.Response(body=data, headers={"Content-Type": "text/plain; version=0.0.4"})


def model_card(server: Server, name: str) -> dict[str, Any]:
    """A model as the list of models has it."""
    return {
        "id": name,
        "object": "model",
        "created": int(server.metrics.begun),
        "owned_by": "tilegrad",
        "root": server.model.name,
        "parent": None,
        "max_model_len": server.model.context,
    }


async def models(request: web.Request) -> web.StreamResponse:
    """The models that are served."""
    server = request.app[SERVER]
    cards = [model_card(server, name) for name in server.model.names]
    return web.json_response({"object": "list", "data": cards})


async def one_model(request: web.Request) -> web.StreamResponse:
    """One of them."""
    server = request.app[SERVER]
    name = request.match_info["name"]
    if name not in server.model.names:
        raise Refused("this server has no such model", status=404, code="model_not_found")
    return web.json_response(model_card(server, name))


async def live(request: web.Request) -> web.StreamResponse:
    """What happens now, for the live view."""
    server = request.app[SERVER]
    now = time.perf_counter()
    counts, facts = server.metrics.now, server.model.facts
    requests = [
        {
            "id": one.id,
            "prompt_tokens": one.prompt,
            "made_tokens": len(one.made),
            "seconds": round(now - one.begun, 3),
            "state": "running" if one.made else "waiting",
        }
        for one in list(server.engine.live.values())[:256]
    ]
    return web.json_response(
        {
            "state": server.engine.state,
            "model": server.model.name,
            "device": facts.get("device"),
            "dtype": facts.get("dtype"),
            "context": server.model.context,
            "seconds": time.time() - server.metrics.begun,
            "running": counts.get("running", 0),
            "waiting": counts.get("waiting", 0),
            "most_running": server.model.requests,
            "tokens_per_second": round(server.metrics.rate, 2),
            "prompt_tokens": server.metrics.prompt_tokens,
            "made_tokens": server.metrics.made_tokens,
            "pages": {"used": counts.get("used", 0), "all": counts.get("pages", 0)},
            "step_seconds": counts.get("seconds", 0.0),
            "roofline_seconds": facts.get("roofline_seconds"),
            "restarts": server.engine.deaths,
            "requests": requests,
        }
    )


# ---- answers -----------------------------------------------------------------------------------


async def parse(
    request: web.Request, read: Callable[[Fields, Any, Any], Ask]
) -> tuple[Server, Ask]:
    """What a body asks for; templates and tokens are made off the event loop."""
    server = request.app[SERVER]
    server.admit()
    fields = await server.body(request)
    ask = await server.off_loop(read, fields, server.model, server.settings.limits)
    if server.settings.log_prompts:
        log.info("%s asks %r", request[ID], fields.body)
    return server, ask


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    server, ask = await parse(request, parse_chat)
    model = server.model
    return await server.answer(
        request,
        ask,
        lambda ones, found: chat_body(ask, model, ones, found),
        lambda events: ChatStream(events, ask, model),
    )


__all__ = ["make_app"]
