"""`/v1/completions`: text or ids to go on from, one or many.

Invariant: choices stand in the order of their prompts, `n` for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine.generation import Generation
from ..model import ServedModel
from ..settings import Limits
from ..stream import DONE, Collected, Events, Streamed, dumps, quoted
from .constraints import constrain
from .fields import Fields
from .openai_chat import streaming_of
from .openai_shapes import CompletionLogprobs, usage_of
from .parameters import WHOLE, Ask, check_model, fit, refuse_foreign, spec_of, stops_of

MAX_TOKENS = 16  # where the client does not say


@dataclass(frozen=True)
class Echo:
    """Prompts that stand before their answers; `alone`: the answer is one token, and not shown."""

    prompts: list[str]
    alone: bool


def parse_completions(fields: Fields, model: ServedModel, limits: Limits) -> Ask:
    """What the body of a completion asks for."""
    check_model(fields, model)
    refuse_foreign(fields)
    fields.refuse("suffix")
    prompts, texts = prompts_of(fields, model, limits)
    n = fields.whole("n", 1, limits.n) or 1
    best = fields.whole("best_of", 1, limits.n)
    if best is not None and best != n:
        raise fields.wrong("best_of", "equal to 'n'")
    if len(prompts) * n > limits.choices:
        raise fields.wrong("n", f"at most {limits.choices} over the number of prompts")
    echo = fields.flag("echo")
    most = fields.whole("max_tokens", 0 if echo else 1, WHOLE)
    most = MAX_TOKENS if most is None else most
    shown = fields.whole("logprobs", 0, limits.logprobs)
    ask = Ask(
        prompts,
        spec_of(fields, model, limits, most or 1),
        n=n,
        stop=stops_of(fields, limits),
        include_stop=fields.flag("include_stop_str_in_output"),
        show_special=not fields.flag("skip_special_tokens", True),
        logprobs=shown,
    )
    if shown is not None:
        ask.spec["sampling"]["logprobs"] = max(1, shown)
    if echo:
        said = [
            text if text is not None else model.tokenizer.decode(prompt, show_special=True)
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        ask.fields = Echo(said, alone=most == 0)
        if shown is not None:
            ask.spec["scores"] = max(1, shown)
    streaming_of(fields, ask)
    fit(ask, model, "prompt")
    constrain(ask.spec, fields, model, limits)
    return ask


def prompts_of(
    fields: Fields, model: ServedModel, limits: Limits
) -> tuple[list[list[int]], list[str | None]]:
    """The ids of all prompts, and the texts of those that were texts."""
    given = fields.any("prompt")
    special = fields.flag("add_special_tokens", True)
    if isinstance(given, str) or (isinstance(given, list) and given and is_id(given[0])):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= limits.prompts:
        raise fields.wrong("prompt", f"text, ids, or a list of 1 to {limits.prompts} of those")
    ids: list[list[int]] = []
    texts: list[str | None] = []
    for one in given:
        if isinstance(one, str):
            texts.append(one)
            ids.append(model.encode(one, "prompt", limits.characters, add_special=special))
        elif isinstance(one, list) and len(one) <= model.context and all(map(is_id, one)):
            texts.append(None)
            ids.append(one)
        else:
            raise fields.wrong("prompt", f"text or at most {model.context} ids")
    return ids, texts


def is_id(value: Any) -> bool:
    """Whether a value may be an id."""
    return isinstance(value, int) and not isinstance(value, bool)


def checked_ids(fields: Fields, name: str, model: ServedModel, most: int) -> list[int]:
    """A list of ids of the model."""
    given = fields.listed(name, most)
    if not all(is_id(i) and 0 <= i < len(model.tokenizer) for i in given):
        raise fields.wrong(name, f"ids from 0 to {len(model.tokenizer) - 1}")
    return given


def completion_body(
    ask: Ask, model: ServedModel, ones: list[Generation], found: Collected
) -> dict[str, Any]:
    """The response in one piece."""
    choices = []
    echo: Echo | None = ask.fields
    alone = echo is not None and echo.alone
    for one in ones:
        text, tokens = found.text(one.index), found.tokens[one.index]
        if alone:
            text, tokens = "", []
        logprobs = None
        if ask.logprobs is not None:
            shape = CompletionLogprobs(model, ask.logprobs, 0)
            logprobs = shape.of([*shape.of_prompt(one), *tokens] if echo else tokens)
        choices.append(
            {
                "index": one.index,
                "text": echo.prompts[one.index // ask.n] + text if echo else text,
                "logprobs": logprobs,
                "finish_reason": "length" if alone else one.finish,
                "stop_reason": None if alone else one.stop_reason,
            }
        )
    return {
        "id": ask.ids.new("cmpl-"),
        "object": "text_completion",
        "created": ask.created,
        "model": ask.named(model),
        "choices": choices,
        "usage": counted(ask, ones),
    }


def counted(ask: Ask, ones: list[Generation]) -> dict[str, Any]:
    """Usage; a token that is not shown is not counted."""
    usage = usage_of(ones, ask.n)
    if ask.fields is not None and ask.fields.alone:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return usage


class CompletionStream(Streamed):
    """A completion's chunks."""

    def __init__(self, events: Events, ask: Ask, model: ServedModel) -> None:
        count = len(ask.prompts) * ask.n
        super().__init__(events, count)
        self.ask = ask
        self.ones: list[Generation] = []
        start = {
            "id": ask.ids.new("cmpl-"),
            "object": "text_completion",
            "created": ask.created,
            "model": ask.named(model),
        }
        self.start = b"data: " + dumps(start).encode()[:-1]
        self.usage = b',"usage":null' if ask.usage else b""
        self.heads = [self.start + b',"choices":[{"index":%d,"text":' % i for i in range(count)]
        self.tail = b',"logprobs":null,"finish_reason":null}]' + self.usage + b"}\n\n"
        self.logprobs = [CompletionLogprobs(model, ask.logprobs or 0, 0) for _ in range(count)]
        self.echo: Echo | None = ask.fields
        self.alone = ask.fields is not None and ask.fields.alone
        self.echoed = [ask.fields is None] * count

    def piece(self, one: Generation, text: str, token: int, more: Any) -> None:
        """A chunk with the text of one more token."""
        index = one.index
        if not self.echoed[index]:
            self.put_prompt(one)
        if self.alone:
            return
        if more is not None and self.ask.logprobs is not None:
            tokens = [(token, more)] if token >= 0 else []
            if tokens or text:
                self.put(index, text, self.logprobs[index].of(tokens), None)
        elif text:
            self.events.send(self.heads[index] + quoted(text) + self.tail)

    def put_prompt(self, one: Generation) -> None:
        """The chunk with the prompt, before those of its answer."""
        index, self.echoed[one.index] = one.index, True
        logprobs = None
        if self.ask.logprobs is not None:
            shape = self.logprobs[index]
            logprobs = shape.of(shape.of_prompt(one))
        assert self.echo is not None
        self.put(index, self.echo.prompts[index // self.ask.n], logprobs, None)

    def put(self, index: int, text: str, logprobs: Any, finish: Any) -> None:
        """Any other chunk of a choice."""
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = None if self.alone else self.ones[index].stop_reason
        body = b',"choices":[' + dumps(choice).encode() + b"]" + self.usage + b"}\n\n"
        self.events.send(self.start + body)

    def closed(self, one: Generation) -> None:
        """The chunk that says why a choice ended."""
        self.put(one.index, "", None, "length" if self.alone else one.finish)

    def complete(self) -> None:
        """Usage, if it was asked for, and the end."""
        data = b""
        if self.ask.usage:
            usage = dumps(counted(self.ask, self.ones)).encode()
            data = self.start + b',"choices":[],"usage":' + usage + b"}\n\n"
        self.events.send(data + DONE)


__all__ = ["CompletionStream", "checked_ids", "completion_body", "parse_completions"]
