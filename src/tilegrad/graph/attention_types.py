"""The types of `attention` and `attention_backward`: what they take, what they give, and names.

Axes are called b (batch), h (heads), t (tokens) and d (width); an order such as "bthd" says how
they lie. Invariant: what passes here has a meaning (its decomposition) for every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtype import DType, bool_, float32, int32, uint32
from ..core.errors import DTypeError, InternalError, ShapeError, UserError
from ..ir.node import Node
from ..ir.symbol import Expr, Size
from ..ir.types import Array, Tuple, Type, show_shape

OP = "attention"
# Of an input: its axes, its dtype (None: a float; or the input that has the same), what it means.
Row = tuple[tuple[str, ...], DType | str | None, str]
SCORES = ("batch", "heads", "queries", "keys")  # of what broadcasts to scores: each may be 1
STARTS = ("sequences + 1",)
EXTRAS: dict[str, Row] = {
    "bias": (SCORES, None, "what is added to scores"),
    "mask": (SCORES, bool_, "True where a key is seen"),
    "slopes": (("heads",), None, "one for each head"),
    "sinks": (("heads",), None, "one for each head"),
    "key_lengths": (("batch",), int32, "one for each of the batch"),
    "query_starts": (STARTS, int32, "a start for each sequence and the end of the last"),
    "key_starts": (STARTS, int32, "as many as query_starts"),
    "key": ((), uint32, "of random bits"),
    "offset": ((), uint32, "of random bits"),
}
LEAST_SCORE = -1e38  # kernels multiply scores by log2(e): lower ones would be -inf
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


def _fail(message: str) -> InternalError:
    return InternalError("graph.attention", message)


def divided_heads(op: str, heads: Size, key_heads: Size, least: int = 0) -> tuple[int, int]:
    """Numbers of query and key heads, if the first are a multiple of the second."""
    if isinstance(heads, int) and isinstance(key_heads, int) and key_heads >= least:
        if not (heads % key_heads if key_heads else heads):
            return heads, key_heads
    expected = f"a multiple of {key_heads} key heads, both known"
    raise ShapeError("the heads do not divide", op=op, expected=expected, got=f"{heads} heads")


def sizes(inputs: Sequence[Node], orders: Sequence[str]) -> Sizes:
    """The sizes that q, k and v, the first inputs, have; an error where they do not fit."""
    q, k, v = inputs[:3]
    for order in orders:
        if sorted(order) != list("bdht") or order[-1] != "d":
            raise UserError(
                "not a layout",
                op=OP,
                got=repr(order),
                expected="b (may be left out), h and t in any order, then d",
                hint='"bhtd", "bthd", or "thd" for packed sequences',
            )
    for name, x, order in zip("qkv", (q, k, v), orders):
        if not isinstance(x.type, Array) or len(x.shape) != 4:
            expected = f"axes as in {order!r}, or without b"
            raise ShapeError(
                f"{name} has not the axes of the layout", op=OP, expected=expected, got=x.type
            )
    got = f"{q.type}, {k.type}, {v.type}"
    if not q.dtype is k.dtype is v.dtype:
        raise DTypeError("the dtypes differ", op=OP, expected="one dtype", got=got)
    if not q.dtype.is_float:
        raise DTypeError("needs floats", op=OP, expected="a float dtype", got=q.dtype)
    of_q, of_k, of_v = (dict(zip(order, x.shape)) for x, order in zip((q, k, v), orders))
    same = [(of_k[a], of_v[a]) for a in "bht"] + [(of_q[a], of_k[a]) for a in "bd"]
    if any(a != b for a, b in same):
        raise ShapeError(
            "the shapes do not fit",
            op=OP,
            got=got,
            expected="q (batch, heads, queries, d), k (batch, key heads, keys, d), "
            f"v (batch, key heads, keys, e), their axes in the orders {orders[:3]}",
        )
    heads, key_heads = divided_heads(OP, of_q["h"], of_k["h"])
    return Sizes(of_q["b"], heads, key_heads, of_q["t"], of_k["t"], of_q["d"], of_v["d"])


def check_inputs(
    op: str, given: Mapping[str, Node], table: Mapping[str, Row], known: Mapping[str, Size]
) -> None:
    """Every input against its row; axes that are not known have the size of the first to come."""
    sizes = dict(known)
    for name, x in given.items():
        axes, like, meaning = table[name]
        dtype = given[like].dtype if isinstance(like, str) else like
        if not (x.dtype.is_float if dtype is None else x.dtype is dtype):
            expected = f"{dtype or 'a float dtype'}: {meaning}"
            raise DTypeError(f"{name} has another dtype", op=op, expected=expected, got=x.dtype)
        least = (1,) if axes is SCORES else ()
        alike = len(x.shape) == len(axes)
        own = dict(zip(axes, x.shape)) if alike else {}
        if not alike or any(b not in (sizes.setdefault(a, b), *least) for a, b in own.items()):
            shape = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
            expected = f"({shape}), or 1 in place of a size" if least else f"({shape})"
            raise ShapeError(
                f"{name} does not fit",
                op=op,
                expected=f"{expected}: {meaning}",
                got=f"({show_shape(x.shape)})",
            )


def attention_type(q: Node, k: Node, v: Node, *more: Node, **attrs: Any) -> Tuple:
    """(out, lse)."""
    s = sizes((q, k, v), attrs["orders"])
    extras, band = attrs["extras"], attrs["band"]
    if len(extras) != len(more) or len(set(extras)) != len(extras) or set(extras) - set(EXTRAS):
        raise _fail(f"the extras {extras} do not name {len(more)} inputs")
    if len(band) != 2 or not all(b is None or isinstance(b, (int, Expr)) for b in band):
        raise _fail(f"band is {band}")
    if not 0.0 <= attrs["dropout"] < 1.0 or attrs["softcap"] < 0.0:
        raise _fail(f"dropout is {attrs['dropout']}, softcap is {attrs['softcap']}")
    if not ("key" in extras) == ("offset" in extras) == (attrs["dropout"] > 0.0):
        raise _fail("key and offset belong to dropout")
    packed = [name for name in ("query_starts", "key_starts") if name in extras]
    if len(packed) == 1:
        raise UserError(
            "query_starts and key_starts go together", op=OP, expected="both", got=packed[0]
        )
    if packed and "key_lengths" in extras:
        raise UserError(
            "packed sequences have their lengths in the starts",
            op=OP,
            expected="starts or key_lengths",
            got="both",
        )
    if packed and s.batch != 1:
        raise ShapeError(
            "packed sequences lie in one batch entry",
            op=OP,
            expected="a batch of 1",
            got=f"a batch of {s.batch}",
            hint='layout="thd" leaves the batch out',
        )
    given = dict(zip(extras, more))
    none = packed and given["query_starts"].shape == (0,)  # not even an end
    check_inputs(OP, given, EXTRAS, {**vars(s), STARTS[0]: 1} if none else vars(s))
    result = Array(s.result(attrs["orders"][3]), q.dtype)
    return Tuple((result, Array(s.rows, q.dtype.wide)))


def attention_backward_type(
    q: Node, k: Node, v: Node, dout: Node, lse: Node, delta: Node, *more: Node, **attrs: Any
) -> Type:
    """(dq, dk, dv, gradients of the wanted extras)."""
    out, rows = attention_type(q, k, v, *more, **attrs).items
    if (dout.type, lse.type, delta.type) != (out, rows, rows):
        raise _fail(f"dout, lse and delta are {dout.type}, {lse.type} and {delta.type}")
    given, wanted = dict(zip(attrs["extras"], more)), attrs["wanted"]
    if tuple(name for name in WANTED if name in wanted and name in given) != tuple(wanted):
        raise _fail(f"no gradients {wanted} of extras {attrs['extras']}")
    return Tuple((q.type, k.type, v.type, *(given[name].type for name in wanted)))


def dropout_threshold(rate: float) -> int:
    """Kept are the probabilities whose random bits, shifted right by 8, are more than this.

    The rule of every dropout: the rate in float32 is less than the number in [0, 1) of 24 bits.
    """
    return int(float(float32.numpy.type(rate)) * (1 << 24))
