"""What an answer has to look like: a Constraint, which is data, and the limits it must keep.

`Constraint("json_schema", text)`, or `of_settings` for what a caller asked for by name;
`grammar.py` compiles it. Invariant: a Constraint that exists is of a known kind and has a text
where it needs one; `check` says whether it is within the limits that show in its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import UserError

KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf")
SETTINGS = ("json_schema", "json_object", "regex", "choices", "ebnf")  # of generate, by name


@dataclass(frozen=True)
class ConstraintLimits:
    """The most a Constraint may ask for.

    The bytes also bound how deeply rules may refer to each other, and with that the stack that
    compiling takes (see `grammar.STACK`).
    """

    bytes: int = 1 << 16
    depth: int = 64  # of brackets within each other
    seconds: float = 5.0  # to compile it


LIMITS = ConstraintLimits()


@dataclass(frozen=True)
class Constraint:
    """The kind of a grammar and its text; every answer is a word of that grammar.

    `json_schema`: the text of a JSON schema. `json_object`: any JSON object; no text. `regex`: a
    regular expression that the whole answer matches. `choice`: a JSON list of strings, of which
    the answer is one. `ebnf`: a grammar in the notation of Lark, or in GBNF.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(
                "no such kind of constraint",
                op="Constraint",
                expected=", ".join(KINDS),
                got=repr(self.kind)[:60],
            )
        if not isinstance(self.text, str) or bool(self.text) == (self.kind == "json_object"):
            expected = "no text" if self.kind == "json_object" else "its text, which is not empty"
            got = repr(self.text)[:60]
            raise UserError(f"bad text of {self.kind}", op="Constraint", expected=expected, got=got)

    @staticmethod
    def schema(schema: str | Mapping[str, Any]) -> Constraint:
        """JSON of a schema, given as data or as text."""
        return Constraint(
            "json_schema", schema if isinstance(schema, str) else _dumped(schema, "json_schema")
        )

    @staticmethod
    def choice(choices: Sequence[str]) -> Constraint:
        """One of some strings."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise UserError(
                "bad choices",
                op="Constraint",
                expected="a list of strings",
                got=repr(choices)[:60],
            )
        return Constraint("choice", _dumped(list(choices), "choices"))


def of_settings(settings: Mapping[str, Any]) -> Constraint | None:
    """The Constraint that the settings of `generate` ask for; at most one of SETTINGS is given."""
    asked = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    if asked.get("json_object") is False:
        del asked["json_object"]
    if len(asked) > 1:
        raise UserError(
            "an answer has one constraint", op="generate", expected="one of them", got=list(asked)
        )
    for name, value in asked.items():
        if name == "json_schema":
            return Constraint.schema(value)
        if name == "choices":
            return Constraint.choice(value)
        return Constraint("json_object") if name == "json_object" else Constraint(name, value)
    return None


def check(constraint: Constraint, limits: ConstraintLimits = LIMITS) -> None:
    """Refuse a text that is too long, nested too deeply, or no JSON where it must be."""
    size = len(constraint.text.encode("utf-8", "surrogatepass"))
    if size > limits.bytes:
        raise exceeded(constraint, "is too long", f"at most {limits.bytes} bytes", f"{size} bytes")
    depth = _depth(constraint.text)
    if depth > limits.depth:
        raise exceeded(
            constraint, "is nested too deeply", f"at most {limits.depth} levels", f"{depth} levels"
        )
    try:
        constraint.text.encode("utf-8")
        data = json.loads(constraint.text) if _is_json(constraint) else None
    except ValueError as error:
        raise malformed(constraint, str(error)) from None
    if constraint.kind == "json_schema" and not isinstance(data, dict | bool):
        raise malformed(constraint, "a schema is a JSON object")
    if constraint.kind == "choice":
        fits = isinstance(data, list) and data and all(isinstance(c, str) and c for c in data)
        if not fits:
            raise malformed(constraint, "choices are a list of strings that are not empty")


def exceeded(constraint: Constraint, what: str, expected: str, got: str) -> UserError:
    """The error of a Constraint that is beyond a limit."""
    return UserError(f"the {constraint.kind} {what}", op="constraint", expected=expected, got=got)


def malformed(constraint: Constraint, why: str) -> UserError:
    """The error of a Constraint that means nothing, or something that is not supported."""
    return UserError(f"the {constraint.kind} does not fit", op="constraint", got=why[:300])


def _is_json(constraint: Constraint) -> bool:
    return constraint.kind in ("json_schema", "choice")


def _depth(text: str) -> int:
    """How deeply brackets of any kind are nested; those in strings count too."""
    depth = most = 0
    for letter in text:
        if letter in "([{":
            depth += 1
            most = max(most, depth)
        elif letter in ")]}":
            depth = max(0, depth - 1)
    return most


def _dumped(value: Any, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is no JSON", op="Constraint", got=str(error)[:200]) from None


__all__ = ["LIMITS", "SETTINGS", "Constraint", "ConstraintLimits", "check", "of_settings"]
