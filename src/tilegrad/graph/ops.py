"""Graph IR: what to compute. Every op, its shape and dtype rule, and its meaning in NumPy.

One row per op. Values are immutable arrays; movement ops cost nothing by themselves; there is
no place, no order and no device here. Other questions about an op have their own table, one
file each: `grad` (reverse), `jvp` (forward), `batch`, `shard`; a test checks that no op lacks
a row. This file is long because it is one table: it is the one-page grammar of the Graph.

Invariant: shapes are exact (ints or Exprs); elementwise ops take equal shapes and equal dtypes
(`build` broadcasts and promotes before it makes a Node).
"""

from __future__ import annotations

import itertools
from typing import Any

from ..core.dtype import DType, bool_, float32, int8, int32, int64, uint8, uint32
from ..core.errors import InternalError
from ..ir.block import Block
from ..ir.fingerprint import UserLine
from ..ir.node import Dialect, Node, Op
from ..ir.symbol import Expr, Size, ceil_divide, combine, floor_divide
from ..ir.types import Array, Tuple, Type, product
from . import attention_types, draw_types, paged_types

graph = Dialect("graph")
_fresh = itertools.count()


def _fail(op: str, message: str) -> InternalError:
    return InternalError(f"graph.{op}", message)


def _array(node: Node) -> Array:
    if not isinstance(node.type, Array):
        raise InternalError("graph", f"{node!r} is not an array")
    return node.type


# ---- leaves ---------------------------------------------------------------------------------


def _given(*, shape: tuple[Size, ...], dtype: DType, **_: Any) -> Type:
    return Array(shape, dtype)


input_ = Op(
    graph,
    "input",
    _given,
    attrs=("key", "shape", "dtype"),
    category="leaf",
    meaning="a value from outside, told apart by key",
)
constant = Op(
    graph,
    "constant",
    lambda *, value, dtype: Array((), dtype),
    attrs=("value", "dtype"),
    category="leaf",
    meaning="a scalar known now",
)
size = Op(
    graph,
    "size",
    lambda *, value: Array((), int64),
    attrs=("value",),
    category="leaf",
    meaning="the run-time value of a symbolic size, as a scalar int64",
)
iota = Op(
    graph,
    "iota",
    lambda *, size, dtype: Array((size,), dtype),
    attrs=("size", "dtype"),
    category="leaf",
    meaning="0, 1, 2, ... size-1",
)


def _random_bits(key: Node, offset: Node, *, shape: tuple[Size, ...]) -> Type:
    if key.type != Array((), uint32) or offset.type != Array((), uint32):
        raise _fail("random_bits", "key and offset are uint32 scalars")
    return Array(shape, uint32)


random_bits = Op(
    graph,
    "random_bits",
    _random_bits,
    attrs=("shape",),
    category="leaf",
    meaning="32 random bits an element: Philox-2x32-10 of (key, offset, linear "
    "index), exactly as `interpret` says",
)

# ---- elementwise ----------------------------------------------------------------------------


def _unary(x: Node) -> Type:
    return _array(x)


def _same(name: str, *inputs: Node) -> Array:
    first = _array(inputs[0])
    for other in inputs[1:]:
        if other.type != first:
            raise _fail(name, f"operands differ: {first} and {other.type}")
    return first


def _unary_op(name: str, meaning: str) -> Op:
    return Op(graph, name, _unary, category="unary", meaning=meaning)


def _binary_op(name: str, meaning: str, commutative: bool = False) -> Op:
    def infer(a: Node, b: Node) -> Type:
        return _same(name, a, b)

    return Op(graph, name, infer, category="binary", commutative=commutative, meaning=meaning)


def _compare_op(name: str, meaning: str, commutative: bool = False) -> Op:
    def infer(a: Node, b: Node) -> Type:
        return Array(_same(name, a, b).shape, bool_)

    return Op(graph, name, infer, category="compare", commutative=commutative, meaning=meaning)


