"""`/v1/messages`: what Anthropic's clients send and expect.

Messages are turned into those of a chat, so that templates see one kind. Invariant: the blocks of a
stream, put together, are the content of the same request without streaming.
"""

from __future__ import annotations

import json
from typing import Any

from .fields import Fields
from .generation import Generation
from .messages import NAME, content_of
from .model import ServedModel
from .openai_shapes import new_id
from .parameters import WHOLE, Ask, check_model, fit, refuse_foreign, spec_of, stops_of
from .refused import Refused
from .settings import Limits
from .stream import Collected, Events, Streamed, dumps, quoted

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse_messages(fields: Fields, model: ServedModel, limits: Limits) -> Ask:
    """What the body of a message asks for."""
    most = fields.whole("max_tokens", 1, WHOLE)
    if most is None:
        raise fields.wrong("max_tokens", f"a whole number from 1 to {WHOLE}")
    ask = prompt_ask(fields, model, limits, spec_of(fields, model, limits, most))
    ask.stop = stops_of(fields, limits, "stop_sequences")
    ask.stream = fields.flag("stream")
    fit(ask, model, "messages")
    return ask


def prompt_ask(fields: Fields, model: ServedModel, limits: Limits, spec: dict[str, Any]) -> Ask:
    """The prompt alone, as counting its tokens needs it too."""
    check_model(fields, model)
    refuse_foreign(fields)
    fields.refuse("container", "mcp_servers", "context_management")
    messages: list[dict[str, Any]] = []
    system = content_of(fields, limits, "system")
    if system:
        messages.append({"role": "system", "content": system})
    for message in fields.items("messages", limits.messages, needed=True):
        messages += chat_messages(message, limits)
    return Ask([model.encode_chat(messages, None, limits.characters)], spec)


def count_tokens(fields: Fields, model: ServedModel, limits: Limits) -> int:
    """How many tokens a prompt has."""
    return len(prompt_ask(fields, model, limits, {}).prompts[0])


def chat_messages(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    """One message as those of a chat: results of tools are messages of their own there."""
    role = fields.choice("role", ("user", "assistant", "system"))
    if role is None:
        raise fields.wrong("role", "user or assistant")
    content = fields.any("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    thought = ""
    for block in fields.items("content", limits.parts, needed=True):
        kind = block.any("type")
        if kind == "text":
            texts.append(block.text("text", most=limits.body))
        elif kind == "tool_use" and role == "assistant":
            function = {
                "name": block.text("name", most=NAME),
                "arguments": block.any("input") or {},
            }
            id = block.text("id", most=NAME)
            calls.append({"type": "function", "id": id, "function": function})
        elif kind == "tool_result" and role == "user":
            text = content_of(block, limits) or ""
            id = block.text("tool_use_id", most=NAME)
            found.append({"role": "tool", "content": text, "tool_call_id": id})
        elif kind == "thinking" and role == "assistant":
            thought += block.text("thinking", most=limits.body)
        elif kind != "redacted_thinking":
            word = kind if isinstance(kind, str) else "unknown"
            raise Refused(
                f"a block of type '{word[:40]}' is not taken; this model takes text alone",
                param=block.name("type"),
            )
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thought:
        message["reasoning_content"] = thought
    return found if found and not texts else [*found, message]


# ---- answers -----------------------------------------------------------------------------------


def usage_of(one: Generation) -> dict[str, Any]:
    """Tokens of a message."""
    return {
        "input_tokens": one.prompt - one.cached,
        "output_tokens": len(one.made),
        "cache_read_input_tokens": one.cached,
        "cache_creation_input_tokens": 0,
    }


def ending(one: Generation) -> dict[str, Any]:
    """Why a message ended."""
    if one.finish == "stop" and isinstance(one.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": one.stop_reason}
    return {"stop_reason": REASONS.get(one.finish or "", "end_turn"), "stop_sequence": None}


def message_body(
    ask: Ask, model: ServedModel, ones: list[Generation], found: Collected
) -> dict[str, Any]:
    """The response in one piece."""
    (one,) = ones
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": model.name,
        "content": [{"type": "text", "text": found.text(0)}],
        **ending(one),
        "usage": usage_of(one),
    }


def named(kind: str, **body: Any) -> bytes:
    """One event with its name."""
    return f"event: {kind}\ndata: {dumps({'type': kind, **body})}\n\n".encode()


class MessageStream(Streamed):
    """A message's events."""

    head = (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":'
    )

    def __init__(self, events: Events, ask: Ask, model: ServedModel) -> None:
        super().__init__(events, 1)
        self.model = model
        self.ones: list[Generation] = []
        self.begun = False

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """An event with the text of one more token."""
        if not self.begun:
            self.begun = True
            self.events.send(self.opening(one))
        if text:
            self.events.send(self.head + quoted(text) + b"}}\n\n")

    def opening(self, one: Generation) -> bytes:
        """What comes before all text."""
        message: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage_of(one), "output_tokens": 1},
        }
        block = {"type": "text", "text": ""}
        return named("message_start", message=message) + named(
            "content_block_start", index=0, content_block=block
        )

    def closed(self, one: Generation) -> None:
        """Why it ended, and the end."""
        self.events.send(
            named("content_block_stop", index=0)
            + named("message_delta", delta=ending(one), usage=usage_of(one))
            + named("message_stop")
        )

    def error(self, error: Refused) -> bytes:
        """The event of an error."""
        return f"event: error\ndata: {json.dumps(error.anthropic())}\n\n".encode()


__all__ = ["MessageStream", "count_tokens", "message_body", "parse_messages"]
