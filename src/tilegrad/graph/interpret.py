"""The NumPy reference interpreter: what every Graph means, and the judge of every later stage.

`REFERENCE` has one row per op: a function of the input arrays and the attrs (sizes resolved to
ints, Blocks given as functions from arrays to arrays). Low-precision floats are computed in
float32 and rounded once per op; sums and dots accumulate in at least float32, integers in
int64 and then wrap. What the ops leave open is fixed here: integer division by zero gives 0,
a float out of an integer's range truncates to int64 and wraps, a gather index out of range is
clamped, a reduction of nothing gives the identity, and the sign of nan is 0.
Invariant: every result has exactly the type its Node says; inputs are never written. The file
is long because it is one table: one row per op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Union

import ml_dtypes
import numpy as np

from ..core import kept
from ..core.dtype import BY_NUMPY, DType
from ..core.errors import InternalError, Site
from ..ir.block import Block, argument_op
from ..ir.node import Node, Op, needs, topological
from ..ir.symbol import Expr, evaluate
from ..ir.types import Array, Tuple, Type
from . import attention, build, draw_reference, ops, paged_reference

Ndarray = np.ndarray[Any, Any]
Result = Union[Ndarray, tuple[Ndarray, ...]]
Reference = Callable[[list[Any], dict[str, Any]], Result]

# ---- computing dtypes -----------------------------------------------------------------------

_INT4 = np.dtype(ml_dtypes.int4)


def widen(x: Ndarray) -> Ndarray:
    """x in the dtype in which elementwise ops compute."""
    dtype = BY_NUMPY[x.dtype]
    if dtype.is_float and dtype.bits < 32:
        return x.astype(np.float32)
    return x.astype(np.int8) if dtype.bits == 4 else x


def narrow(x: Any, dtype: np.dtype[Any]) -> Ndarray:
    """x rounded (floats) or wrapped (integers) to the dtype."""
    x = np.asarray(x)
    if x.dtype == dtype:
        return x
    if dtype == _INT4 and x.dtype.kind in "iu":
        x = ((x.astype(np.int64) + 8) & 15) - 8
    return x.astype(dtype)


def _accumulated(x: Ndarray) -> Ndarray:
    """x in the dtype in which sums and products over it are kept."""
    return x.astype(np.float64 if BY_NUMPY[x.dtype].is_float else np.int64, copy=False)


def _elementwise(function: Callable[..., Any]) -> Reference:
    def run(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
        return narrow(function(*map(widen, inputs)), inputs[0].dtype)

    return run


def _compare(function: Callable[..., Any]) -> Reference:
    return lambda inputs, attrs: np.asarray(function(*map(widen, inputs)))


# ---- elementwise ----------------------------------------------------------------------------


def _mapped(function: Callable[[float], float]) -> Callable[[Ndarray], Ndarray]:
    """A function of Python floats over an array, in float64."""

    def run(x: Ndarray) -> Ndarray:
        values = map(function, x.ravel().tolist())
        return np.fromiter(values, np.float64, x.size).reshape(x.shape)

    return run


def _erf_inverse(y: float) -> float:
    if not -1.0 < y < 1.0:
        return math.copysign(math.inf, y) if abs(y) == 1.0 else math.nan
    probability = (y + 1.0) / 2.0
    if probability in (0.0, 1.0):
        probability = math.ulp(0.5) if probability == 0.0 else 1.0 - math.ulp(0.5)
    x = NormalDist().inv_cdf(probability) / math.sqrt(2.0)
    return x - (math.erf(x) - y) * math.exp(x * x) * math.sqrt(math.pi) / 2.0


def _sigmoid(x: Ndarray) -> Ndarray:
    small = np.exp(np.abs(x) * -1.0)  # never infinite
    return np.where(x < 0, small, small.dtype.type(1)) / (1 + small)


def _sign(x: Ndarray) -> Ndarray:
    return (x > 0).astype(np.int8) - (x < 0).astype(np.int8)


def _subtract(a: Ndarray, b: Ndarray) -> Ndarray:
    return a ^ b if a.dtype == np.bool_ else a - b


def _floor_divide(a: Ndarray, b: Ndarray) -> Ndarray:
    """Of floats by the exact remainder, as PyTorch has it."""
    if a.dtype.kind != "f":
        return a // b
    rest = np.fmod(a, b)
    quotient = (a - rest) / b - ((rest != 0) & ((rest < 0) != (b < 0)))
    whole = np.where(quotient == 0, np.copysign(0, a / b), np.rint(quotient)).astype(a.dtype)
    return np.where(b == 0, a / b, whole)


def _remainder(a: Ndarray, b: Ndarray) -> Ndarray:
    """Of floats: zero has the sign of a."""
    if a.dtype.kind != "f":
        return np.remainder(a, b)
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _power(a: Ndarray, b: Ndarray) -> Ndarray:
    if a.dtype.kind in "fbu":
        return np.power(a, b)
    odd = np.where(b % 2 == 0, 1, -1)
    inverse = np.where(a == 1, 1, np.where(a == -1, odd, 0))
    return np.where(b < 0, inverse, np.power(a, np.maximum(b, 0)))


def _cast(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    target = attrs["dtype"]
    x = widen(inputs[0])
    if target.kind == "bool":
        return np.asarray(x != 0)
    if target.is_integer and x.dtype.kind == "f":
        whole = np.trunc(x)
        x = whole.astype(np.int64)
        if target.name == "uint64":  # NumPy's own for negative ones depends on the machine
            x = np.where(whole < 0, x.view(np.uint64), np.abs(whole).astype(np.uint64))
    return narrow(x, target.numpy)


def _fixed(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    from ..core.fixed import FIXED

    return FIXED[attrs["kind"]](inputs[0])


def _bitcast(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, target = np.array(inputs[0], order="C"), attrs["dtype"]
    if target.kind == "bool":
        return np.asarray(x.view(np.uint8) != 0)
    return x.view(target.numpy)


# ---- leaves ---------------------------------------------------------------------------------

PHILOX_MULTIPLIER, PHILOX_WEYL, PHILOX_ROUNDS = 0xD256D193, 0x9E3779B9, 10


def philox(low: Ndarray, high: Ndarray, key: int) -> Ndarray:
    """Word 0 of Philox-2x32-10 on the counter (low, high), as uint32."""
    mask = np.uint64(0xFFFFFFFF)
    left, right = low.astype(np.uint64), high.astype(np.uint64)
    for round_ in range(PHILOX_ROUNDS):
        word = np.uint64((key + round_ * PHILOX_WEYL) & 0xFFFFFFFF)
        wide = left * np.uint64(PHILOX_MULTIPLIER)
        left, right = (wide >> np.uint64(32)) ^ word ^ right, wide & mask
    return left.astype(np.uint32)


def _random_bits(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    """random_bits exactly: the counter is (index low, offset ^ index high), the key is key.

    The index is the row-major linear index in the shape, so no layout changes the bits.
    """
    key, offset = int(inputs[0]), int(inputs[1])
    shape = attrs["shape"]
    index = np.arange(math.prod(shape), dtype=np.uint64)
    low = index & np.uint64(0xFFFFFFFF)
    high = np.uint64(offset) ^ (index >> np.uint64(32))
    return philox(low, high, key).reshape(shape)


def _constant(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    return np.array(attrs["value"]).astype(attrs["dtype"].numpy)


def _no_value(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    raise InternalError("interpret", "an input has no value")


# ---- movement -------------------------------------------------------------------------------


def _slice(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    bounds = zip(attrs["start"], attrs["stop"], attrs["step"])
    return np.asarray(inputs[0][tuple(slice(a, b, s) for a, b, s in bounds)])


def _windows(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, axis, width, step = inputs[0], attrs["axis"], attrs["width"], attrs["step"]
    count: Any = ops.window_count(x.shape[axis], width, step, attrs["dilation"])
    index = np.arange(count)[:, None] * step + np.arange(width) * attrs["dilation"]
    return np.moveaxis(np.take(x, index, axis=axis), axis + 1, -1)


# ---- reductions -----------------------------------------------------------------------------


def _reduce(function: Any) -> Reference:
    def run(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
        x = inputs[0]
        return narrow(function(_accumulated(x), axis=attrs["axes"]), x.dtype)

    return run


def _extreme(function: Any, identity: str) -> Reference:
    def run(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
        x = inputs[0]
        initial = getattr(BY_NUMPY[x.dtype], identity)
        return narrow(function(widen(x), axis=attrs["axes"], initial=initial), x.dtype)

    return run


def _argmax(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, axis = widen(inputs[0]), attrs["axis"]
    if x.shape[axis] == 0:
        return np.zeros(x.shape[:axis] + x.shape[axis + 1 :], np.int64)
    return np.asarray(np.argmax(x, axis=axis), dtype=np.int64)


_RUNNING: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _cumulative(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, kind = inputs[0], attrs["kind"]
    wide = _accumulated(x) if kind in ("sum", "prod") else widen(x)
    return narrow(_RUNNING[kind].accumulate(wide, axis=attrs["axis"]), x.dtype)


def _sort(inputs: list[Any], attrs: dict[str, Any]) -> Result:
    x, axis = inputs[0], attrs["axis"]
    wide = widen(x)
    if attrs["descending"]:
        index = np.argsort(np.flip(wide, axis), axis=axis, kind="stable")
        index = x.shape[axis] - 1 - np.flip(index, axis)
    else:
        index = np.argsort(wide, axis=axis, kind="stable")
    return np.take_along_axis(x, index, axis), index.astype(np.int64)


def _dot(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    (a, b), dtype = inputs, attrs["dtype"]
    batch, contract = attrs["batch"], attrs["contract"]
    rest_a = [i for i in range(a.ndim) if i not in batch[0] and i not in contract[0]]
    rest_b = [i for i in range(b.ndim) if i not in batch[1] and i not in contract[1]]
    wide = _dot_dtype(BY_NUMPY[a.dtype], BY_NUMPY[b.dtype], dtype)
    left = a.transpose(*batch[0], *rest_a, *contract[0]).astype(wide)
    right = b.transpose(*batch[1], *contract[1], *rest_b).astype(wide)
    lead = tuple(a.shape[i] for i in batch[0])
    rows, columns = [a.shape[i] for i in rest_a], [b.shape[i] for i in rest_b]
    depth = math.prod(a.shape[i] for i in contract[0])
    left = left.reshape(*lead, math.prod(rows), depth)
    right = right.reshape(*lead, depth, math.prod(columns))
    return narrow(np.matmul(left, right).reshape((*lead, *rows, *columns)), dtype.numpy)


def _picked_dot(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, weights, ids = inputs
    wide = _dot_dtype(BY_NUMPY[x.dtype], BY_NUMPY[x.dtype], BY_NUMPY[x.dtype])
    found = np.zeros((len(x), weights.shape[3 - attrs["axis"]]), wide)
    for row, number in enumerate(ids.tolist()):
        if number >= 0:
            own = weights[number].astype(wide)
            found[row] = x[row].astype(wide) @ (own if attrs["axis"] == 1 else own.T)
    return narrow(found, x.dtype)


def _group_rows(inputs: list[Any], attrs: dict[str, Any]) -> Result:
    (ids,) = inputs
    order = np.argsort(ids, kind="stable").astype(np.int32)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    offsets = np.searchsorted(ids[order], np.arange(attrs["groups"] + 1))
    return order, ranks, offsets.astype(np.int32)


def _route(inputs: list[Any], attrs: dict[str, Any]) -> Result:
    scores = inputs[0].astype(np.float32)
    if attrs["powers"]:
        scores = np.exp(scores - scores.max(1, keepdims=True))
        scores = scores / scores.sum(1, keepdims=True)
    values, indices = _sort([scores], {"axis": 1, "descending": True})
    shares, picked = (x[:, : attrs["count"]] for x in (values, indices))
    if attrs["whole"]:
        shares = shares / shares.sum(1, keepdims=True)
    return shares, *_group_rows([picked.reshape(-1)], {"groups": scores.shape[1]})


def _grouped_dot(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, weights, offsets = inputs[:3]
    listed = [v for v in inputs[3:] if v.dtype != np.float32]
    scales = inputs[3 + len(listed) :]
    dtype, factors = (scales or [x])[0].dtype, scales[0] if len(scales) == 1 else None
    wide = np.float64 if scales else _dot_dtype(*[BY_NUMPY[x.dtype]] * 3)
    if len(scales) == 2:
        (groups, rows, columns), (down, across) = weights.shape, scales[1].shape
        grain = groups * rows // down, columns // across
        x = _of_blocks(x, scales[0], (1, grain[1]))
        weights = _of_blocks(weights.reshape(-1, columns), scales[1], grain).reshape(weights.shape)
    x = x[listed[1]] if len(listed) > 1 else x
    found = np.zeros((len(x), weights.shape[3 - attrs["axis"]]), wide)
    for group, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        own = weights[group].astype(wide) if last > first else None
        if own is not None:
            own = own if attrs["axis"] == 1 else own.T
            found[first:last] = x[first:last].astype(wide) @ own
            found[first:last] *= 1 if factors is None else factors[group]
    return narrow(found, dtype)


def _grouped_outer(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, y, offsets = inputs
    wide = _dot_dtype(*[BY_NUMPY[x.dtype]] * 3)
    ranges = itertools.pairwise(offsets.tolist())
    found = [x[a:b].astype(wide).T @ y[a:b].astype(wide) for a, b in ranges]
    return narrow(np.stack(found), x.dtype)


def _sparse_dot(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, stored, words = inputs
    positions = kept.positions_of(words, stored.dtype.itemsize, attrs["depth"])
    weights = kept.spread_out(stored, positions[:, : stored.shape[1]])[: attrs["rows"]]
    wide = _dot_dtype(BY_NUMPY[x.dtype], BY_NUMPY[stored.dtype], attrs["dtype"])
    return narrow(x.astype(wide) @ weights.astype(wide).T, attrs["dtype"].numpy)


def _of_blocks(codes: Ndarray, scale: Ndarray, grain: tuple[int, int]) -> Ndarray:
    wide = scale.astype(np.float64)
    for axis, count in enumerate(grain):
        wide = np.repeat(wide, count, axis)
    return codes.astype(np.float64) * wide[: codes.shape[0], : codes.shape[1]]


def _block_dot(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    grains = (1, attrs["block"]), (attrs["rows"], attrs["block"])
    left, right = map(_of_blocks, inputs[:2], inputs[2:], grains)
    return narrow(left @ right.T, attrs["dtype"].numpy)


def _dot_dtype(a: DType, b: DType, result: DType) -> Any:
    if not (a.is_float or b.is_float):
        return np.int64
    return np.float64 if any(d.name == "float64" for d in (a, b, result)) else np.float32


def _decomposed(op: Op) -> Reference:
    """Attention as what it decomposes into: floats in float64, rounded once at the end."""

    def nodes_of(arrays: list[Any]) -> tuple[Node, ...]:
        return tuple([build.input_(x.shape, BY_NUMPY[x.dtype]) for x in arrays])

    def run(inputs: list[Any], attrs: dict[str, Any]) -> Result:
        wide = [x.astype(np.float64) if BY_NUMPY[x.dtype].is_float else x for x in inputs]
        nodes = nodes_of(wide)
        found = interpret(attention.decompose(op.make(nodes, attrs)), dict(zip(nodes, wide)))
        items = build.items(op.make(nodes_of(inputs), attrs))
        return tuple([narrow(x, item.dtype.numpy) for x, item in zip(found, items)])

    return run


# ---- indexing -------------------------------------------------------------------------------


def _axes_first(x: Ndarray, axes: tuple[int, ...]) -> Ndarray:
    return x.transpose(*axes, *(i for i in range(x.ndim) if i not in axes))


def _in_range(inputs: Sequence[Ndarray], attrs: dict[str, Any]) -> Ndarray:
    (index,) = inputs
    if ((index < 0) | (index >= attrs["size"])).any():
        raise Site(attrs["message"], attrs["place"]).error()
    return index


def _gather(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    x, indices, axes = inputs[0], inputs[1:], attrs["axes"]
    clipped = []
    for index, axis in zip(indices, axes):
        clipped.append(np.clip(widen(index).astype(np.int64), 0, max(x.shape[axis] - 1, 0)))
    return np.asarray(_axes_first(x, axes)[tuple(clipped)])


_AT: dict[str, Any] = {
    "add": np.add,
    "multiply": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _update(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    state, value, indices = inputs[0], inputs[1], [widen(i) for i in inputs[2:]]
    axes, mode = attrs["axes"], attrs["mode"]
    inside = np.ones(indices[0].shape, np.bool_)
    for index, axis in zip(indices, axes):
        inside &= (index >= 0) & (index < state.shape[axis])
    targets = tuple(index[inside].astype(np.int64) for index in indices)
    wide = widen(state)
    result = np.array(wide, copy=True)
    view = _axes_first(result, axes)
    if mode == "set":
        view[targets] = widen(value)[inside]
    else:
        _AT[mode].at(view, targets, widen(value)[inside])
    return narrow(result, state.dtype)


# ---- control and calls ----------------------------------------------------------------------


class Body:
    """A Block as a function of arrays."""

    def __init__(self, block: Block, symbols: Mapping[str, int], outer: Mapping[Node, Any]) -> None:
        self.block, self.symbols = block, symbols
        self.captured = {c: outer[c] for c in block.captures() if c in outer}

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The results for these arguments."""
        given = {**self.captured, **dict(zip(self.block.arguments, values))}
        return _run(self.block.results, given, self.symbols)

    def empty(self, index: int) -> Ndarray:
        """No steps of a stacked result."""
        type_ = self.block.results[index].type
        shape = tuple(evaluate(s, self.symbols) for s in type_.shape)  # type: ignore[union-attr]
        return np.zeros((0, *shape), type_.dtype.numpy)  # type: ignore[union-attr]