negative = _unary_op("negative", "-x")
reciprocal = _unary_op("reciprocal", "1 / x")
absolute = _unary_op("absolute", "|x|")
sign = _unary_op("sign", "-1, 0 or 1")
square_root = _unary_op("square_root", "sqrt x")
exp = _unary_op("exp", "e ** x")
log = _unary_op("log", "natural logarithm")
exp2 = _unary_op("exp2", "2 ** x")
log2 = _unary_op("log2", "logarithm to base 2")
log10 = _unary_op("log10", "logarithm to base 10")
expm1 = _unary_op("expm1", "e ** x - 1")
log1p = _unary_op("log1p", "log(1 + x)")
sin = _unary_op("sin", "sine")
cos = _unary_op("cos", "cosine")
tan = _unary_op("tan", "tangent")
asin = _unary_op("asin", "inverse sine")
acos = _unary_op("acos", "inverse cosine")
atan = _unary_op("atan", "inverse tangent")
sinh = _unary_op("sinh", "hyperbolic sine")
cosh = _unary_op("cosh", "hyperbolic cosine")
tanh = _unary_op("tanh", "hyperbolic tangent")
asinh = _unary_op("asinh", "inverse hyperbolic sine")
acosh = _unary_op("acosh", "inverse hyperbolic cosine")
atanh = _unary_op("atanh", "inverse hyperbolic tangent")
sigmoid = _unary_op("sigmoid", "1 / (1 + e ** -x)")
logit = _unary_op("logit", "log(x / (1 - x)), the inverse of sigmoid")
erf = _unary_op("erf", "error function")
erfc = _unary_op("erfc", "1 - erf x")
erf_inverse = _unary_op("erf_inverse", "inverse of erf")
floor = _unary_op("floor", "round towards -inf")
ceil = _unary_op("ceil", "round towards +inf")
round_ = _unary_op("round", "round half to even")
trunc = _unary_op("trunc", "round towards 0")
bit_not = _unary_op("bit_not", "~x (logical not of a bool)")

add = _binary_op("add", "a + b (or, for bool)", commutative=True)
subtract = _binary_op("subtract", "a - b")
multiply = _binary_op("multiply", "a * b (and, for bool)", commutative=True)
divide = _binary_op("divide", "a / b of floats")
floor_divide_ = _binary_op("floor_divide", "a / b rounded down")
remainder = _binary_op("remainder", "a - floor(a / b) * b, exactly: the sign of b")
fmod = _binary_op("fmod", "a - trunc(a / b) * b, exactly: the sign of a")
power = _binary_op("power", "a ** b")
maximum = _binary_op("maximum", "the larger; nan wins", commutative=True)
minimum = _binary_op("minimum", "the smaller; nan wins", commutative=True)
atan2 = _binary_op("atan2", "angle of (b, a)")
bit_and = _binary_op("bit_and", "a & b", commutative=True)
bit_or = _binary_op("bit_or", "a | b", commutative=True)
bit_xor = _binary_op("bit_xor", "a ^ b", commutative=True)
shift_left = _binary_op("shift_left", "a << b")
shift_right = _binary_op("shift_right", "a >> b, arithmetic for signed")
equal = _compare_op("equal", "a == b", commutative=True)
not_equal = _compare_op("not_equal", "a != b", commutative=True)
less = _compare_op("less", "a < b")
less_equal = _compare_op("less_equal", "a <= b")


def _where(condition: Node, a: Node, b: Node) -> Type:
    result = _same("where", a, b)
    if condition.type != Array(result.shape, bool_):
        raise _fail("where", f"condition is {condition.type}, values are {result}")
    return result


where = Op(graph, "where", _where, category="ternary", meaning="a where condition, else b")
cast = Op(
    graph,
    "cast",
    lambda x, *, dtype: Array(_array(x).shape, dtype),
    attrs=("dtype",),
    category="unary",
    meaning="convert values; float to int truncates, to bool is != 0",
)


def _bitcast(x: Node, *, dtype: DType) -> Type:
    if x.dtype.bits != dtype.bits:
        raise _fail("bitcast", f"{x.dtype} and {dtype} differ in width")
    return Array(_array(x).shape, dtype)


bitcast = Op(
    graph,
    "bitcast",
    _bitcast,
    attrs=("dtype",),
    category="unary",
    meaning="the same bits read as another dtype",
)


def _fixed(x: Node, *, kind: str) -> Type:
    if x.dtype is not int32 or kind not in ("exp", "reciprocal", "rsqrt"):
        raise _fail("fixed", f"{kind} of {x.dtype}: exp, reciprocal or rsqrt of int32")
    return _array(x)


fixed = Op(
    graph,
    "fixed",
    _fixed,
    attrs=("kind",),
    category="unary",
    meaning="exp, reciprocal or rsqrt in fixed point, as core/fixed.py has them",
)


def _stop_gradient(x: Node) -> Type:
    return _array(x)


stop_gradient = Op(
    graph, "stop_gradient", _stop_gradient, category="unary", meaning="x, with no derivative"
)


def _barrier(x: Node, *tokens: Node) -> Type:
    return _array(x)


barrier = Op(
    graph,
    "barrier",
    _barrier,
    category="order",
    meaning="x, not read before the tokens are computed: what follows from it is not "
    "the same as what follows from x, so it can be computed again later",
)


