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

from collections.abc import Sequence
from typing import Any

from ..core.dtype import float32, int32
from ..core.errors import InternalError, ShapeError, UserError
from ..ir.node import Node
from ..ir.symbol import combine
from ..ir.types import Array, Tuple, Type, product
from .attention_types import Row, check_inputs, divided_heads

ATTEND = ("q", "keys", "values", "scales", "table", "lengths", "query_starts", "sinks")
APPEND = ("q", "k", "v", "frequencies", *ATTEND[3:-1], "keys", "values")
ATTEND_ATTRS = ("scale", "window", "softcap", "queries", "single", "most_keys")
APPEND_ATTRS = ("width", "interleaved", "factor")
CACHE = ("pages", "key heads", "page")
INPUTS: dict[str, Row] = {
    "q": (("tokens", "heads", "width"), None, "queries of all requests"),
    "k": (("tokens", "key heads", "width"), "q", "new keys"),
    "v": (("tokens", "key heads", "value width"), "q", "new values"),
    "frequencies": (("pairs",), float32, "one for each pair of a head"),
    "scales": (("2", "key heads"), float32, "of keys and of values"),
    "table": (("requests", "most pages"), int32, "the pages of each request"),
    "lengths": (("requests",), int32, "keys of each request"),
    "query_starts": (("requests + 1",), int32, "a start for each request and the end of the last"),
    "sinks": (("heads",), float32, "one for each head"),
    "keys": ((*CACHE, "width"), "keys", "all pages"),
    "values": ((*CACHE, "value width"), "keys", "all pages"),
}


def named(names: Sequence[str], inputs: Sequence[Any]) -> dict[str, Any]:
    """Inputs (Nodes or arrays) by name: all of `names`, but for the scales or the sinks."""
    if names[-1] == "sinks" and "int" in str(inputs[-1].dtype):  # the last one is query_starts
        names = names[:-1]
    if len(inputs) < len(names):
        names = [name for name in names if name != "scales"]
    if len(inputs) != len(names):
        raise InternalError("graph.paged", f"{len(inputs)} inputs, expected {names}")
    return dict(zip(names, inputs))


def _checked(op: str, names: Sequence[str], inputs: Sequence[Node]) -> dict[str, Node]:
    """Inputs by name, where they agree."""
    given: dict[str, Node] = named(names, inputs)
    requests = product(given["lengths"].shape)
    check_inputs(op, given, INPUTS, {"2": 2, "requests + 1": combine(requests, 1, 1)})
    divided_heads(op, given["q"].shape[1], given["keys"].shape[1], least=1)
    if ("scales" in given) != (given["keys"].dtype.bits == 8):
        raise UserError(
            "scales belong to a cache of 8 bits",
            op=op,
            expected="scales (2, key heads) with it, and none without",
            got=given["keys"].dtype,
        )
    return given


def append_type(*inputs: Node, width: int, interleaved: bool, factor: float) -> Type:
    """(q rotated, keys, values)."""
    op = "paged_append"
    given = _checked(op, APPEND, inputs)
    most = given["q"].shape[2]
    if width > most:
        expected, got = f"at most {most // 2}", width // 2
        raise ShapeError("more frequencies than pairs", op=op, expected=expected, got=got)
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
