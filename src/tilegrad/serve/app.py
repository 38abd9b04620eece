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
from .api.anthropic import MessageStream, count_tokens, message_body, parse_messages
from .api.fields import Fields
from .api.openai_chat import ChatStream, chat_body, parse_chat
from .api.openai_completions import (
    CompletionStream,
    completion_body,
    parse_completions,
)
from .api.openai_responses import ResponseStream, parse_responses, response_body
from .api.parameters import Ask
from .api.words import detokenize, tokenize
from .refused import UNREADABLE, Refused
from .resumed import read_name
from .server import SERVER, Server
from .static import add_page

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("tilegrad.serve")


ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": (parse_chat, chat_body, ChatStream),
    "/v1/completions": (parse_completions, completion_body, CompletionStream),
    "/v1/responses": (parse_responses, response_body, ResponseStream),
    "/v1/messages": (parse_messages, message_body, MessageStream),
}


def make_app(server: Server) -> web.Application:
    """The application of a server."""
    access = Access(server.settings)
    limits = server.settings.limits
    app = web.Application(middlewares=[guard(server, access)], client_max_size=limits.body)
    app[SERVER] = server

    async def marked(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.setdefault("X-Request-Id", request.get(ID, ""))
        access.mark(request, response)

    app.on_response_prepare.append(marked)
    router = app.router
    for path in ("/health", "/ping"):
        router.add_get(path, health)
    router.add_get("/version", version)
    router.add_get("/metrics", metrics)
    router.add_get("/v1/models", models)
    router.add_get("/v1/models/{name:.+}", one_model)
    router.add_get("/v1/live", live)
    for path, parts in ANSWERS.items():
        router.add_post(path, answering(*parts))
    router.add_post("/v1/messages/count_tokens", counted)
    router.add_post("/tokenize", tokenize)
    router.add_post("/detokenize", detokenize)
    add_page(app)
    return app


def guard(server: Server, access: Access) -> Any:
    """What stands before all routes: whatever happens, an answer of a known shape."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        begun = time.perf_counter()
        asked = request.headers.get("X-Request-Id", "")
        request[ID] = asked if NAME.fullmatch(asked) else f"req-{time.time_ns():x}"
        try:
            access.check(request)
            asks = request.method != "OPTIONS"
            response = await handler(request) if asks else access.preflight()
        except Refused as error:
            response = error_response(request, error, server)
        except web.HTTPException as error:
            response = error_response(request, http_error(error), server)
        except web.RequestPayloadError:
            response = error_response(request, Refused(UNREADABLE, status=400), server)
        except (ConnectionResetError, BrokenPipeError):
            raise  # nobody is there any more
        except Exception:
            log.exception("a request failed")
            response = error_response(request, Refused("internal error", status=500), server)
        seconds = time.perf_counter() - begun
        log.info("%s %s %s %.3f s", request.method, request.path[:80], response.status, seconds)
        return response

    return guarded


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
        "root": name,
        "parent": server.model.name if name in server.model.adapters else None,
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
    ongoing = list(server.engine.live.values())
    running = sum(bool(one.started) for one in ongoing)  # the engine's own count is a step old
    requests = [
        {
            "id": one.id,
            "prompt_tokens": one.prompt,
            "made_tokens": len(one.made),
            "seconds": round(now - one.begun, 3),
            "state": "running" if one.started else "waiting",
        }
        for one in ongoing[:256]
    ]
    return web.json_response(
        {
            "state": server.engine.state,
            "model": server.model.name,
            "device": facts.get("device"),
            "dtype": facts.get("dtype"),
            "kv_cache_dtype": facts.get("kv_cache_dtype"),
            "determinism": facts.get("determinism"),
            "context": server.model.context,
            "seconds": time.time() - server.metrics.begun,
            "running": running,
            "waiting": len(ongoing) - running,
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
    read_name(request, fields, ask, server.model)
    if server.settings.log_prompts:
        log.info("%s asks %r", request[ID], fields.body)
    return server, ask


def answering(read: Any, body: Any, shape: Any) -> Handler:
    """The handler of a route that makes answers."""

    async def handler(request: web.Request) -> web.StreamResponse:
        server, ask = await parse(request, read)
        model = server.model
        return await server.answer(
            request,
            ask,
            lambda ones, found: body(ask, model, ones, found),
            lambda events: shape(events, ask, model),
        )

    return handler


async def counted(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens"""
    server = request.app[SERVER]
    server.admit()
    fields = await server.body(request)
    count = await server.off_loop(count_tokens, fields, server.model, server.settings.limits)
    return web.json_response({"input_tokens": count})


__all__ = ["make_app"]