def _transfer(x: Node, *, source: str, device: str) -> Type:
    if source == device:
        raise _fail("transfer", f"from {source} to itself")
    return _array(x)


transfer = Op(
    graph,
    "transfer",
    _transfer,
    attrs=("source", "device"),
    category="transfer",
    meaning="x, which is on the Device `source`, on `device`; what follows from it is computed "
    "there",
)


def _in_range(index: Node, *, size: Size, message: str, place: UserLine) -> Type:
    if not index.dtype.is_integer:
        raise _fail("in_range", f"the index is {index.type}")
    return _array(index)


in_range = Op(
    graph,
    "in_range",
    _in_range,
    attrs=("size", "message", "place"),
    category="unary",
    meaning="the index itself; where one is not in 0..size-1 the run ends in an index "
    "error with this message at the line 'file:line'",
)

# ---- movement -------------------------------------------------------------------------------


def _reshape(x: Node, *, shape: tuple[Size, ...]) -> Type:
    change = combine(product(shape), product(x.shape), -1)  # 0, or 0 by a requirement
    if change != 0 and (isinstance(change, int) or not change.low <= 0 <= change.high):
        raise _fail("reshape", f"{x.shape} has another size than {shape}")
    return Array(shape, x.dtype)


reshape = Op(
    graph,
    "reshape",
    _reshape,
    attrs=("shape",),
    category="movement",
    meaning="the same elements in row-major order under another shape",
)


def _pruned(x: Node) -> Type:
    if not x.shape or not isinstance(x.shape[-1], int) or x.shape[-1] % 4:
        raise _fail("pruned", f"rows of whole fours, not {x.type}")
    return _array(x)


pruned = Op(
    graph,
    "pruned",
    _pruned,
    category="movement",
    meaning="x itself, of whose rows two elements of every four are known to be 0",
)


def _permute(x: Node, *, order: tuple[int, ...]) -> Type:
    if sorted(order) != list(range(len(x.shape))):
        raise _fail("permute", f"{order} is not an order of {len(x.shape)} axes")
    return Array(tuple(x.shape[a] for a in order), x.dtype)


permute = Op(
    graph,
    "permute",
    _permute,
    attrs=("order",),
    category="movement",
    meaning="result axis i is input axis order[i]",
)


def _expand(x: Node, *, shape: tuple[Size, ...]) -> Type:
    if len(shape) != len(x.shape) or any(a != b and a != 1 for a, b in zip(x.shape, shape)):
        raise _fail("expand", f"{x.shape} does not expand to {shape}")
    return Array(shape, x.dtype)


expand = Op(
    graph,
    "expand",
    _expand,
    attrs=("shape",),
    category="movement",
    meaning="axes of size 1 repeated to the shape; the rank stays",
)


def _pad(x: Node, *, low: tuple[Size, ...], high: tuple[Size, ...]) -> Type:
    shape = tuple(combine(combine(s, a, 1), b, 1) for s, a, b in zip(x.shape, low, high))
    return Array(shape, x.dtype)


pad = Op(
    graph,
    "pad",
    _pad,
    attrs=("low", "high"),
    category="movement",
    meaning="zeros added before and after each axis (amounts >= 0)",
)


def slice_size(start: Size, stop: Size, step: int) -> Size:
    """Number of indices of a slice with a positive step."""
    return ceil_divide(combine(stop, start, -1), step)


def _slice(
    x: Node, *, start: tuple[Size, ...], stop: tuple[Size, ...], step: tuple[int, ...]
) -> Type:
    return Array(tuple(slice_size(a, b, s) for a, b, s in zip(start, stop, step)), x.dtype)


slice_ = Op(
    graph,
    "slice",
    _slice,
    attrs=("start", "stop", "step"),
    category="movement",
    meaning="x[start:stop:step] on every axis, steps positive, in range",
)
flip = Op(
    graph,
    "flip",
    lambda x, *, axes: _array(x),
    attrs=("axes",),
    category="movement",
    meaning="the axes reversed",
)


def window_count(size_: Size, width: int, step: int, dilation: int) -> Size:
    """How many windows fit."""
    return combine(floor_divide(combine(size_, dilation * (width - 1) + 1, -1), step), 1, 1)


def _windows(x: Node, *, axis: int, width: int, step: int, dilation: int) -> Type:
    count = window_count(x.shape[axis], width, step, dilation)
    shape = x.shape[:axis] + (count,) + x.shape[axis + 1 :] + (width,)
    return Array(shape, x.dtype)


windows = Op(
    graph,
    "windows",
    _windows,
    attrs=("axis", "width", "step", "dilation"),
    category="movement",
    meaning="sliding windows: axis becomes the window number, a last axis of `width` "
    "is added; result[..i.., k] = x[..i*step + k*dilation..]",
)


