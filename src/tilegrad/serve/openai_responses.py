"""`/v1/responses`: one answer to an input, whole or as events.

Nothing is kept between requests: an input carries its whole conversation. Invariant: the deltas of
a stream, put together, are the output of the response that ends it.
"""

from __future__ import annotations

import time
from typing import Any

from .constraints import format_of, put
from .fields import Fields
from .generation import Generation
from .messages import NAME, content_of, message_of
from .model import ServedModel
from .openai_shapes import new_id
from .parameters import WHOLE, Ask, check_model, fit, refuse_foreign, spec_of, template_flags
from .refused import Refused
from .settings import Limits
from .stream import Collected, Events, Streamed, dumps, quoted

UNSUPPORTED = ("previous_response_id", "background", "conversation", "prompt")
IGNORED = ("reasoning", "item_reference")  # items that say nothing to the model


def parse_responses(fields: Fields, model: ServedModel, limits: Limits) -> Ask:
    """What the body of a response asks for."""
    check_model(fields, model)
    refuse_foreign(fields)
    fields.refuse(*UNSUPPORTED)
    most = fields.whole("max_output_tokens", 1, WHOLE)
    messages = input_of(fields, limits)
    ids = model.encode_chat(messages, None, limits.characters, **template_flags(fields))
    ask = Ask([ids], spec_of(fields, model, limits, most), stream=fields.flag("stream"))
    shown = fields.whole("top_logprobs", 0, limits.logprobs)
    if shown:
        raise Refused("'top_logprobs' are not served here", param="top_logprobs")
    fit(ask, model, "input")
    text = fields.inner("text")
    for param, constraint in format_of(text, "format", limits) if text else []:
        put(ask.spec, param, constraint, model)
    ask.fields = {
        "instructions": fields.text("instructions", None, limits.body),
        "max_output_tokens": most,
        "metadata": fields.any("metadata") if isinstance(fields.any("metadata"), dict) else {},
        "temperature": ask.spec["sampling"].get("temperature"),
        "top_p": ask.spec["sampling"].get("top_p", 1.0),
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
    from .messages import call_of

    function = {"name": fields.any("name"), "arguments": fields.any("arguments")}
    call = Fields({"id": fields.any("call_id"), "function": function}, fields.path)
    return {"role": "assistant", "content": "", "tool_calls": [call_of(call)]}


# ---- answers -----------------------------------------------------------------------------------


class Shape:
    """The parts of one response."""

    def __init__(self, ask: Ask, model: ServedModel) -> None:
        self.ask, self.model = ask, model
        self.id, self.item = new_id("resp"), new_id("msg")
        self.created = int(time.time())

    def message(self, text: str, status: str) -> dict[str, Any]:
        """The item that holds the text."""
        content = [self.part(text)] if status != "in_progress" else []
        return {
            "id": self.item,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def part(self, text: str) -> dict[str, Any]:
        """The part of the item that is the text."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def whole(self, status: str, output: list[Any], one: Generation | None) -> dict[str, Any]:
        """The response."""
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "model": self.model.name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None if one is None else usage_of(one),
            **self.ask.fields,
        }

    def ended(self, one: Generation, text: str) -> dict[str, Any]:
        """The response once it is whole."""
        status = "incomplete" if one.finish == "length" else "completed"
        return self.whole(status, [self.message(text, status)], one)


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
    return Shape(ask, model).ended(ones[0], found.text(0))


class ResponseStream(Streamed):
    """A response's events."""

    def __init__(self, events: Events, ask: Ask, model: ServedModel) -> None:
        super().__init__(events, 1)
        self.shape = Shape(ask, model)
        self.ones: list[Generation] = []
        self.number = 0
        self.texts: list[str] = []
        place = {"item_id": self.shape.item, "output_index": 0, "content_index": 0}
        self.place = place
        head = dumps({"type": "response.output_text.delta", **place, "logprobs": []})
        self.head = b"event: response.output_text.delta\ndata: " + head.encode()[:-1]

    def named(self, kind: str, **body: Any) -> bytes:
        """One event with its name and number."""
        body = {"type": kind, "sequence_number": self.number, **body}
        self.number += 1
        return f"event: {kind}\ndata: {dumps(body)}\n\n".encode()

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """An event with the text of one more token."""
        if not self.number:
            self.events.send(self.opening())
        if text:
            self.texts.append(text)
            number, self.number = self.number, self.number + 1
            rest = b',"sequence_number":%d,"delta":%b}\n\n' % (number, quoted(text))
            self.events.send(self.head + rest)

    def opening(self) -> bytes:
        """What comes before all text."""
        shape = self.shape
        begun = shape.whole("in_progress", [], None)
        item = shape.message("", "in_progress")
        return (
            self.named("response.created", response=begun)
            + self.named("response.in_progress", response=begun)
            + self.named("response.output_item.added", output_index=0, item=item)
            + self.named("response.content_part.added", **self.place, part=shape.part(""))
        )

    def closed(self, one: Generation) -> None:
        """What comes after all text."""
        text = "".join(self.texts)
        whole = self.shape.ended(one, text)
        item, status = whole["output"][0], whole["status"]
        self.events.send(
            self.named("response.output_text.done", **self.place, text=text, logprobs=[])
            + self.named("response.content_part.done", **self.place, part=self.shape.part(text))
            + self.named("response.output_item.done", output_index=0, item=item)
            + self.named(f"response.{status}", response=whole)
        )

    def error(self, error: Refused) -> bytes:
        """The event of an error."""
        return self.named("error", message=error.message, code=error.code, param=error.param)


__all__ = ["ResponseStream", "parse_responses", "response_body"]
