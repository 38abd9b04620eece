"""The types of `attention` and `attention_backward`: what they take, what they give, and names.

Axes are called b (batch), h (heads), t (tokens) and d (width); an order such as "bthd" says how
they lie. Invariant: what passes here has a meaning in `attention_reference` for every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtype import DType, bool_, float32, float64, int32, uint32
from ..core.errors import InternalError
from ..ir.node import Node
from ..ir.symbol import Expr, Size
from ..ir.types import Array, Tuple, Type

PLAIN = ("bhtd", "bhtd", "bhtd", "bhtd")  # orders of q, k, v and the result
EXTRAS = (
    "bias",
    "mask",
    "slopes",
    "sinks",
    "key_lengths",
    "query_starts",
    "key_starts",
    "key",
    "offset",
)
WANTED = ("bias", "slopes", "sinks")  # extras that may have a gradient, in this order
ATTRS = ("scale", "band", "softcap", "dropout", "extras", "orders")

Band = tuple[Size | None, Size | None]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention."""

    batch: Size
    heads: int
    key_heads: int
    queries: Size
    keys: Size
    width: Size
    value_width: Size

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads if self.key_heads else 1

    @property
    def rows(self) -> tuple[Size, ...]:
        """The shape of what there is one of for each query."""
        return (self.batch, self.heads, self.queries)

    @property
    def scores(self) -> tuple[Size, ...]:
        """The shape of the scores."""
        return (*self.rows, self.keys)

    def result(self, order: str) -> tuple[Size, ...]:
        """The shape of the result in an order."""
        of = {"b": self.batch, "h": self.heads, "t": self.queries, "d": self.value_width}
        return tuple(of[axis] for axis in order)


def sum_dtype(dtype: DType) -> DType:
    """The dtype of scores, sums and log-sum-exps over values of a dtype."""
    return float64 if dtype is float64 else float32


def _fail(message: str) -> InternalError:
    return InternalError("graph.attention", message)


def _named(x: Node, order: str, name: str) -> dict[str, Any]:
    if not isinstance(x.type, Array) or len(x.shape) != 4 or not x.dtype.is_float:
        raise _fail(f"{name} is {x.type}, expected four axes of floats")
    return dict(zip(order, x.shape))


def sizes(q: Node, k: Node, v: Node, orders: Sequence[str]) -> Sizes:
    """The sizes that q, k and v have; an error where they do not fit."""
    if len(orders) != 4:
        raise _fail(f"orders are of q, k, v and the result, got {orders}")
    for order in orders:
        if sorted(order) != list("bdht") or order[-1] != "d":
            raise _fail(f"{order!r} is not an order of b, h, t and d that ends in d")
    of_q, of_k, of_v = (_named(x, order, name) for x, order, name in zip((q, k, v), orders, "qkv"))
    if not q.dtype is k.dtype is v.dtype:
        raise _fail(f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    heads, key_heads = of_q["h"], of_k["h"]
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        raise _fail("the number of heads is not known")
    if heads % key_heads if key_heads else heads:
        raise _fail(f"{heads} heads do not divide by {key_heads} key heads")
    same = [(of_k[a], of_v[a]) for a in "bht"] + [(of_q[a], of_k[a]) for a in "bd"]
    if any(a != b for a, b in same):
        raise _fail(f"shapes do not fit: {q.type}, {k.type}, {v.type} as {orders}")
    return Sizes(of_q["b"], heads, key_heads, of_q["t"], of_k["t"], of_q["d"], of_v["d"])


def _check_extra(name: str, x: Node, s: Sizes) -> None:
    if name in ("bias", "mask"):
        fits = len(x.shape) == 4 and all(a in (1, b) for a, b in zip(x.shape, s.scores))
        if not fits or not (x.dtype is bool_ if name == "mask" else x.dtype.is_float):
            raise _fail(f"{name} is {x.type}, scores are {s.scores}")
    elif name in ("slopes", "sinks"):
        if x.shape != (s.heads,) or not x.dtype.is_float:
            raise _fail(f"{name} is {x.type}, expected a float for each of {s.heads} heads")
    elif name == "key_lengths":
        if x.type != Array((s.batch,), int32):
            raise _fail(f"key_lengths is {x.type}, expected int32[{s.batch}]")
    elif name in ("query_starts", "key_starts"):
        if len(x.shape) != 1 or x.dtype is not int32 or s.batch != 1 or x.shape[0] == 0:
            raise _fail(f"{name} is {x.type}, expected int32 with one axis, and a batch of 1")
    elif x.type != Array((), uint32):
        raise _fail(f"{name} is {x.type}, expected a uint32 scalar")


def _check(s: Sizes, more: Sequence[Node], attrs: dict[str, Any]) -> None:
    extras, band = attrs["extras"], attrs["band"]
    if len(extras) != len(more) or len(set(extras)) != len(extras) or set(extras) - set(EXTRAS):
        raise _fail(f"the extras {extras} do not name {len(more)} inputs")
    if len(band) != 2 or not all(b is None or isinstance(b, (int, Expr)) for b in band):
        raise _fail(f"band is {band}")
    if not 0.0 <= attrs["dropout"] < 1.0 or attrs["softcap"] < 0.0:
        raise _fail(f"dropout is {attrs['dropout']}, softcap is {attrs['softcap']}")
    given = dict(zip(extras, more))
    pairs = (("query_starts", "key_starts"), ("key", "offset"))
    if any((a in given) != (b in given) for a, b in pairs):
        raise _fail(f"query_starts and key_starts, key and offset go together: {extras}")
    if ("key" in given) != (attrs["dropout"] > 0.0):
        raise _fail("key and offset belong to dropout")
    if "query_starts" in given:
        if "key_lengths" in given or given["query_starts"].type != given["key_starts"].type:
            raise _fail("packed sequences have equally many starts, and no key_lengths")
    for name, x in given.items():
        _check_extra(name, x, s)


def attention_type(q: Node, k: Node, v: Node, *more: Node, **attrs: Any) -> Type:
    """(out, lse)."""
    s = sizes(q, k, v, attrs["orders"])
    _check(s, more, attrs)
    result = Array(s.result(attrs["orders"][3]), q.dtype)
    return Tuple((result, Array(s.rows, sum_dtype(q.dtype))))


def attention_backward_type(
    q: Node, k: Node, v: Node, dout: Node, lse: Node, delta: Node, *more: Node, **attrs: Any
) -> Type:
    """(dq, dk, dv, gradients of the wanted extras)."""
    s = sizes(q, k, v, attrs["orders"])
    _check(s, more, attrs)
    rows = Array(s.rows, sum_dtype(q.dtype))
    if dout.type != Array(s.result(attrs["orders"][3]), q.dtype):
        raise _fail(f"dout is {dout.type}")
    if lse.type != rows or delta.type != rows:
        raise _fail(f"lse is {lse.type}, delta is {delta.type}, expected {rows}")
    given, wanted = dict(zip(attrs["extras"], more)), attrs["wanted"]
    if tuple(name for name in WANTED if name in wanted and name in given) != tuple(wanted):
        raise _fail(f"no gradients {wanted} of extras {attrs['extras']}")
    return Tuple((q.type, k.type, v.type, *(given[name].type for name in wanted)))


def dropout_threshold(rate: float) -> int:
    """Kept are the probabilities whose random bits, shifted right by 8, are more than this.

    The rule of every dropout: the rate in float32 is less than the number in [0, 1) of 24 bits.
    """
    return int(float(float32.numpy.type(rate)) * (1 << 24))