def _concatenate(*xs: Node, axis: int) -> Type:
    total: Size = 0
    for x in xs:
        total = combine(total, x.shape[axis], 1)
    return Array(xs[0].shape[:axis] + (total,) + xs[0].shape[axis + 1 :], xs[0].dtype)


concatenate = Op(
    graph,
    "concatenate",
    _concatenate,
    attrs=("axis",),
    category="movement",
    meaning="inputs one after the other along the axis",
)

# ---- reductions -----------------------------------------------------------------------------


def _reduce(x: Node, *, axes: tuple[int, ...]) -> Type:
    return Array(tuple(s for i, s in enumerate(x.shape) if i not in axes), x.dtype)


def _reduce_op(name: str, meaning: str) -> Op:
    return Op(graph, name, _reduce, attrs=("axes",), category="reduce", meaning=meaning)


sum_ = _reduce_op("sum", "sum over the axes, which disappear; floats accumulate in >= float32")
prod = _reduce_op("prod", "product over the axes")
max_ = _reduce_op("max", "largest over the axes; nan wins")
min_ = _reduce_op("min", "smallest over the axes; nan wins")


def _arg_reduce(x: Node, *, axis: int) -> Type:
    return Array(tuple(s for i, s in enumerate(x.shape) if i != axis), int64)


argmax = Op(
    graph,
    "argmax",
    _arg_reduce,
    attrs=("axis",),
    category="reduce",
    meaning="index of the first largest along the axis; the first nan wins",
)
cumulative = Op(
    graph,
    "cumulative",
    lambda x, *, axis, kind: _array(x),
    attrs=("axis", "kind"),
    category="scan",
    meaning="running sum, prod, max or min along the axis (kind)",
)


def _sort(x: Node, *, axis: int, descending: bool) -> Type:
    return Tuple((_array(x), Array(x.shape, int64)))


sort = Op(
    graph,
    "sort",
    _sort,
    attrs=("axis", "descending"),
    category="scan",
    meaning="stable sort along the axis: (values, indices); nan is largest",
)


def _dot(
    a: Node,
    b: Node,
    *,
    batch: tuple[tuple[int, ...], tuple[int, ...]],
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: DType,
) -> Type:
    for side_a, side_b in (batch, contract):
        for i, j in zip(side_a, side_b):
            if a.shape[i] != b.shape[j]:
                raise _fail("dot", f"axis {i} of {a.shape} meets axis {j} of {b.shape}")
    rest_a = [s for i, s in enumerate(a.shape) if i not in batch[0] and i not in contract[0]]
    rest_b = [s for i, s in enumerate(b.shape) if i not in batch[1] and i not in contract[1]]
    return Array(tuple([a.shape[i] for i in batch[0]] + rest_a + rest_b), dtype)


dot = Op(
    graph,
    "dot",
    _dot,
    attrs=("batch", "contract", "dtype"),
    category="dot",
    meaning="sum over contracted axes of the product; result axes: batch, a's, b's; "
    "accumulates in >= float32, gives dtype",
)


def _picked_dot(x: Node, weights: Node, ids: Node, *, axis: int) -> Type:
    if len(x.shape) != 2 or len(weights.shape) != 3 or axis not in (1, 2):
        raise _fail("picked_dot", f"{x.type} and axis {axis} of {weights.type}")
    if x.shape[1] != weights.shape[axis] or x.dtype is not weights.dtype or not x.dtype.is_float:
        raise _fail("picked_dot", f"{x.type} meets axis {axis} of {weights.type}")
    if ids.shape != x.shape[:1] or not ids.dtype.is_integer:
        raise _fail("picked_dot", f"{ids.type} picks for {x.type}")
    return Array((x.shape[0], weights.shape[3 - axis]), x.dtype)


picked_dot = Op(
    graph,
    "picked_dot",
    _picked_dot,
    attrs=("axis",),
    category="dot",
    meaning="(x, weights, ids): row t is x[t] times weights[ids[t]], summed over `axis` of the "
    "weights (1 or 2); zeros where ids[t] is negative. ids are below the number of weights",
)


def _offsets(op: str, offsets: Node, groups: Size | None = None) -> Size:
    """How many groups the offsets of rows (groups + 1) tell apart."""
    found = offsets.shape[0] if len(offsets.shape) == 1 else 0
    fits = isinstance(found, int) and found > 1 and offsets.dtype is int32
    if not fits or groups not in (None, combine(found, 1, -1)):
        raise _fail(op, f"{offsets.type} are no offsets of {groups} groups")
    return combine(found, 1, -1)


