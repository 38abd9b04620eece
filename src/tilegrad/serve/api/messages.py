"""Messages of a chat as a template sees them: roles, text, calls of tools.

Invariant: what comes out is plain data of known fields; parts that are no text are refused by
their place.
"""

from __future__ import annotations

import json
from typing import Any

from ..refused import Refused
from ..settings import Limits
from .fields import Fields

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXTS = ("text", "input_text", "output_text")
NAME = 256


def messages_of(fields: Fields, limits: Limits, name: str = "messages") -> list[dict[str, Any]]:
    """The messages of a body, checked."""
    return [message_of(m, limits) for m in fields.items(name, limits.messages, needed=True)]


def message_of(fields: Fields, limits: Limits) -> dict[str, Any]:
    """One message."""
    role = fields.choice("role", ROLES)
    if role is None:
        raise fields.wrong("role", "one of " + ", ".join(ROLES))
    calls = fields.items("tool_calls", limits.tools) if role == "assistant" else []
    content = content_of(fields, limits)
    if content is None and not calls and role != "assistant":
        raise fields.wrong("content", "a string or a list of parts")
    role = {"developer": "system", "function": "tool"}.get(role, role)
    found: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if calls:
        found["tool_calls"] = [call_of(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if fields.has(key):
            found[key] = fields.text(key, most=NAME)
    for key in ("reasoning_content", "reasoning"):
        if role == "assistant" and isinstance(fields.any(key), str):
            found["reasoning_content"] = fields.any(key)
    return found


def content_of(fields: Fields, limits: Limits, name: str = "content") -> str | None:
    """The text of a content: a string, or parts of text put together."""
    content = fields.any(name)
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong(name, "a string or a list of parts")
    texts = []
    for part in fields.items(name, limits.parts):
        kind = part.any("type")
        if kind == "refusal":
            texts.append(part.text("refusal", most=limits.body))
        elif kind in TEXTS:
            texts.append(part.text("text", most=limits.body))
        else:
            word = kind if isinstance(kind, str) else "unknown"
            raise Refused(
                f"'{part.path}' is a part of type '{word[:40]}'; this model takes text alone",
                param=part.name("type"),
                code="unsupported_content",
            )
    return "".join(texts)


def call_of(fields: Fields) -> dict[str, Any]:
    """A tool's call as templates take it: arguments as an object."""
    function = fields.inner("function")
    if function is None:
        raise fields.wrong("function", "an object")
    name = function.text("name", most=NAME)
    given = function.any("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            raise function.wrong("arguments", "JSON") from None
    if given is None:
        given = {}
    call = {"type": "function", "function": {"name": name, "arguments": given}}
    if fields.has("id"):
        call["id"] = fields.text("id", most=NAME)
    return call


__all__ = ["content_of", "message_of", "messages_of"]
