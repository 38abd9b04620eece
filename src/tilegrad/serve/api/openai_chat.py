"""`/v1/chat/completions`: messages in, choices out, whole or streamed.

Invariant: the deltas of a streamed choice, put together, are the message of the same request
without streaming.
"""

from __future__ import annotations

from typing import Any

from ..answer.parts import Part
from ..engine.generation import Generation
from ..model import ServedModel
from ..refused import Refused
from ..settings import Limits
from ..stream import DONE, Collected, Events, Streamed, dumps, quoted
from .constraints import constrain
from .fields import Fields
from .messages import messages_of
from .openai_shapes import chat_logprob, usage_of
from .parameters import (
    WHOLE,
    Ask,
    check_model,
    fit,
    refuse_foreign,
    spec_of,
    stops_of,
    template_flags,
)
from .tooling import chat_tooling, take_apart

UNSUPPORTED = ("audio", "prediction", "web_search_options", "functions", "function_call")


def parse_chat(fields: Fields, model: ServedModel, limits: Limits) -> Ask:
    """What the body of a chat asks for."""
    check_model(fields, model)
    refuse_foreign(fields)
    fields.refuse(*UNSUPPORTED)
    if fields.any("modalities") not in (None, ["text"]):
        raise fields.wrong("modalities", '["text"]')
    messages, tooling = messages_of(fields, limits), chat_tooling(fields, limits)
    flags = template_flags(fields)
    most = fields.whole("max_completion_tokens", 1, WHOLE)
    most = most or fields.whole("max_tokens", 1, WHOLE)
    ask = Ask(
        [model.encode_chat(messages, tooling.shown, limits.characters, **flags)],
        spec_of(fields, model, limits, most),
        n=fields.whole("n", 1, limits.n) or 1,
        stop=stops_of(fields, limits),
        include_stop=fields.flag("include_stop_str_in_output"),
        show_special=not fields.flag("skip_special_tokens", True),
        logprobs=logprobs_of(fields, limits),
    )
    if ask.logprobs is not None:
        ask.spec["sampling"]["logprobs"] = max(1, ask.logprobs)
    streaming_of(fields, ask)
    fit(ask, model, "messages")
    constrain(ask.spec, fields, model, limits)
    take_apart(ask, tooling, model)
    return ask


def logprobs_of(fields: Fields, limits: Limits) -> int | None:
    """How many likeliest tokens are shown; None where no logprobs are asked for."""
    top = fields.whole("top_logprobs", 0, limits.logprobs)
    if not fields.flag("logprobs"):
        if top:
            raise fields.wrong("logprobs", "true where 'top_logprobs' is given")
        return None
    return top or 0


def streaming_of(fields: Fields, ask: Ask) -> None:
    """Whether an answer is streamed, and with what at its end."""
    ask.stream = fields.flag("stream")
    inner = fields.inner("stream_options")
    if inner is not None:
        if not ask.stream:
            raise Refused("'stream_options' are for streams", param="stream_options")
        ask.usage = inner.flag("include_usage")


def chat_body(
    ask: Ask, model: ServedModel, ones: list[Generation], found: Collected
) -> dict[str, Any]:
    """The response in one piece."""
    choices = []
    for one in ones:
        logprobs = None
        if ask.logprobs is not None:
            tokens = found.tokens[one.index]
            content = [chat_logprob(model, t, more, ask.logprobs) for t, more in tokens]
            logprobs = {"content": content, "refusal": None}
        message, finish = chat_message(ask, found.text(one.index), one.finish)
        choices.append(
            {
                "index": one.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": finish,
                "stop_reason": one.stop_reason,
            }
        )
    return {
        "id": ask.ids.new("chatcmpl-"),
        "object": "chat.completion",
        "created": ask.created,
        "model": ask.named(model),
        "choices": choices,
        "usage": usage_of(ones, ask.n),
    }


def chat_message(ask: Ask, text: str, finish: str | None) -> tuple[dict[str, Any], str | None]:
    """The message of a whole text, and why it ended."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if ask.parser is None:
        return message, finish
    found = ask.parser().whole(text)
    message["content"] = found.content or (None if found.calls else "")
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in found.calls
        ]
        finish = "tool_calls" if finish == "stop" else finish
    return message, finish


def delta_of(part: Part) -> dict[str, Any]:
    """A Part as the delta of a chunk."""
    if part.kind == "content":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.kind == "call":
        function = {"name": part.text, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}


class ChatStream(Streamed):
    """A chat's chunks; what is the same in all of them is made once."""

    def __init__(self, events: Events, ask: Ask, model: ServedModel) -> None:
        super().__init__(events, ask.n)
        self.ask, self.model = ask, model
        self.parsers = [ask.parser() for _ in range(ask.n)] if ask.parser else []
        self.ones: list[Generation] = []
        start = {
            "id": ask.ids.new("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": ask.created,
            "model": ask.named(model),
        }
        self.start = b"data: " + dumps(start).encode()[:-1]
        self.usage = b',"usage":null' if ask.usage else b""
        self.heads = [
            self.start + b',"choices":[{"index":%d,"delta":{"content":' % i for i in range(ask.n)
        ]
        self.tail = b'},"logprobs":null,"finish_reason":null}]' + self.usage + b"}\n\n"
        self.begun = [False] * ask.n

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """A chunk with the text of one more token."""
        index = one.index
        if not self.begun[index]:
            self.begun[index] = True
            self.put(index, {"role": "assistant", "content": ""})
        logprobs = None
        if more is not None and token >= 0 and self.ask.logprobs is not None:
            shown = chat_logprob(self.model, token, more, self.ask.logprobs)
            logprobs = {"content": [shown], "refusal": None}
        if self.parsers:
            self.parts(index, self.parsers[index].add(text), logprobs)
        elif logprobs is not None:
            self.put(index, {"content": text}, logprobs)
        elif text:
            self.events.send(self.heads[index] + quoted(text) + self.tail)

    def parts(self, index: int, parts: list[Part], logprobs: Any = None) -> None:
        """Chunks of what a parser gave; logprobs go with the first."""
        deltas = [delta_of(part) for part in parts] or ([{}] if logprobs else [])
        for delta in deltas:
            self.put(index, delta, logprobs)
            logprobs = None

    def put(self, index: int, delta: Any, logprobs: Any = None, finish: Any = None) -> None:
        """Any other chunk of a choice."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs}
        choice["finish_reason"] = finish
        if finish is not None:
            choice["stop_reason"] = self.ones[index].stop_reason
        body = b',"choices":[' + dumps(choice).encode() + b"]" + self.usage + b"}\n\n"
        self.events.send(self.start + body)

    def closed(self, one: Generation) -> None:
        """The chunk that says why a choice ended."""
        finish = one.finish
        if self.parsers:
            parser = self.parsers[one.index]
            self.parts(one.index, parser.finish())
            finish = "tool_calls" if parser.calls and finish == "stop" else finish
        self.put(one.index, {}, None, finish)

    def complete(self) -> None:
        """Usage, if it was asked for, and the end."""
        data = b""
        if self.ask.usage:
            usage = dumps(usage_of(self.ones, self.ask.n)).encode()
            data = self.start + b',"choices":[],"usage":' + usage + b"}\n\n"
        self.events.send(data + DONE)


__all__ = ["ChatStream", "chat_body", "parse_chat", "streaming_of"]