def _group_rows(ids: Node, *, groups: int) -> Type:
    if len(ids.shape) != 1 or not ids.dtype.is_integer or groups < 1:
        raise _fail("group_rows", f"{ids.type} of {groups} groups")
    rows = Array(ids.shape, int32)
    return Tuple((rows, rows, Array((groups + 1,), int32)))


group_rows = Op(
    graph,
    "group_rows",
    _group_rows,
    attrs=("groups",),
    category="index",
    meaning="ids in 0..groups-1 -> (order, places, offsets): the rows of each group one after the "
    "other, as they came, are order[offsets[g]] .. order[offsets[g + 1] - 1]; row i comes to "
    "places[i]",
)


def _route(scores: Node, *, count: int, powers: bool, whole: bool) -> Type:
    tokens, experts = scores.shape if len(scores.shape) == 2 else (0, 0)
    if not isinstance(experts, int) or not 0 < count <= experts or not scores.dtype.is_float:
        raise _fail("route", f"{count} of {scores.type}")
    rows = Array((product((tokens, count)),), int32)
    shares = Array((tokens, count), float32)
    return Tuple((shares, rows, rows, Array((experts + 1,), int32)))


route = Op(
    graph,
    "route",
    _route,
    attrs=("count", "powers", "whole"),
    category="index",
    meaning="scores (N, E) -> (shares (N, count), order, places, offsets): the largest scores of "
    "each row, of equals the first one first, and their N count places in `group_rows` of the "
    "columns they are in. With `powers` scores are softmax of what is given, with `whole` shares "
    "are divided by their sum",
)


def _grouped_dot(
    x: Node, weights: Node, offsets: Node, *listed: Node, axis: int, block: int
) -> Type:
    if len(x.shape) != 2 or len(weights.shape) != 3 or axis not in (1, 2):
        raise _fail("grouped_dot", f"{x.type} and axis {axis} of {weights.type}")
    scales = tuple([n for n in listed if n.dtype is float32])
    summed = x.dtype.is_float or (len(scales) == 1 and x.dtype is int8)
    if x.shape[1] != weights.shape[axis] or x.dtype is not weights.dtype or not summed:
        raise _fail("grouped_dot", f"{x.type} meets axis {axis} of {weights.type}")
    _offsets("grouped_dot", offsets, weights.shape[0])
    listed = listed[: len(listed) - len(scales)]
    if not _scales_fit(x, weights, scales, axis):
        found = [n.type for n in scales]
        raise _fail("grouped_dot", f"{found} are no factors of {x.type} and {weights.type}")
    fits = all(n.dtype is int32 and len(n.shape) == r for n, r in zip(listed, (2, 1)))
    if not fits or len(listed) > 2 or bool(block) != bool(listed):
        raise _fail("grouped_dot", f"{[n.type for n in listed]} is no list of blocks of {block}")
    rows = listed[1].shape[0] if len(listed) > 1 else x.shape[0]
    return Array((rows, weights.shape[3 - axis]), float32 if scales else x.dtype)


def _scales_fit(x: Node, weights: Node, scales: tuple[Node, ...], axis: int) -> bool:
    """Whether there are factors of columns, scales of blocks along the last axes, or none."""
    if len(scales) < 2:
        return all(s.shape == (weights.shape[0], weights.shape[3 - axis]) for s in scales)
    (groups, rows, columns), (left, right) = weights.shape, (s.shape for s in scales)
    if len(scales) > 2 or axis != 2 or not len(left) == len(right) == 2 or 0 in (*left, *right):
        return False
    whole = not (columns % right[1] or right[0] % groups or groups * rows % right[0])
    return left == (x.shape[0], right[1]) and whole


def group_scales(node: Node) -> tuple[Node, ...]:
    """The factors (groups, columns) of a grouped product, or the scales of its blocks; or none."""
    return tuple([n for n in node.inputs[3:] if n.dtype is float32])


def group_lists(node: Node) -> tuple[Node, ...]:
    """The list of blocks of a grouped product, and the row of x that each row is; or less."""
    return node.inputs[3 : len(node.inputs) - len(group_scales(node))]


grouped_dot = Op(
    graph,
    "grouped_dot",
    _grouped_dot,
    attrs=("axis", "block"),
    category="dot",
    meaning="(x, weights, offsets): rows offsets[g] .. offsets[g + 1] - 1 of x times weights[g], "
    "summed over `axis` of the weights (1 or 2). offsets rise from 0 to the number of rows. A pass "
    "adds a list of blocks of `block` rows (else 0), which says the same as the offsets, and after "
    "it the row of x that each row is; factors (groups, columns) in float32 may come last: sums "
    "are times those of their group, and float32. int8 has factors, and exact sums. Or there come "
    "last scales of blocks: (rows of x, blocks of k), and of the weights (blocks of the rows of "
    "all groups, blocks of k), as of block_dot",
)


