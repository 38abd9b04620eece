"""What a body says an answer must look like, in the spellings that clients have.

OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`. Invariant: what comes
out was compiled here, within its limits, so that the engine is not kept waiting by a bad one.
"""

from __future__ import annotations

import json
from typing import Any

from ...core.errors import UserError
from ...generate.constraint import Constraint
from ..model import ServedModel
from ..refused import Refused, refused_by
from ..settings import Limits
from .fields import Fields, deeper

GUIDED = {  # vLLM's older names, and those within `structured_outputs`
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FORMATS = ("text", "json_object", "json_schema")


def constrain(spec: dict[str, Any], fields: Fields, model: ServedModel, limits: Limits) -> None:
    """Put the constraint that a body asks for, if any, into the engine's request."""
    found = [*format_of(fields, "response_format", limits), *guided_of(fields, limits)]
    if len(found) > 1:
        raise Refused("an answer has one constraint", param=found[1][0])
    for param, constraint in found:
        put(spec, param, constraint, model)


def put(spec: dict[str, Any], param: str, constraint: Constraint, model: ServedModel) -> None:
    """Put a constraint into the engine's request, once it is known to compile."""
    if spec["min_tokens"]:
        raise Refused("an answer with a constraint ends where it is whole", param="min_tokens")
    if not model.tokenizer.ends <= set(spec["stop_tokens"]):
        raise Refused("an answer with a constraint ends where it is whole", param="ignore_eos")
    try:
        model.grammars.matcher(constraint)
    except UserError as error:
        raise refused_by(error, param) from None
    spec["constraint"] = [constraint.kind, constraint.text]


def format_of(fields: Fields, name: str, limits: Limits) -> list[tuple[str, Constraint]]:
    """The constraint of OpenAI's `response_format`, or of `format` of a response's text."""
    inner = fields.inner(name)
    if inner is None:
        return []
    kind = inner.choice("type", FORMATS)
    if kind is None:
        raise inner.wrong("type", "one of " + ", ".join(FORMATS))
    if kind == "text":
        return []
    if kind == "json_object":
        return [(inner.path, Constraint("json_object"))]
    holder = inner.inner("json_schema") or inner
    schema = holder.any("schema")
    if not isinstance(schema, dict):
        raise holder.wrong("schema", "a JSON schema")
    return [(holder.name("schema"), schema_constraint(schema, holder.name("schema"), limits))]


def guided_of(fields: Fields, limits: Limits) -> list[tuple[str, Constraint]]:
    """The constraints of vLLM's names."""
    given = {name: (fields, name) for name in GUIDED if fields.has(name)}
    inner = fields.inner("structured_outputs")
    asked = [(GUIDED[name], where, name) for name, (where, _) in given.items()]
    if inner is not None:
        known = [*GUIDED.values(), "json_object"]
        asked += [(name, inner, name) for name in known if inner.has(name)]
    return [(where.name(name), one(kind, where, name, limits)) for kind, where, name in asked]


def one(kind: str, fields: Fields, name: str, limits: Limits) -> Constraint:
    """The constraint of one field."""
    value = fields.any(name)
    if kind == "json_object":
        return Constraint("json_object")
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise fields.wrong(name, "a JSON schema") from None
        if not isinstance(value, dict):
            raise fields.wrong(name, "a JSON schema")
        return schema_constraint(value, fields.name(name), limits)
    if kind == "choice":
        good = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        if not good:
            raise fields.wrong(name, "a list of strings")
        return Constraint.choice(value)
    text = fields.text(name, most=limits.schema)
    if not text:
        raise fields.wrong(name, "a string that is not empty")
    return Constraint("regex" if kind == "regex" else "ebnf", text)


def schema_constraint(schema: dict[str, Any], param: str, limits: Limits) -> Constraint:
    """The constraint of a JSON schema within its limits."""
    text = json.dumps(schema)
    if len(text) > limits.schema or deeper(schema, limits.depth):
        raise Refused(
            f"'{param}' must have at most {limits.schema} bytes and {limits.depth} levels",
            param=param,
        )
    return Constraint("json_schema", text)


__all__ = ["constrain", "format_of", "put"]
