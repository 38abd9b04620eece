"""`/tokenize` and `/detokenize`: text to ids and back, as the model sees them.

Invariant: both are as the answers' own; control tokens come from a template, never out of a text.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..model import ServedModel
from ..server import SERVER
from ..settings import Limits
from .fields import Fields
from .messages import messages_of
from .openai_completions import checked_ids
from .parameters import check_model, refuse_foreign, template_flags


async def tokenize(request: web.Request) -> web.StreamResponse:
    """POST /tokenize: the ids of a text or of a chat."""
    server = request.app[SERVER]
    server.admit()
    fields = await server.body(request)
    ids = await server.off_loop(tokens_of, fields, server.model, server.settings.limits)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": server.model.context}
    body["tokens"] = ids
    if fields.flag("return_token_strs"):
        body["token_strs"] = [server.model.token_text(i) for i in ids]
    return web.json_response(body)


def tokens_of(fields: Fields, model: ServedModel, limits: Limits) -> list[int]:
    """The ids that a body asks for."""
    check_model(fields, model)
    if fields.has("messages"):
        refuse_foreign(fields)
        flags = {"add_generation_prompt": True, **template_flags(fields)}
        if fields.has("add_generation_prompt"):
            flags["add_generation_prompt"] = fields.flag("add_generation_prompt")
        return model.encode_chat(messages_of(fields, limits), None, limits.characters, **flags)
    text = fields.text("prompt", most=limits.body)
    special = fields.flag("add_special_tokens", True)
    return model.encode(text, "prompt", limits.characters, add_special=special)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """POST /detokenize: the text of ids."""
    server = request.app[SERVER]
    server.admit()
    fields = await server.body(request)
    model = server.model
    ids = checked_ids(fields, "tokens", model, server.settings.limits.body)

    def work() -> str:
        return model.tokenizer.decode(ids, show_special=True)

    return web.json_response({"prompt": await server.off_loop(work)})


__all__ = ["detokenize", "tokenize"]
