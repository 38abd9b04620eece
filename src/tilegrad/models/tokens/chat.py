"""Chat templates: messages to the text a model was trained on, by a template out of its files.

The settings are those of Hugging Face (trimmed blocks, `tojson` without escapes, `raise_exception`,
`strftime_now`, `break` and `continue`, `generation` blocks), in the sandbox of `sandbox.py`.

Invariant: a template sees plain data only, and whatever it does ends in text or in a UserError
that names its line.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import UserError

MOST_DEPTH = 32
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def plain_data(value: Any, name: str, depth: int = 0) -> Any:
    """A copy of data made of dicts, lists, strings, numbers, bools and None; else an error."""
    if depth > MOST_DEPTH:
        raise UserError(
            f"{name} is nested too deeply", op="chat", expected=f"at most {MOST_DEPTH} levels"
        )
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(
                    f"{name} has a key that is no string", op="chat", got=repr(key)[:60]
                )
        return {str(key): plain_data(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, name, depth + 1) for item in value]
    raise UserError(
        f"{name} holds what a template may not see",
        op="chat",
        expected="dicts, lists, strings, numbers",
        got=type(value).__name__,
    )


def checked_messages(messages: Any) -> list[dict]:
    """Messages as plain data, each with a role and its content."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UserError(
            "messages are needed",
            op="chat",
            expected="a list of {'role': ..., 'content': ...}",
            got=type(messages).__name__,
        )
    out = plain_data(list(messages), "messages")
    for place, message in enumerate(out):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"message {place} has no role",
                op="chat",
                expected="{'role': ..., 'content': ...}",
                got=repr(message)[:60],
            )
        if not isinstance(message.get("content"), str | list | None):
            raise UserError(
                f"content of message {place} does not fit",
                op="chat",
                expected="a string or a list of parts",
                got=type(message["content"]).__name__,
            )
    return out


def strftime_now(form: str) -> str:
    """Today's date and time in a form such as `%d %b %Y`."""
    if not isinstance(form, str) or len(form) > 100 or re.search(r"%[^%A-Za-z]*\d", form):
        raise UserError("the form of a date does not fit", op="chat", got=repr(form)[:60])
    return datetime.datetime.now().strftime(form)


class ChatTemplate:
    """A chat template, compiled when it is made."""

    def __init__(self, text: str, limits: Any = None) -> None:
        """`limits` is a `sandbox.Limits`; the usual ones if None."""
        from .sandbox import Sandbox

        if not isinstance(text, str):
            raise UserError("a template is text", op="chat template", got=type(text).__name__)
        self.text = text
        self.sandbox = Sandbox(text, limits, {"strftime_now": strftime_now})

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.text)} characters)"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a chat; further variables go to the template as they are."""
        taken = RESERVED & variables.keys()
        if taken:
            raise UserError(f"{sorted(taken)} are not free for variables", op="chat")
        told = plain_data(dict(variables), "variables")
        told |= {
            "messages": checked_messages(messages),
            "tools": plain_data(list(tools), "tools") if tools else None,
            "documents": plain_data(list(documents), "documents") if documents else None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        return self.sandbox.render(told)
