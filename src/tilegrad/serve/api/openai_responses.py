"""`/v1/responses`: one answer to an input, whole or as events.

Nothing is kept between requests: an input carries its whole conversation. Invariant: the deltas of
a stream, put together, are the output of the response that ends it.
"""

from __future__ import annotations

import copy
from typing import Any

from ..answer.parts import AnswerParser, Part
from ..engine.generation import Generation
from ..model import ServedModel
from ..refused import Refused
from ..settings import Limits
from ..stream import Collected, Events, Streamed, dumps, quoted
from .constraints import format_of, put
from .fields import Fields
from .ids import Ids
from .messages import NAME, call_of, content_of, message_of
from .parameters import WHOLE, Ask, check_model, fit, refuse_foreign, spec_of, template_flags
from .tooling import chat_tooling, take_apart

UNSUPPORTED = ("previous_response_id", "background", "conversation", "prompt")
IGNORED = ("reasoning", "item_reference")  # items that say nothing to the model


def parse_responses(fields: Fields, model: ServedModel, limits: Limits) -> Ask:
    """What the body of a response asks for."""
    check_model(fields, model)
    refuse_foreign(fields)
    fields.refuse(*UNSUPPORTED)
    most = fields.whole("max_output_tokens", 1, WHOLE)
    messages, tooling = input_of(fields, limits), chat_tooling(fields, limits)
    flags = template_flags(fields)
    ids = model.encode_chat(messages, tooling.shown, limits.characters, **flags)
    ask = Ask([ids], spec_of(fields, model, limits, most), stream=fields.flag("stream"))
    shown = fields.whole("top_logprobs", 0, limits.logprobs)
    if shown:
        raise Refused("'top_logprobs' are not served here", param="top_logprobs")
    fit(ask, model, "input")
    text = fields.inner("text")
    for param, constraint in format_of(text, "format", limits) if text else []:
        put(ask.spec, param, constraint, model)
    take_apart(ask, tooling, model)
    ask.fields = {
        "instructions": fields.text("instructions", None, limits.body),
        "max_output_tokens": most,
        "metadata": fields.any("metadata") if isinstance(fields.any("metadata"), dict) else {},
        "temperature": ask.spec["sampling"].get("temperature"),
        "top_p": ask.spec["sampling"].get("top_p", 1.0),
        "parallel_tool_calls": tooling.parallel,
        "tool_choice": fields.any("tool_choice") or "auto",
        "tools": fields.listed("tools", limits.tools),
    }
    return ask


