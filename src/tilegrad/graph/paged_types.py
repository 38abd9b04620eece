"""The types of `paged_append` and `paged_attention`: what they take and give, and names.

A paged cache holds keys (pages, key_heads, page, width) and values (pages, key_heads, page,
value_width). Key j of request r lies in page table[r, j // page] at place j % page. Tokens of all
requests lie one after the other: those of request r from query_starts[r] to query_starts[r + 1];
lengths[r] counts its keys, its new tokens included. A cache of 8 bits (e4m3, e5m2 or int8) has
`scales` (2, key_heads), of keys and of values: it holds them divided by those, rounded half to
even, and at the dtype's ends where they lie beyond. `sinks` (heads,), if there are any, are one
more score for each head, of a key that has no value. Invariant: what passes here has a meaning in
`paged_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.dtype import float32, int32
from ..core.errors import DTypeError, InternalError, ShapeError, UserError
from ..ir.node import Node
from ..ir.symbol import combine
from ..ir.types import Array, Tuple, Type
from .attention_types import divided_heads

ATTEND = ("q", "keys", "values", "scales", "table", "lengths", "query_starts", "sinks")
APPEND = ("q", "k", "v", "frequencies", *ATTEND[3:-1], "keys", "values")
ATTEND_ATTRS = ("scale", "window", "softcap", "queries", "single", "most_keys")
APPEND_ATTRS = ("width", "interleaved", "factor")
RANKS = {"q": 3, "keys": 4, "values": 4, "table": 2, "lengths": 1, "query_starts": 1}


def named(names: Sequence[str], inputs: Sequence[Any]) -> dict[str, Any]:
    """Inputs (Nodes or arrays) by name: all of `names`, but for the scales or the sinks."""
    if names[-1] == "sinks" and "int" in str(inputs[-1].dtype):  # the last one is query_starts
        names = names[:-1]
    if len(inputs) < len(names):
        names = [name for name in names if name != "scales"]
    if len(inputs) != len(names):
        raise InternalError("graph.paged", f"{len(inputs)} inputs, expected {names}")
    return dict(zip(names, inputs))


def _wanted_types(given: Mapping[str, Any]) -> dict[str, Array]:
    """The type that each input must have, as the sizes of q, keys, values, table and lengths say;
    these have as many axes as `RANKS` says."""
    q, keys, values = (given[name] for name in ("q", "keys", "values"))
    (tokens, _, width), (pages, key_heads, page, _) = q.shape, keys.shape
    requests, lead = given["lengths"].shape[0], (pages, key_heads, page)
    found = {
        "keys": Array((*lead, width), keys.dtype),
        "values": Array((*lead, values.shape[3]), keys.dtype),
        "table": Array((requests, given["table"].shape[1]), int32),
        "lengths": Array((requests,), int32),
        "query_starts": Array((combine(requests, 1, 1),), int32),
    }
    if "k" in given:
        found["k"] = Array((tokens, key_heads, width), q.dtype)
        found["v"] = Array((tokens, key_heads, values.shape[3]), q.dtype)
    if "scales" in given:
        found["scales"] = Array((2, key_heads), float32)
    if "sinks" in given:
        found["sinks"] = Array((q.shape[1],), float32)
    return found


def _checked(op: str, names: Sequence[str], inputs: Sequence[Node]) -> dict[str, Node]:
    """Inputs by name, where they agree."""
    given: dict[str, Node] = named(names, inputs)
    for name, rank in RANKS.items():
        axes = len(given[name].shape)
        if axes != rank:
            got = str(given[name].type)
            raise ShapeError(f"{name} has {axes} axes", op=op, expected=f"{rank} axes", got=got)
    if not given["q"].dtype.is_float:
        raise DTypeError("q needs floats", op=op, expected="a float dtype", got=given["q"].dtype)
    divided_heads(op, given["q"].shape[1], given["keys"].shape[1], least=1)
    if ("scales" in given) != (given["keys"].dtype.bits == 8):
        raise UserError(
            "scales belong to a cache of 8 bits",
            op=op,
            expected="scales (2, key heads) with it, and none without",
            got=given["keys"].dtype,
        )
    for name, wanted in _wanted_types(given).items():
        type_ = given[name].type
        if type_ != wanted:
            if given[name].shape != wanted.shape:
                raise ShapeError(f"{name} does not fit", op=op, expected=wanted, got=type_)
            raise DTypeError(f"{name} has another dtype", op=op, expected=wanted, got=type_)
    return given


def append_type(*inputs: Node, width: int, interleaved: bool, factor: float) -> Type:
    """(q rotated, keys, values)."""
    op = "paged_append"
    given = _checked(op, APPEND, inputs)
    speeds, most = given["frequencies"], given["q"].shape[2]
    if width > most:
        expected, got = f"at most {most // 2}", width // 2
        raise ShapeError("more frequencies than pairs", op=op, expected=expected, got=got)
    if speeds.type != Array((max(1, width // 2),), float32):
        raise InternalError("graph.paged_append", f"{speeds.type} turn {width} elements")
    return Tuple(tuple(given[name].type for name in ("q", "keys", "values")))


def attention_type(*inputs: Node, **attrs: Any) -> Type:
    """(tokens, heads, value_width)."""
    op = "paged_attention"
    given = _checked(op, ATTEND, inputs)
    for name in ("window", "softcap"):
        if not attrs[name] >= 0:
            raise UserError(f"{name} is below 0", op=op, expected="0 for none", got=attrs[name])
    tokens, heads, _ = given["q"].shape
    return Array((tokens, heads, given["values"].shape[3]), given["q"].dtype)