def _grouped_outer(x: Node, y: Node, offsets: Node) -> Type:
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[0] != y.shape[0]:
        raise _fail("grouped_outer", f"{x.type} and {y.type}")
    if x.dtype is not y.dtype or not x.dtype.is_float:
        raise _fail("grouped_outer", f"{x.type} and {y.type}")
    return Array((_offsets("grouped_outer", offsets), x.shape[1], y.shape[1]), x.dtype)


grouped_outer = Op(
    graph,
    "grouped_outer",
    _grouped_outer,
    category="dot",
    meaning="(x, y, offsets): of each group the sum over its rows r, offsets[g] .. "
    "offsets[g + 1] - 1, of x[r] times y[r], every element with every one",
)


def _sparse_dot(x: Node, kept: Node, words: Node, *, rows: int, depth: int, dtype: DType) -> Type:
    if len(x.shape) != 2 or len(kept.shape) != 2 or words.dtype is not int32:
        raise _fail("sparse_dot", f"{x.type}, {kept.type} and {words.type}")
    (_, k), (padded, half) = x.shape, kept.shape
    if x.dtype is not kept.dtype or k != 2 * half or not 0 < rows <= padded:
        raise _fail("sparse_dot", f"{x.type} meets {kept.type}, of which {rows} rows count")
    if words.shape != (padded // 16, -(-k // depth) * depth // 2) or padded % 64 or depth % 64:
        raise _fail("sparse_dot", f"{words.type} does not say where {kept.type} lies")
    return Array((x.shape[0], rows), dtype)


sparse_dot = Op(
    graph,
    "sparse_dot",
    _sparse_dot,
    attrs=("rows", "depth", "dtype"),
    category="dot",
    meaning="(x, kept, words): x (m, k) times the transpose of the first `rows` rows of weights, "
    "of which two of every four along k are kept; `words` say which, in steps of `depth` columns, "
    "as core.kept has them. Sums as those of dot; what is not kept may be left out of them",
)


def _block_dot(
    x: Node, weights: Node, x_scale: Node, scale: Node, *, block: int, rows: int, dtype: DType
) -> Type:
    if len(x.shape) != 2 or len(weights.shape) != 2 or x.shape[1] != weights.shape[1]:
        raise _fail("block_dot", f"{x.type} meets {weights.type}")
    blocks = -(-weights.shape[1] // block)
    wanted = [(x.shape[0], blocks), (-(-weights.shape[0] // rows), blocks)]
    if [s.shape for s in (x_scale, scale)] != wanted:
        raise _fail("block_dot", f"scales {x_scale.type} and {scale.type} are not {wanted}")
    return Array((x.shape[0], weights.shape[0]), dtype)


block_dot = Op(
    graph,
    "block_dot",
    _block_dot,
    attrs=("block", "rows", "dtype"),
    category="dot",
    meaning="(x, weights, x_scale, scale): x (m, k) times the transpose of weights (n, k), where "
    "each `block` columns of a row of x have a scale, and those of `rows` rows of the weights: the "
    "sum over blocks b of x_scale[m, b] scale[n // rows, b] times the block's own sum, as dot "
    "adds up; blocks are added in float32",
)

# ---- attention ------------------------------------------------------------------------------

attention = Op(
    graph,
    "attention",
    attention_types.attention_type,
    attrs=attention_types.ATTRS,
    category="attention",
    meaning="(q, k, v, extras) -> (out, lse): out = softmax(scores) v over keys, lse "
    "the log of the sum of exp(scores). A score is scale <q, k>, capped by softcap "
    "tanh(s / softcap), + bias, + slopes (j - i), seen where j - i lies in the band "
    "and the extras say so. A row that sees nothing: out 0, lse -inf",
)
attention_backward = Op(
    graph,
    "attention_backward",
    attention_types.attention_backward_type,
    attrs=(*attention_types.ATTRS, "wanted"),
    category="attention",
    meaning="(q, k, v, dout, lse, delta, extras) -> (dq, dk, dv, gradients "
    "of wanted extras); delta = sum of dout out over the width - "
    "dlse",
)

# ---- a paged cache --------------------------------------------------------------------------

paged_append = Op(
    graph,
    "paged_append",
    paged_types.append_type,
    attrs=paged_types.APPEND_ATTRS,
    category="paged",
    meaning="(q, k, v, frequencies, scales of a cache of 8 bits, table, lengths, query_starts, "
    "keys, values) -> (q rotated, keys, values): the new tokens' k, rotated, and v in their pages. "
    "Pairs of the first `width` elements of a head turn by place * frequency, cosines and sines "
    "times `factor`; tokens of no request get 0; aliases keys and values where they are donated",
)
paged_attention = Op(
    graph,
    "paged_attention",
    paged_types.attention_type,
    attrs=paged_types.ATTEND_ATTRS,
    category="paged",
    meaning="(q, keys, values, scales of a cache of 8 bits, table, lengths, query_starts) -> out: "
    "each token over the keys of its request up to its own, the last `window` of them if that is "
    "not 0; tokens of no request get 0. `single`: no request has more than one new token; "
    "`most_keys`: nor more keys, if not 0; `queries`: so many new tokens a request as a rule, if "
    "not 0",
)

# ---- drawing tokens -------------------------------------------------------------------------

draw = Op(
    graph,
    "draw",
    draw_types.draw_type,
    attrs=("top_p", "min_p"),
    category="draw",
    meaning="(p, floats, limits, seeds, slots, positions) -> a token of each row of p, whose "
    "largest is 1: among those that the row's slot keeps by limits (top-k; 0: all, -1: none), then "
    "by its column `top_p` of floats, and by `min_p` before both; as `draw_reference` says",
)
top_k = Op(
    graph,
    "top_k",
    draw_types.top_k_type,
    attrs=("count",),
    category="draw",
    meaning="places of the largest of each row, in order, the first of equals first; NaN is never "
    "among them: the last place stands in",
)
add_listed = Op(
    graph,
    "add_listed",
    draw_types.add_listed_type,
    attrs=(),
    category="draw",
    meaning="(x, counts, ids, values, slots): x with values[s, i] added in column ids[s, i] of "
    "each row of slot s, for i < counts[s]",
)

# ---- indexing and state ---------------------------------------------------------------------


def _gather(x: Node, *indices: Node, axes: tuple[int, ...]) -> Type:
    rest = tuple(s for i, s in enumerate(x.shape) if i not in axes)
    for index in indices:
        if index.shape != indices[0].shape or not index.dtype.is_integer:
            raise _fail("gather", "indices are integers of one shape")
    return Array(indices[0].shape + rest, x.dtype)


gather = Op(
    graph,
    "gather",
    _gather,
    attrs=("axes",),
    category="index",
    meaning="x at indices (one integer array per indexed axis, all of one shape, in "
    "range 0..size-1); result axes: the indices' shape, then x's other axes",
)


def _unpack(raw: Node, *, format: str, dtype: DType) -> Type:
    from ..core.format import format_of  # not needed by most programs

    form, found = format_of(format), _array(raw)
    if found.dtype is not uint8 or not found.shape or not isinstance(found.shape[-1], int):
        raise _fail("unpack", f"bytes (..., bytes of a row), not {found}")
    whole = found.shape[-1] - form.row_bytes_more
    fits = dtype.is_float or (form.whole and dtype.kind == "int" and dtype.bits >= 8)
    if not form.quantised or whole < 0 or whole % form.block_bytes or not fits:
        raise _fail("unpack", f"{found} are not rows of {form} for {dtype}")
    return Array((*found.shape[:-1], form.elements(found.shape[-1])), dtype)


unpack = Op(
    graph,
    "unpack",
    _unpack,
    attrs=("format", "dtype"),
    category="index",
    meaning="the values (..., columns) of weights whose rows are stored as bytes of a Format "
    "(see core/format.py), rounded to the dtype",
)


def _pack(x: Node, *scale: Node, format: str) -> Type:
    from ..core.format import format_of

    form, found = format_of(format), _array(x)
    if not found.dtype.is_float or not found.shape or not isinstance(found.shape[-1], int):
        raise _fail("pack", f"floats (..., columns), not {found}")
    if not form.quantised or not form.apart or found.shape[-1] % form.block:
        raise _fail("pack", f"{found} are not rows for {form}")
    if len(scale) > 1 or any(not s.dtype.is_float or not s.shape for s in scale):
        raise _fail("pack", "one array of scales (..., groups of a row), if any")
    return Array((*found.shape[:-1], form.row_bytes(found.shape[-1])), uint8)


pack = Op(
    graph,
    "pack",
    _pack,
    attrs=("format",),
    category="index",
    meaning="the bytes (..., bytes of a row) of values (..., columns) in a Format whose scales lie "
    "apart from its codes (see core/scaled.py); scales (..., groups) are found, or given: they are "
    "repeated to the rows, and zero points are then the middle",
)


def _update(state: Node, value: Node, *indices: Node, axes: tuple[int, ...], mode: str) -> Type:
    rest = tuple(s for i, s in enumerate(state.shape) if i not in axes)
    if value.type != Array(indices[0].shape + rest, state.dtype):
        raise _fail("update", f"value is {value.type}, expected {indices[0].shape + rest}")
    return _array(state)


update = Op(
    graph,
    "update",
    _update,
    attrs=("axes", "mode"),
    category="index",
    meaning="state with value written at indices (as gather reads them): mode 'set' "
    "(last in order wins), 'add', 'multiply', 'max', 'min'; out-of-range indices are "
    "dropped; aliases the state where it is donated",
)

# ---- tuples, control, calls -----------------------------------------------------------------


def _get(x: Node, *, index: int) -> Type:
    if not isinstance(x.type, Tuple):
        raise _fail("get", f"{x!r} is not a tuple")
    return x.type.items[index]


get = Op(graph, "get", _get, attrs=("index",), category="tuple", meaning="one item of a tuple")


def _scan(
    *inputs: Node, carries: int, length: Size, reverse: bool, blocks: tuple[Block, ...]
) -> Type:
    results = blocks[0].results
    stacked = tuple(Array((length,) + r.shape, r.dtype) for r in results[carries:])
    return Tuple(tuple(r.type for r in results[:carries]) + stacked)


def _cond(*inputs: Node, blocks: tuple[Block, ...]) -> Type:
    return Tuple(tuple(r.type for r in blocks[0].results))


def _while_loop(*inputs: Node, carries: int, blocks: tuple[Block, ...]) -> Type:
    return Tuple(tuple(r.type for r in blocks[1].results))


scan = Op(
    graph,
    "scan",
    _scan,
    attrs=("carries", "length", "reverse"),
    category="control",
    meaning="inputs: carries, then per-step arrays (leading axis = length), then shared "
    "values; Block(carries, slices, shared) -> (carries, outputs); gives the last "
    "carries and the outputs stacked",
)
cond = Op(
    graph,
    "cond",
    _cond,
    attrs=(),
    category="control",
    meaning="inputs: a bool scalar, then shared values; two Blocks(shared) -> results",
)
while_loop = Op(
    graph,
    "while_loop",
    _while_loop,
    attrs=("carries",),
    category="control",
    meaning="inputs: carries, then shared values; Blocks condition(carries, shared) "
    "-> bool scalar and body(carries, shared) -> carries",
)


def _call(*inputs: Node, callee: Any) -> Type:
    types = callee.result_types(tuple(i.type for i in inputs))
    return types[0] if len(types) == 1 else Tuple(tuple(types))


call = Op(
    graph, "call", _call, attrs=("callee",), category="call", meaning="a kernel known by its Callee"
)


def _custom(*inputs: Node, rules: Any, blocks: tuple[Block, ...]) -> Type:
    return Tuple(tuple(r.type for r in blocks[0].results))


custom = Op(
    graph,
    "custom",
    _custom,
    attrs=("rules",),
    category="control",
    meaning="one closed Block(inputs) -> results, inlined by the compiler; derivatives "
    "come from rules.vjp(inputs, outputs, cotangents) and rules.jvp(inputs, outputs, "
    "tangents), not from the Block",
)


def scan_slices(node: Node) -> int:
    """How many per-step arrays a scan has: their arguments have one axis less."""
    first = node.attrs["carries"]
    pairs = zip(node.blocks[0].arguments[first:], node.inputs[first:])
    return sum(len(a.shape) != len(i.shape) for a, i in pairs)


def fresh_key() -> int:
    """A key no other input has."""
    return next(_fresh)


def is_constant(node: Node) -> bool:
    """Whether a Node is a constant, through movement that only repeats it."""
    while node.op in (expand, reshape, permute):
        node = node.inputs[0]
    return node.op is constant


def constant_value(node: Node) -> Any:
    """The Python value of a constant Node (see `is_constant`), else None."""
    while node.op in (expand, reshape, permute):
        node = node.inputs[0]
    return node.attrs["value"] if node.op is constant else None


def symbols(nodes: list[Node]) -> dict[Expr, None]:
    """Every Symbol in the shapes and attrs of the Nodes."""
    from ..ir.symbol import atoms

    found: dict[Expr, None] = {}
    for node in nodes:
        types = node.type.items if isinstance(node.type, Tuple) else (node.type,)
        for type_ in types:
            for s in getattr(type_, "shape", ()):
                atoms(s, found)
        for value in node.attrs.values():
            if value.__class__ is Expr:  # a number that no shape has
                atoms(value, found)
    return found