def _scan(inputs: list[Any], attrs: dict[str, Any]) -> Result:
    body, count, length = attrs["blocks"][0], attrs["carries"], attrs["length"]
    arguments = body.block.arguments
    sliced = sum(len(a.shape) != i.ndim for a, i in zip(arguments[count:], inputs[count:]))
    carries, rest = inputs[:count], inputs[count + sliced :]
    slices = inputs[count : count + sliced]
    width = len(body.block.results) - count
    stacked: list[list[Any]] = [[None] * length for _ in range(width)]
    for step in reversed(range(length)) if attrs["reverse"] else range(length):
        results = body([*carries, *(np.asarray(s[step]) for s in slices), *rest])
        carries = results[:count]
        for column, value in zip(stacked, results[count:]):
            column[step] = value
    outputs = [np.stack(c) if length else body.empty(count + i) for i, c in enumerate(stacked)]
    return (*carries, *outputs)


def _cond(inputs: list[Any], attrs: dict[str, Any]) -> Result:
    return tuple(attrs["blocks"][0 if bool(inputs[0]) else 1](inputs[1:]))


def _while_loop(inputs: list[Any], attrs: dict[str, Any]) -> Result:
    condition, body = attrs["blocks"]
    count = attrs["carries"]
    values = list(inputs)
    while bool(condition(values)[0]):
        values[:count] = body(values)
    return tuple(values[:count])