def input_of(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    """The messages of an input: text, or a list of items."""
    found: list[dict[str, Any]] = []
    said = fields.text("instructions", None, limits.body)
    if said:
        found.append({"role": "system", "content": said})
    given = fields.any("input")
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    for item in fields.items("input", limits.messages, needed=True):
        kind = item.any("type") or "message"
        if kind == "message":
            found.append(message_of(item, limits))
        elif kind == "function_call":
            found.append(call_message(item))
        elif kind == "function_call_output":
            text = content_of(item, limits, "output") or ""
            id = item.text("call_id", most=NAME)
            found.append({"role": "tool", "content": text, "tool_call_id": id})
        elif kind not in IGNORED:
            raise Refused(
                f"an item of type '{str(kind)[:40]}' is not taken", param=item.name("type")
            )
    return found


def call_message(fields: Fields) -> dict[str, Any]:
    """A call that the model made before, as a message."""
    function = {"name": fields.any("name"), "arguments": fields.any("arguments")}
    call = Fields({"id": fields.any("call_id"), "function": function}, fields.path)
    return {"role": "assistant", "content": "", "tool_calls": [call_of(call)]}


# ---- answers -----------------------------------------------------------------------------------


class Item:
    """One item of a response's output, as it grows: a message, reasoning, or a call."""

    def __init__(self, kind: str, ids: Ids, name: str = "", call: str = "") -> None:
        self.kind, self.name, self.call = kind, name, call
        self.id = ids.new({"content": "msg-", "reasoning": "rs-", "call": "fc-"}[kind])
        self.text = ""

    def part(self) -> dict[str, Any]:
        """The part of the item that is its text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def body(self, status: str) -> dict[str, Any]:
        """The item as a client sees it."""
        content = [self.part()] if status != "in_progress" else []
        if self.kind == "call":
            return {
                "id": self.id,
                "type": "function_call",
                "status": status,
                "call_id": self.call,
                "name": self.name,
                "arguments": self.text,
            }
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content}
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


class Shape:
    """One response."""

    def __init__(self, ask: Ask, model: ServedModel) -> None:
        self.ask, self.model = ask, model
        self.id, self.created = ask.ids.new("resp-"), ask.created

    def whole(self, status: str, output: list[Any], one: Generation | None) -> dict[str, Any]:
        """The response as a client sees it."""
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "model": self.ask.named(self.model),
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if one is None else usage_of(one),
            **self.ask.fields,
        }

    def ended(self, one: Generation, items: list[Item]) -> dict[str, Any]:
        """The response once it is whole; only its last item may have been cut off."""
        status = "incomplete" if one.finish == "length" else "completed"
        output = [item.body("completed") for item in items[:-1]]
        return self.whole(status, [*output, *(i.body(status) for i in items[-1:])], one)


def usage_of(one: Generation) -> dict[str, Any]:
    """Tokens of a response."""
    return {
        "input_tokens": one.prompt,
        "input_tokens_details": {"cached_tokens": one.cached},
        "output_tokens": len(one.made),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": one.prompt + len(one.made),
    }


def response_body(
    ask: Ask, model: ServedModel, ones: list[Generation], found: Collected
) -> dict[str, Any]:
    """The response in one piece."""
    parser = AnswerParser() if ask.parser is None else ask.parser()
    items: list[Item] = []
    for part in [*parser.add(found.text(0)), *parser.finish()]:
        take(items, part, ask.ids)
    if not items:
        items.append(Item("content", ask.ids))
    return Shape(ask, model).ended(ones[0], items)


def take(items: list[Item], part: Part, ids: Ids) -> bool:
    """Put a Part where it belongs; whether that is a new item."""
    kind = "call" if part.kind == "arguments" else part.kind
    if part.kind == "call":
        items.append(Item("call", ids, part.text, part.id))
        return True
    new = not items or items[-1].kind != kind
    if new:
        items.append(Item(kind, ids))
    items[-1].text += part.text
    return new


DELTAS = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponseStream(Streamed):
    """A response's events: items one after the other, each added, filled and done."""

    def __init__(self, events: Events, ask: Ask, model: ServedModel) -> None:
        super().__init__(events, 1)
        self.shape, self.ids = Shape(ask, model), ask.ids
        self.parser = AnswerParser() if ask.parser is None else ask.parser()
        self.ones: list[Generation] = []
        self.number = 0
        self.items: list[Item] = []
        self.head = b""

    def named(self, kind: str, **body: Any) -> bytes:
        """One event with its name and number."""
        body = {"type": kind, "sequence_number": self.number, **body}
        self.number += 1
        return f"event: {kind}\ndata: {dumps(body)}\n\n".encode()

    def place(self) -> dict[str, Any]:
        """Where the item that is open stands."""
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """Events with the text of one more token."""
        if not self.number:
            begun = self.shape.whole("in_progress", [], None)
            self.events.send(
                self.named("response.created", response=begun)
                + self.named("response.in_progress", response=begun)
            )
        self.parts(self.parser.add(text))

    def parts(self, parts: list[Part]) -> None:
        """Events of what a parser gave."""
        for part in parts:
            done = self.done("completed") if part.kind == "call" or self.changes_kind(part) else b""
            if take(self.items, part, self.ids):
                self.events.send(done + self.added())
            if part.kind != "call":
                number, self.number = self.number, self.number + 1
                rest = b',"sequence_number":%d,"delta":%b}\n\n' % (number, quoted(part.text))
                self.events.send(self.head + rest)

    def changes_kind(self, part: Part) -> bool:
        """Whether a Part begins another item than the one that is open."""
        kind = "call" if part.kind == "arguments" else part.kind
        return bool(self.items) and self.items[-1].kind != kind

    def added(self) -> bytes:
        """The events of an item that begins."""
        item, place = self.items[-1], self.place()
        empty = copy.copy(item)
        empty.text = ""
        data = self.named(
            "response.output_item.added",
            output_index=place["output_index"],
            item=empty.body("in_progress"),
        )
        if item.kind == "content":
            place |= {"content_index": 0}
            data += self.named("response.content_part.added", **place, part=empty.part())
            place |= {"logprobs": []}
        elif item.kind == "reasoning":
            place |= {"content_index": 0}
        kind = DELTAS[item.kind] + ".delta"
        head = dumps({"type": kind, **place})
        self.head = f"event: {kind}\ndata: {head[:-1]}".encode()
        return data

    def done(self, status: str) -> bytes:
        """The events of an item that ends."""
        if not self.items:
            return b""
        item, place = self.items[-1], self.place()
        kind = DELTAS[item.kind] + ".done"
        if item.kind == "call":
            data = self.named(kind, **place, name=item.name, arguments=item.text)
        else:
            place |= {"content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if item.kind == "content" else {}
            data = self.named(kind, **place, text=item.text, **more)
        if item.kind == "content":
            data += self.named("response.content_part.done", **place, part=item.part())
        return data + self.named(
            "response.output_item.done",
            output_index=len(self.items) - 1,
            item=item.body(status),
        )

    def closed(self, one: Generation) -> None:
        """What comes after all text."""
        self.parts(self.parser.finish())
        data = b""
        if not self.items:
            self.items.append(Item("content", self.ids))
            data = self.added()
        whole = self.shape.ended(one, self.items)
        status = whole["status"]
        data += self.done(status)
        self.events.send(data + self.named(f"response.{status}", response=whole))

    def error(self, error: Refused) -> bytes:
        """The event of an error."""
        return self.named("error", message=error.message, code=error.code, param=error.param)


__all__ = ["ResponseStream", "parse_responses", "response_body"]
