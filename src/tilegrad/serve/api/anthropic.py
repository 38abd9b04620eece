"""`/v1/messages`: what Anthropic's clients send and expect.

Messages are turned into those of a chat, so that templates see one kind. Invariant: the blocks of a
stream, put together, are the content of the same request without streaming.
"""

from __future__ import annotations

import json
from typing import Any

from ..answer.parts import Message, Part
from ..engine.generation import Generation
from ..model import ServedModel
from ..refused import Refused
from ..settings import Limits
from ..stream import Collected, Events, Streamed, dumps, quoted
from .fields import Fields
from .messages import NAME, content_of
from .parameters import WHOLE, Ask, check_model, fit, refuse_foreign, spec_of, stops_of
from .tooling import message_tooling, take_apart


def parse_messages(fields: Fields, model: ServedModel, limits: Limits) -> Ask:
    """What the body of a message asks for."""
    most = fields.whole("max_tokens", 1, WHOLE)
    if most is None:
        raise fields.wrong("max_tokens", f"a whole number from 1 to {WHOLE}")
    ask = prompt_ask(fields, model, limits, spec_of(fields, model, limits, most))
    ask.stop = stops_of(fields, limits, "stop_sequences")
    ask.stream = fields.flag("stream")
    fit(ask, model, "messages")
    take_apart(ask, ask.fields, model)
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
    tooling = message_tooling(fields, limits)
    thinking = fields.inner("thinking")
    flags = {}
    if thinking is not None and "enable_thinking" in (model.tokenizer.template_text or ""):
        flags["enable_thinking"] = thinking.any("type") != "disabled"
    ids = model.encode_chat(messages, tooling.shown, limits.characters, **flags)
    return Ask([ids], spec, fields=tooling)


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


def ending(one: Generation, calls: bool) -> dict[str, Any]:
    """Why a message ended."""
    if one.finish == "stop" and calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if one.finish == "stop" and isinstance(one.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": one.stop_reason}
    reason = "max_tokens" if one.finish == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def blocks_of(message: Message) -> list[dict[str, Any]]:
    """The content of a whole message."""
    found: list[dict[str, Any]] = []
    if message.reasoning:
        found.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.calls:
        found.append({"type": "text", "text": message.content})
    for call in message.calls:
        found.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": loaded(call.arguments)}
        )
    return found


def loaded(arguments: str) -> Any:
    """Arguments as data; broken ones as the text that they are."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def message_body(
    ask: Ask, model: ServedModel, ones: list[Generation], found: Collected
) -> dict[str, Any]:
    """The response in one piece."""
    (one,) = ones
    text = found.text(0)
    message = Message(text) if ask.parser is None else ask.parser().whole(text)
    return {
        "id": ask.ids.new("msg-"),
        "type": "message",
        "role": "assistant",
        "model": ask.named(model),
        "content": blocks_of(message),
        **ending(one, bool(message.calls)),
        "usage": usage_of(one),
    }


def named(kind: str, **body: Any) -> bytes:
    """One event with its name."""
    return f"event: {kind}\ndata: {dumps({'type': kind, **body})}\n\n".encode()


BLOCKS: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTAS = {
    "content": b'"text_delta","text":',
    "reasoning": b'"thinking_delta","thinking":',
    "arguments": b'"input_json_delta","partial_json":',
}


class MessageStream(Streamed):
    """A message's events: blocks one after the other, each begun, filled and ended."""

    def __init__(self, events: Events, ask: Ask, model: ServedModel) -> None:
        super().__init__(events, 1)
        self.name, self.ids = ask.named(model), ask.ids
        self.ones: list[Generation] = []
        self.parser = ask.parser() if ask.parser else None
        self.begun = False
        self.index, self.kind = -1, ""  # of the block that is open
        self.head = b""

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """Events with the text of one more token."""
        if not self.begun:
            self.begun = True
            self.events.send(named("message_start", message=self.opening(one)))
        if self.parser is not None:
            self.parts(self.parser.add(text))
        elif text:
            self.put("content", text)

    def parts(self, parts: list[Part]) -> None:
        """Events of what a parser gave."""
        for part in parts:
            if part.kind == "call":
                block = {"type": "tool_use", "id": part.id, "name": part.text, "input": {}}
                self.open("arguments", block)
            else:
                self.put(part.kind, part.text)

    def put(self, kind: str, text: str) -> None:
        """Text of a kind, in a block of that kind."""
        if kind != self.kind:
            self.open(kind, BLOCKS[kind])
        self.events.send(self.head + quoted(text) + b"}}\n\n")

    def open(self, kind: str, block: dict[str, Any]) -> None:
        """Begin a block, after the one before it is ended."""
        ended = self.end_block()
        self.index, self.kind = self.index + 1, kind
        self.head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":' % self.index + DELTAS[kind]
        )
        self.events.send(
            ended + named("content_block_start", index=self.index, content_block=block)
        )

    def end_block(self) -> bytes:
        """The event that ends the block that is open."""
        return named("content_block_stop", index=self.index) if self.kind else b""

    def opening(self, one: Generation) -> dict[str, Any]:
        """The message before there is anything in it."""
        return {
            "id": self.ids.new("msg-"),
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage_of(one), "output_tokens": 1},
        }

    def closed(self, one: Generation) -> None:
        """Why it ended, and the end."""
        calls = False
        if self.parser is not None:
            self.parts(self.parser.finish())
            calls = bool(self.parser.calls)
        if not self.kind:
            self.open("content", BLOCKS["content"])
        self.events.send(
            self.end_block()
            + named("message_delta", delta=ending(one, calls), usage=usage_of(one))
            + named("message_stop")
        )

    def error(self, error: Refused) -> bytes:
        """The event of an error."""
        return f"event: error\ndata: {json.dumps(error.anthropic())}\n\n".encode()


__all__ = ["MessageStream", "count_tokens", "message_body", "parse_messages"]
