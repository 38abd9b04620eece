"""Tools that a request offers, whether one must be called, and how its answer is taken apart.

OpenAI, its responses and Anthropic spell tools in three ways; here they become one. Invariant:
tools are offered only to models that were made for them, and what a request says of them is within
its limits.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import UserError
from ..answer.parts import AnswerParser
from ..answer.reasoning import CLOSE, ReasoningParser, is_opened, reasons
from ..answer.tools import HERMES, ToolParser, constraint_of, format_of, names_of
from ..model import ServedModel
from ..refused import Refused, refused_by
from ..settings import Limits
from .constraints import put
from .fields import Fields, deeper
from .parameters import Ask

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tooling:
    """The tools of a request; `choice` is "auto", "required" or the name of one."""

    tools: list[dict[str, Any]] = field(default_factory=list)  # as templates see them
    choice: str = "none"
    parallel: bool = True

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """What the template is told of them."""
        return self.tools if self.tools and self.choice != "none" else None


def chat_tooling(fields: Fields, limits: Limits) -> Tooling:
    """The tools of a chat; those of a response are the same without `function` around them."""
    tools = []
    for item in fields.items("tools", limits.tools):
        item.choice("type", ("function",))
        tools.append(tool_of(item.inner("function") or item, "parameters", limits))
    choice = fields.any("tool_choice")
    if isinstance(choice, dict):
        inner = Fields(choice, "tool_choice")
        named = inner.inner("function") or inner
        choice = named.text("name", most=64)
        known(fields, tools, choice)
    elif choice is None:
        choice = "auto" if tools else "none"
    elif choice not in CHOICES:
        raise fields.wrong("tool_choice", "one of " + ", ".join(CHOICES) + ", or a function")
    if choice not in ("none", "auto") and not tools:
        raise fields.wrong("tools", "given where one must be called")
    return Tooling(tools, choice, fields.flag("parallel_tool_calls", True))


def message_tooling(fields: Fields, limits: Limits) -> Tooling:
    """The tools of a message of Anthropic's kind."""
    tools = []
    for item in fields.items("tools", limits.tools):
        item.choice("type", ("custom",))
        tools.append(tool_of(item, "input_schema", limits))
    inner = fields.inner("tool_choice")
    if inner is None:
        return Tooling(tools, "auto" if tools else "none")
    kind = inner.choice("type", ("auto", "any", "tool", "none"), "auto")
    choice = {"any": "required"}.get(kind or "", kind or "auto")
    if kind == "tool":
        choice = inner.text("name", most=64)
        known(fields, tools, choice)
    if choice not in ("none", "auto") and not tools:
        raise fields.wrong("tools", "given where one must be called")
    return Tooling(tools, choice, not inner.flag("disable_parallel_tool_use"))


def tool_of(fields: Fields, schema: str, limits: Limits) -> dict[str, Any]:
    """One tool as templates see it."""
    name = fields.text("name", most=64)
    if not NAME.fullmatch(name):
        raise fields.wrong("name", "1 to 64 letters, digits, dots, dashes and underscores")
    function: dict[str, Any] = {"name": name}
    if fields.has("description"):
        function["description"] = fields.text("description", most=limits.schema)
    inner = fields.inner(schema)
    if inner is not None:
        if len(json.dumps(inner.body)) > limits.schema or deeper(inner.body, limits.depth):
            raise fields.wrong(
                schema, f"of at most {limits.schema} bytes and {limits.depth} levels"
            )
        function["parameters"] = inner.body
    return {"type": "function", "function": function}


def known(fields: Fields, tools: list[dict[str, Any]], name: str) -> None:
    """Refuse a choice that is none of the tools."""
    if name not in names_of(tools):
        raise fields.wrong("tool_choice", "one of the tools")


def take_apart(ask: Ask, tooling: Tooling, model: ServedModel) -> None:
    """Settle how the answers of a chat are taken apart, and what they must look like for that."""
    form = None
    if tooling.shown:
        form = format_of(model.tokenizer)
        if form is None:
            raise Refused("this model was not made to call tools", param="tools")
        if tooling.choice != "auto":
            if "constraint" in ask.spec:
                raise Refused("an answer has one constraint", param="tool_choice")
            try:
                made = constraint_of(tooling.tools, tooling.choice, form, tooling.parallel)
            except UserError as error:
                raise refused_by(error, "tools") from None
            put(ask.spec, "tools", made, model)
    thinks = reasons(model.tokenizer) and "constraint" not in ask.spec
    if form is None and not thinks:
        return
    opened = thinks and is_opened(model.tokenizer, ask.prompts[0])
    names = names_of(tooling.tools)

    numbers = itertools.count()

    def parser() -> AnswerParser:
        ids = ask.ids.part(next(numbers))
        return AnswerParser(
            ReasoningParser(opened) if thinks else None,
            ToolParser(form, names, lambda: ids.new("call_", 24)) if form is not None else None,
        )

    ask.parser = parser
    hidden = {model.tokenizer.ids.get(tag) for tag in (CLOSE, HERMES.opens)}
    if hidden & model.tokenizer.hidden:  # tags that are control tokens must be seen
        ask.show_special = True


__all__ = ["Tooling", "chat_tooling", "message_tooling", "take_apart"]