def _unpack(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    from ..core.format import format_of

    values = format_of(attrs["format"]).to_float32(np.asarray(inputs[0]))
    return narrow(values, attrs["dtype"].numpy)


def _pack(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    from ..core.format import NUMPY, format_of
    from ..core.scaled import packed

    arrays = [np.asarray(i).astype(np.float32) for i in inputs]
    with np.errstate(all="ignore"):
        return np.asarray(packed(format_of(attrs["format"]), NUMPY, *arrays))


def _call(inputs: list[Any], attrs: dict[str, Any]) -> Result:
    results = attrs["callee"].interpret(*inputs)
    return results[0] if len(results) == 1 else tuple(results)


REFERENCE: dict[Op, Reference] = {
    ops.input_: _no_value,
    ops.constant: _constant,
    ops.size: lambda _, attrs: np.array(attrs["value"], np.int64),
    ops.iota: lambda _, attrs: narrow(np.arange(attrs["size"]), attrs["dtype"].numpy),
    ops.random_bits: _random_bits,
    ops.negative: _elementwise(np.negative),
    ops.reciprocal: _elementwise(lambda x: 1 / x),
    ops.absolute: _elementwise(np.abs),
    ops.sign: _elementwise(_sign),
    ops.square_root: _elementwise(np.sqrt),
    ops.exp: _elementwise(np.exp),
    ops.log: _elementwise(np.log),
    ops.exp2: _elementwise(np.exp2),
    ops.log2: _elementwise(np.log2),
    ops.log10: _elementwise(np.log10),
    ops.expm1: _elementwise(np.expm1),
    ops.log1p: _elementwise(np.log1p),
    ops.sin: _elementwise(np.sin),
    ops.cos: _elementwise(np.cos),
    ops.tan: _elementwise(np.tan),
    ops.asin: _elementwise(np.arcsin),
    ops.acos: _elementwise(np.arccos),
    ops.atan: _elementwise(np.arctan),
    ops.sinh: _elementwise(np.sinh),
    ops.cosh: _elementwise(np.cosh),
    ops.tanh: _elementwise(np.tanh),
    ops.asinh: _elementwise(np.arcsinh),
    ops.acosh: _elementwise(np.arccosh),
    ops.atanh: _elementwise(np.arctanh),
    ops.logit: _elementwise(lambda x: np.log(x / (1 - x))),
    ops.sigmoid: _elementwise(_sigmoid),
    ops.erf: _elementwise(_mapped(math.erf)),
    ops.erfc: _elementwise(_mapped(math.erfc)),
    ops.erf_inverse: _elementwise(_mapped(_erf_inverse)),
    ops.floor: _elementwise(np.floor),
    ops.ceil: _elementwise(np.ceil),
    ops.round_: _elementwise(np.rint),
    ops.trunc: _elementwise(np.trunc),
    ops.bit_not: _elementwise(np.invert),
    ops.add: _elementwise(np.add),
    ops.subtract: _elementwise(_subtract),
    ops.multiply: _elementwise(np.multiply),
    ops.divide: _elementwise(np.divide),
    ops.floor_divide_: _elementwise(_floor_divide),
    ops.remainder: _elementwise(_remainder),
    ops.fmod: _elementwise(np.fmod),
    ops.power: _elementwise(_power),
    ops.maximum: _elementwise(np.maximum),
    ops.minimum: _elementwise(np.minimum),
    ops.atan2: _elementwise(np.arctan2),
    ops.bit_and: _elementwise(np.bitwise_and),
    ops.bit_or: _elementwise(np.bitwise_or),
    ops.bit_xor: _elementwise(np.bitwise_xor),
    ops.shift_left: _elementwise(np.left_shift),
    ops.shift_right: _elementwise(np.right_shift),
    ops.equal: _compare(np.equal),
    ops.not_equal: _compare(np.not_equal),
    ops.less: _compare(np.less),
    ops.less_equal: _compare(np.less_equal),
    ops.where: lambda inputs, _: np.where(*inputs),
    ops.cast: _cast,
    ops.bitcast: _bitcast,
    ops.fixed: _fixed,
    ops.stop_gradient: lambda inputs, _: inputs[0],
    ops.barrier: lambda inputs, _: inputs[0],
    ops.transfer: lambda inputs, _: inputs[0],
    ops.pruned: lambda inputs, _: inputs[0],
    ops.in_range: _in_range,
    ops.reshape: lambda inputs, attrs: inputs[0].reshape(attrs["shape"]),
    ops.permute: lambda inputs, attrs: inputs[0].transpose(attrs["order"]),
    ops.expand: lambda inputs, attrs: np.broadcast_to(inputs[0], attrs["shape"]),
    ops.pad: lambda inputs, attrs: np.pad(inputs[0], list(zip(attrs["low"], attrs["high"]))),
    ops.slice_: _slice,
    ops.flip: lambda inputs, attrs: np.flip(inputs[0], attrs["axes"]),
    ops.windows: _windows,
    ops.concatenate: lambda inputs, attrs: np.concatenate(inputs, axis=attrs["axis"]),
    ops.sum_: _reduce(np.sum),
    ops.prod: _reduce(np.prod),
    ops.max_: _extreme(np.max, "lowest"),
    ops.min_: _extreme(np.min, "highest"),
    ops.argmax: _argmax,
    ops.cumulative: _cumulative,
    ops.sort: _sort,
    ops.dot: _dot,
    ops.picked_dot: _picked_dot,
    ops.group_rows: _group_rows,
    ops.route: _route,
    ops.grouped_dot: _grouped_dot,
    ops.sparse_dot: _sparse_dot,
    ops.block_dot: _block_dot,
    ops.grouped_outer: _grouped_outer,
    ops.attention: _decomposed(ops.attention),
    ops.attention_backward: _decomposed(ops.attention_backward),
    ops.paged_append: paged_reference.paged_append,
    ops.paged_attention: paged_reference.paged_attention,
    ops.draw: draw_reference.draw,
    ops.top_k: draw_reference.top_k,
    ops.add_listed: draw_reference.add_listed,
    ops.gather: _gather,
    ops.update: _update,
    ops.get: lambda inputs, attrs: inputs[0][attrs["index"]],
    ops.scan: _scan,
    ops.cond: _cond,
    ops.while_loop: _while_loop,
    ops.unpack: _unpack,
    ops.pack: _pack,
    ops.call: _call,
    ops.custom: lambda inputs, attrs: tuple(attrs["blocks"][0](inputs)),
}


# ---- the walk -------------------------------------------------------------------------------


def resolve(value: Any, symbols: Mapping[str, int]) -> Any:
    """An attr with every symbolic size in it bound."""
    if isinstance(value, Expr):
        return evaluate(value, symbols)
    return tuple(resolve(v, symbols) for v in value) if isinstance(value, tuple) else value


def interpret(
    block_or_results: Block | Sequence[Node],
    inputs: Mapping[Node, Any],
    symbols: Mapping[str, int] | None = None,
) -> list[Ndarray]:
    """The values of results, given those of inputs (or arguments) and of Symbols by name."""
    results = block_or_results.results if isinstance(block_or_results, Block) else block_or_results
    given = {node: np.asarray(value) for node, value in inputs.items()}
    with np.errstate(all="ignore"):
        found = _run(results, given, {} if symbols is None else symbols)
    return [v if v.flags.c_contiguous else v.copy() for v in found]


def _run(results: Sequence[Node], given: dict[Node, Any], symbols: Mapping[str, int]) -> list[Any]:
    order = topological(results, stop=lambda n: n in given)
    uses: dict[Node, int] = {}
    for node in order:
        for source in () if node in given else needs(node):
            uses[source] = uses.get(source, 0) + 1
    for result in results:
        uses[result] = uses.get(result, 0) + 1
    values: dict[Node, Any] = {}
    for node in order:
        if node in given:
            values[node] = given[node]
            _check(node, values[node], node.type, symbols)
            continue
        values[node] = _evaluate(node, values, symbols)
        for source in needs(node):
            uses[source] -= 1
            if uses[source] == 0:
                del values[source]
    return [values[r] for r in results]


def _evaluate(node: Node, values: dict[Node, Any], symbols: Mapping[str, int]) -> Any:
    if node.op in (argument_op, ops.input_):
        raise InternalError("interpret", f"{node!r} has no value")
    attrs = {name: resolve(value, symbols) for name, value in node.attrs.items()}
    if node.blocks:
        attrs["blocks"] = tuple(Body(b, symbols, values) for b in node.blocks)
    row = REFERENCE.get(node.op)
    if row is None:
        raise InternalError("interpret", f"{node.op!r} has no reference")
    result = row([values[i] for i in node.inputs], attrs)
    result = tuple(map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)
    _check(node, result, node.type, symbols)
    return result


def _check(node: Node, value: Any, type_: Type, symbols: Mapping[str, int]) -> None:
    if isinstance(type_, Tuple):
        for item, item_type in zip(value, type_.items):
            _check(node, item, item_type, symbols)
        return
    assert isinstance(type_, Array)
    shape = tuple(evaluate(s, symbols) for s in type_.shape)
    if value.shape != shape or value.dtype != type_.dtype.numpy:
        raise InternalError(
            "interpret", f"{node!r} gave {value.dtype}{list(value.shape)}, expected {type_}"
        )
