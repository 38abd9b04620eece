"""Build Graph Nodes as people think: with broadcasting, promotion, Python numbers and -1 axes.

Everything that makes Graph Nodes (tensor functions, derivatives, decompositions) goes through
here. Invariant: what comes out obeys the strict rules of `ops` (equal shapes, equal dtypes);
a mistake in shapes or axes is a user error that names the op. The file is long because it has
one short function for nearly every op.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, promote, promote_scalar
from ..core.errors import AxisError, DTypeError, ShapeError, user_location
from ..ir.block import Block, argument, pure_block
from ..ir.fingerprint import UserLine
from ..ir.node import Node, Op, next_serial, topological
from ..ir.requirement import require
from ..ir.rewrite import replace
from ..ir.symbol import Expr, Size, combine, floor_divide
from ..ir.symbol import minimum as size_minimum
from ..ir.types import Array, product
from ..ir.whole import is_one, whole
from . import ops
from .ranges import surely_inside

Number = Union[bool, int, float]
Value = Union[Node, Number]
Shape = tuple[Size, ...]

# ---- leaves ---------------------------------------------------------------------------------


def constant(value: Any, dtype: DType) -> Node:
    """A scalar constant, its value normalised to the dtype's kind."""
    if dtype.kind == "bool":
        value = bool(value)
    elif dtype.is_float:
        value = float(value)
    else:
        bits = int(value) & ((1 << dtype.bits) - 1)
        negative = dtype.kind == "int" and bits >> (dtype.bits - 1)
        value = bits - (1 << dtype.bits) if negative else bits
    return ops.constant(value=value, dtype=dtype)


def full(shape: Shape, value: Any, dtype: DType) -> Node:
    """An array of one value."""
    return broadcast_to(constant(value, dtype), shape)


def like(x: Node, value: Any) -> Node:
    """An array of one value, shaped and typed as x."""
    return full(x.shape, value, x.dtype)


def iota(size: Size, dtype: DType = dtypes.int64) -> Node:
    """0, 1, ... size-1."""
    return ops.iota(size=size, dtype=dtype)


def iota_along(shape: Shape, axis: int, dtype: DType = dtypes.int64) -> Node:
    """An array of the shape whose value is its index along the axis."""
    line = iota(shape[axis], dtype)
    ones: Shape = tuple(shape[axis] if i == axis else 1 for i in range(len(shape)))
    return expand(reshape(line, ones), shape)


def size_value(size: Size) -> Node:
    """A size as a scalar int64 (a constant where it is known)."""
    if isinstance(size, int):
        return constant(size, dtypes.int64)
    return ops.size(value=size)


def input_(shape: Shape, dtype: DType, key: int | None = None) -> Node:
    """A value from outside."""
    return ops.input_(key=ops.fresh_key() if key is None else key, shape=shape, dtype=dtype)


# ---- shapes ---------------------------------------------------------------------------------


def axis_of(x: Node, axis: int, op: str, extra: int = 0) -> int:
    """A non-negative axis of x, checked."""
    rank = len(x.shape) + extra
    if axis.__class__ is not int:
        axis = whole(axis, op, "axis")
    if not -rank <= axis < rank:
        raise AxisError(
            f"axis {axis} is out of range for shape {show(x.shape)}",
            op=op,
            expected=f"-{rank} <= axis < {rank}",
            got=axis,
        )
    return axis % rank


def axes_of(x: Node, axes: int | Sequence[int] | None, op: str) -> tuple[int, ...]:
    """Sorted, distinct, non-negative axes; None means all. A scalar has none, named 0 or -1."""
    if axes is None:
        return tuple(range(len(x.shape)))
    given: Any = (axes,) if is_one(axes) else tuple(axes)  # type: ignore[arg-type]
    found = [axis_of(x, a, op, extra=0 if x.shape else 1) for a in given]
    if len(set(found)) != len(found):
        raise AxisError("an axis is named twice", op=op, got=given)
    return tuple(sorted(found)) if x.shape else ()


def show(shape: Shape) -> str:
    """A shape for messages: `(4, 8)`."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def broadcast_shapes(op: str, *shapes: Shape) -> Shape:
    """The common shape under NumPy's rule."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Size] = []
    for i in range(rank):
        size: Size = 1
        for shape in shapes:
            j = i - (rank - len(shape))
            s = shape[j] if j >= 0 else 1
            if s == 1 or s == size:
                continue
            if size != 1:
                raise ShapeError(
                    "shapes do not broadcast",
                    op=op,
                    expected="equal sizes or 1 on every axis, counted from the right",
                    got=" and ".join(show(s) for s in shapes),
                    hint=f"axis {i - rank} has sizes {size} and {s}",
                )
            size = s
        result.append(size)
    return tuple(result)


def broadcast_to(x: Node, shape: Shape, op: str = "expand") -> Node:
    """x repeated to the shape."""
    if x.shape == shape:
        return x
    if broadcast_shapes(op, x.shape, shape) != shape:
        raise ShapeError("cannot broadcast", op=op, expected=show(shape), got=show(x.shape))
    if len(x.shape) < len(shape):
        x = reshape(x, (1,) * (len(shape) - len(x.shape)) + x.shape)
    return expand(x, shape)


# ---- elementwise ----------------------------------------------------------------------------


def promoted(op: str, *values: Value) -> list[Node]:
    """Nodes of one dtype and one shape; Python numbers follow the arrays."""
    first = values[0]
    if isinstance(first, Node) and all(
        isinstance(v, Node) and v.type == first.type for v in values[1:]
    ):
        return list(values)  # type: ignore[arg-type]
    nodes = [v for v in values if isinstance(v, Node)]
    if not nodes:
        raise DTypeError("needs an array operand", op=op, got=values)
    # arrays with axes outrank scalars of the same category, as in PyTorch
    dtype: DType | None = None
    for group in ([n for n in nodes if n.shape], [n for n in nodes if not n.shape]):
        inner: DType | None = None
        for n in group:
            inner = n.dtype if inner is None else promote(inner, n.dtype)
        if inner is not None:
            if dtype is None:
                dtype = inner
            elif category(inner) > category(dtype):
                dtype = promote(dtype, inner)
    assert dtype is not None
    for v in values:
        if not isinstance(v, Node):
            if not isinstance(v, (bool, int, float, np.bool_, np.integer, np.floating)):
                raise DTypeError(
                    "operand is not a Tensor or a number",
                    op=op,
                    expected="Tensor, bool, int or float",
                    got=type(v).__name__,
                )
            dtype = promote_scalar(dtype, v)
    shape = broadcast_shapes(op, *(n.shape for n in nodes))
    result = []
    for v in values:
        node = cast(v, dtype) if isinstance(v, Node) else constant(v, dtype)
        result.append(broadcast_to(node, shape, op))
    return result


def category(d: DType) -> int:
    """bool 0, integers 1, floats 2: what promotion between kinds goes by."""
    return 0 if d.kind == "bool" else (1 if d.is_integer else 2)


def unary(op: Op, x: Node) -> Node:
    """An elementwise op of one operand."""
    return op(x)


def binary(op: Op, a: Value, b: Value) -> Node:
    """An elementwise op of two operands, broadcast and promoted."""
    left, right = promoted(op.name, a, b)
    return op(left, right)


def add(a: Value, b: Value) -> Node:
    """a + b."""
    return binary(ops.add, a, b)


def subtract(a: Value, b: Value) -> Node:
    """a - b."""
    return binary(ops.subtract, a, b)


def multiply(a: Value, b: Value) -> Node:
    """a * b."""
    return binary(ops.multiply, a, b)


def divide(a: Value, b: Value) -> Node:
    """True division; integers become float32."""
    left, right = promoted("divide", a, b)
    if not left.dtype.is_float:
        left, right = cast(left, dtypes.float32), cast(right, dtypes.float32)
    return ops.divide(left, right)


def maximum(a: Value, b: Value) -> Node:
    """The larger of a and b."""
    return binary(ops.maximum, a, b)


def minimum(a: Value, b: Value) -> Node:
    """The smaller of a and b."""
    return binary(ops.minimum, a, b)


def equal(a: Value, b: Value) -> Node:
    """a == b."""
    return binary(ops.equal, a, b)


def less(a: Value, b: Value) -> Node:
    """a < b."""
    return binary(ops.less, a, b)


def less_equal(a: Value, b: Value) -> Node:
    """a <= b."""
    return binary(ops.less_equal, a, b)


def negative(x: Node) -> Node:
    """-x."""
    return ops.negative(x)


def logical_not(x: Node) -> Node:
    """True where x is zero."""
    return ops.bit_not(cast(x, dtypes.bool_))


def where(condition: Node, a: Value, b: Value) -> Node:
    """a where the condition holds, else b."""
    if not isinstance(a, Node) and not isinstance(b, Node):
        dtype = promote_scalar(promote_scalar(dtypes.bool_, a), b)
        a = constant(a, dtype)
    left, right = promoted("where", a, b)
    shape = broadcast_shapes("where", condition.shape, left.shape)
    mask = broadcast_to(cast(condition, dtypes.bool_), shape)
    return ops.where(mask, broadcast_to(left, shape), broadcast_to(right, shape))


def unpack(raw: Node, format: str, dtype: DType) -> Node:
    """The values of weights whose rows are stored as bytes of a Format; see `ops.unpack`."""
    return ops.unpack(raw, format=format, dtype=dtype)


def pack(x: Node, format: str, scale: Node | None = None) -> Node:
    """The bytes of rows of values in a Format; see `ops.pack`."""
    return ops.pack(x, *(() if scale is None else (scale,)), format=format)


def cast(x: Node, dtype: DType) -> Node:
    """x converted to the dtype."""
    if x.dtype is dtype:
        return x
    if dtype is dtypes.float64 and not x.shape and x.dtype is dtypes.float32 and numbers:
        exact = _unrounded(x)
        if exact is not None:
            return exact
    return ops.cast(x, dtype=dtype)


# Inputs that are a Python float each: float64, so that none of it is lost beside float64.
numbers: weakref.WeakSet[Node] = weakref.WeakSet()


def number(exact: Node) -> Node:
    """What stands for a Python float given as a float64 input: float32 to all that look at its
    dtype, and exact again, with what was computed of it and of constants, beside float64."""
    numbers.add(exact)
    return ops.cast(exact, dtype=dtypes.float32)


def _unrounded(x: Node) -> Node | None:
    """An expression of Python numbers alone in float64; None if x is anything else."""
    done: dict[Node, Node] = {}
    for node in topological([x], stop=numbers.__contains__):
        if node in numbers or (node.op is ops.cast and node.inputs[0] in numbers):
            done[node] = node if node in numbers else node.inputs[0]
        elif node.op is ops.constant and node.dtype is dtypes.float32:
            done[node] = constant(node.attrs["value"], dtypes.float64)
        elif node.op.category in ("unary", "binary") and node.dtype is dtypes.float32:
            done[node] = node.op.make(tuple([done[i] for i in node.inputs]), node.attrs)
        else:
            return None
    return done[x] if any(n in numbers for n in done.values()) else None


# ---- movement -------------------------------------------------------------------------------


def reshape(x: Node, shape: Sequence[Size], op: str = "reshape") -> Node:
    """The same elements under another shape; one size may be -1."""
    shape = tuple(shape)
    if any(isinstance(s, int) and s == -1 for s in shape):
        where_ = [i for i, s in enumerate(shape) if isinstance(s, int) and s == -1]
        if len(where_) > 1:
            raise ShapeError("only one size may be -1", op=op, got=show(shape))
        rest = product(tuple(s for i, s in enumerate(shape) if i != where_[0]))
        total = product(x.shape)
        whole: Size = floor_divide(total, rest) if rest != 0 else 0
        shape = shape[: where_[0]] + (whole,) + shape[where_[0] + 1 :]
    before, after = product(x.shape), product(shape)
    if after != before:
        require(
            combine(after, before, -1),
            ShapeError,
            "the number of elements changes",
            op=op,
            expected="{before} elements as in {source}",
            got="{after} elements in {shape}",
            exact=True,
            before=before,
            source=x.shape,
            after=after,
            shape=shape,
        )
    return x if shape == x.shape else ops.reshape(x, shape=shape)


def permute(x: Node, order: Sequence[int]) -> Node:
    """Axes in another order."""
    order = tuple(axis_of(x, a, "permute") for a in order)
    if sorted(order) != list(range(len(x.shape))):
        raise AxisError(
            "not an order of the axes",
            op="permute",
            expected=f"each of 0..{len(x.shape) - 1} once",
            got=order,
        )
    return x if order == tuple(range(len(order))) else ops.permute(x, order=order)


def transpose(x: Node, a: int = -2, b: int = -1) -> Node:
    """Two axes swapped."""
    order = list(range(len(x.shape)))
    a, b = axis_of(x, a, "transpose"), axis_of(x, b, "transpose")
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


def move_axis(x: Node, source: int, target: int) -> Node:
    """One axis moved to another position."""
    source = axis_of(x, source, "movedim")
    target = axis_of(x, target, "movedim")
    order = [i for i in range(len(x.shape)) if i != source]
    order.insert(target, source)
    return permute(x, order)


def expand(x: Node, shape: Shape) -> Node:
    """Axes of size 1 repeated; the rank stays."""
    return x if x.shape == shape else ops.expand(x, shape=shape)


def unsqueeze(x: Node, axis: int) -> Node:
    """A new axis of size 1."""
    axis = axis_of(x, axis, "unsqueeze", extra=1)
    return reshape(x, x.shape[:axis] + (1,) + x.shape[axis:])


def squeeze(x: Node, axes: Sequence[int]) -> Node:
    """Axes of size 1 removed."""
    return reshape(x, tuple(s for i, s in enumerate(x.shape) if i not in axes))


def pad(x: Node, low: Sequence[Size], high: Sequence[Size]) -> Node:
    """Zeros before and after each axis."""
    low, high = tuple(low), tuple(high)
    if all(a == 0 for a in low) and all(b == 0 for b in high):
        return x
    return ops.pad(x, low=low, high=high)


def slice_(
    x: Node, start: Sequence[Size], stop: Sequence[Size], step: Sequence[int] | None = None
) -> Node:
    """x[start:stop:step] on every axis; in range, steps positive."""
    step = (1,) * len(x.shape) if step is None else tuple(step)
    start, stop = tuple(start), tuple(stop)
    if all(a == 0 for a in start) and stop == x.shape and all(s == 1 for s in step):
        return x
    return ops.slice_(x, start=start, stop=stop, step=step)


def slice_axis(x: Node, axis: int, start: Size, stop: Size, step: int = 1) -> Node:
    """A slice of one axis."""
    starts: list[Size] = [0] * len(x.shape)
    stops, steps = list(x.shape), [1] * len(x.shape)
    starts[axis], stops[axis], steps[axis] = start, stop, step
    return slice_(x, starts, stops, steps)


def flip(x: Node, axes: Sequence[int]) -> Node:
    """Axes reversed."""
    found = axes_of(x, axes, "flip")
    return ops.flip(x, axes=found) if found else x


def windows(x: Node, axis: int, width: int, step: int = 1, dilation: int = 1) -> Node:
    """Sliding windows along an axis; the offset within the window is a new last axis."""
    axis = axis_of(x, axis, "windows")
    return ops.windows(x, axis=axis, width=width, step=step, dilation=dilation)


def concatenate(xs: Sequence[Node], axis: int) -> Node:
    """Arrays one after the other."""
    if not xs:
        raise ShapeError("needs at least one Tensor", op="concatenate")
    axis = axis_of(xs[0], axis, "concatenate")
    dtype = xs[0].dtype
    for x in xs[1:]:
        dtype = promote(dtype, x.dtype)
        if len(x.shape) != len(xs[0].shape) or any(
            a != b for i, (a, b) in enumerate(zip(x.shape, xs[0].shape)) if i != axis
        ):
            raise ShapeError(
                "sizes differ off the axis",
                op="concatenate",
                expected=f"{show(xs[0].shape)} except on axis {axis}",
                got=show(x.shape),
            )
    cast_ = [cast(x, dtype) for x in xs]
    return cast_[0] if len(cast_) == 1 else ops.concatenate(*cast_, axis=axis)


# ---- reductions, dot ------------------------------------------------------------------------


def reduce(op: Op, x: Node, axes: int | Sequence[int] | None, keep: bool = False) -> Node:
    """A reduction over axes; `keep` leaves them as size 1."""
    found = axes_of(x, axes, op.name)
    result = op(x, axes=found) if found else x
    if keep:
        result = reshape(result, tuple(1 if i in found else s for i, s in enumerate(x.shape)))
    return result


def sum_(x: Node, axes: int | Sequence[int] | None = None, keep: bool = False) -> Node:
    """Sum over axes in x's dtype."""
    return reduce(ops.sum_, x, axes, keep)


def max_(x: Node, axes: int | Sequence[int] | None = None, keep: bool = False) -> Node:
    """Maximum over axes."""
    return reduce(ops.max_, x, axes, keep)


def sum_to(x: Node, shape: Shape) -> Node:
    """x summed down to a shape that broadcasts to x's: the transpose of `broadcast_to`."""
    if x.shape == shape:
        return x
    extra = len(x.shape) - len(shape)
    axes = [i for i in range(extra)]
    axes += [i + extra for i, s in enumerate(shape) if s == 1 and x.shape[i + extra] != 1]
    return reshape(sum_(x, axes), shape) if axes else reshape(x, shape)


def dot(
    a: Node,
    b: Node,
    batch: tuple[Sequence[int], Sequence[int]],
    contract: tuple[Sequence[int], Sequence[int]],
    dtype: DType | None = None,
) -> Node:
    """General contraction; result axes: batch, a's rest, b's rest."""
    common = promote(a.dtype, b.dtype)
    return ops.dot(
        cast(a, common),
        cast(b, common),
        batch=(tuple(batch[0]), tuple(batch[1])),
        contract=(tuple(contract[0]), tuple(contract[1])),
        dtype=common if dtype is None else dtype,
    )


def matmul(a: Node, b: Node) -> Node:
    """NumPy's matmul: the last two axes multiply, the rest broadcast."""
    if not a.shape or not b.shape:
        raise ShapeError(
            "needs at least one axis on both sides",
            op="matmul",
            got=f"{show(a.shape)} and {show(b.shape)}",
        )
    if len(a.shape) == 1:
        result = matmul(unsqueeze(a, 0), b)
        return squeeze(result, (max(len(b.shape) - 2, 0),))
    if len(b.shape) == 1:
        result = matmul(a, unsqueeze(b, 1))
        return squeeze(result, (len(result.shape) - 1,))
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            "inner sizes differ",
            op="matmul",
            expected=f"a's last size {a.shape[-1]} to equal b's second-to-last {b.shape[-2]}",
            got=f"{show(a.shape)} @ {show(b.shape)}",
        )
    if len(b.shape) == 2:
        return dot(a, b, ((), ()), ((len(a.shape) - 1,), (0,)))
    lead = broadcast_shapes("matmul", a.shape[:-2], b.shape[:-2])
    a, b = broadcast_to(a, lead + a.shape[-2:]), broadcast_to(b, lead + b.shape[-2:])
    axes = tuple(range(len(lead)))
    return dot(a, b, (axes, axes), ((len(lead) + 1,), (len(lead),)))


# ---- indexing -------------------------------------------------------------------------------


def gather(x: Node, indices: Sequence[Node], axes: Sequence[int]) -> Node:
    """x at integer indices, one per axis, broadcast together; their axes come first."""
    shape = broadcast_shapes("gather", *(i.shape for i in indices))
    for axis in axes:
        require(
            size_minimum(x.shape[axis], 1) - size_minimum(product(shape), 1),
            AxisError,
            "an axis of no elements has no index",
            op="gather",
            axis=axis,
            got="axis {axis} of {shape}",
            expected="a size > 0 where there are indices",
            shape=x.shape,
        )
    return ops.gather(x, *(broadcast_to(i, shape) for i in indices), axes=tuple(axes))


def in_range(index: Node, size: Size, op: str, negative: bool = False) -> Node:
    """The index, and an error of the run that names op and line where it is not in 0..size-1;
    `negative` says that numbers from the end were made such before."""
    if surely_inside(index, size):
        return index
    least = f"-{size}" if negative else "0"
    message = f"{op}: an index is out of range\n  expected: {least} <= index < {size}"
    return _in_range(index, size, message)


def where_right(right: Node, index: Node, size: Size, op: str, wanted: str) -> Node:
    """An index of 0..size-1, and an error of the run where the values it was made of are wrong."""
    return _in_range(where(right, index, -1), size, f"{op}: {wanted}")


def _in_range(index: Node, size: Size, message: str) -> Node:
    return ops.in_range(index, size=size, message=message, place=UserLine(user_location() or ""))


def update(
    state: Node, value: Node, indices: Sequence[Node], axes: Sequence[int], mode: str = "set"
) -> Node:
    """state with value written at indices; see `ops.update`."""
    shape = broadcast_shapes("update", *(i.shape for i in indices))
    rest = tuple(s for i, s in enumerate(state.shape) if i not in axes)
    value = broadcast_to(cast(value, state.dtype), shape + rest, "update")
    nodes = (broadcast_to(i, shape) for i in indices)
    return ops.update(state, value, *nodes, axes=tuple(axes), mode=mode)


# ---- control --------------------------------------------------------------------------------


class Transfers:
    """Whether any Graph of this process uses several Devices."""

    used = False


def transfer(x: Node, source: str, device: str) -> Node:
    """A value of the Device `source` on another one."""
    Transfers.used = True
    return x if source == device else ops.transfer(x, source=source, device=device)


def items(node: Node) -> list[Node]:
    """The items of a tuple Node."""
    return [ops.get(node, index=i) for i in range(len(node.type.items))]  # type: ignore[union-attr]


def _trace(name: str, arguments: Sequence[Node], body: Callable[[], Sequence[Node]]) -> Block:
    """The Block of what `body` builds; older Nodes are captured, constants are not."""
    since = next_serial()
    results = tuple(body())

    def outside(node: Node) -> bool:
        if node.op is ops.input_:  # made inside or not, its value comes from outside
            return True
        return node.serial < since and not (
            ops.is_constant(node) or node.op in (ops.iota, ops.size)
        )

    return pure_block(name, tuple(arguments), results, outside)


def _close(blocks: Sequence[Block]) -> tuple[tuple[Block, ...], list[Node]]:
    """Blocks that take what any of them captured as extra arguments, and those values."""
    captured = list(dict.fromkeys(c for b in blocks for c in b.captures()))
    closed = []
    for b in blocks:
        fresh = [argument(f"shared{i}", c.type) for i, c in enumerate(captured)]
        results = replace(b.results, dict(zip(captured, fresh)))
        closed.append(pure_block(b.name, b.arguments + tuple(fresh), tuple(results)))
    return tuple(closed), captured


def _check_carries(op: str, old: Sequence[Node], new: Sequence[Node]) -> None:
    if [n.type for n in old] != [n.type for n in new]:
        raise ShapeError(
            "the carries change type",
            op=op,
            expected=[n.type for n in old],
            got=[n.type for n in new],
        )


def scan(
    body: Callable[[list[Node], list[Node]], tuple[Sequence[Node], Sequence[Node]]],
    carries: Sequence[Node],
    slices: Sequence[Node],
    length: Size,
    reverse: bool = False,
) -> tuple[list[Node], list[Node]]:
    """Run body(carries, slices) -> (carries, outputs) `length` times."""
    carried = [argument(f"carry{i}", c.type) for i, c in enumerate(carries)]
    sliced = [argument(f"slice{i}", Array(s.shape[1:], s.dtype)) for i, s in enumerate(slices)]

    def run() -> Sequence[Node]:
        new_carries, outputs = body(carried, sliced)
        _check_carries("scan", carries, new_carries)
        return [*new_carries, *outputs]

    closed, captured = _close([_trace("body", carried + sliced, run)])
    node = ops.scan(
        *carries,
        *slices,
        *captured,
        blocks=closed,
        carries=len(carries),
        length=length,
        reverse=reverse,
    )
    found = items(node)
    return found[: len(carries)], found[len(carries) :]


def cond(
    condition: Node, then: Callable[[], Sequence[Node]], otherwise: Callable[[], Sequence[Node]]
) -> list[Node]:
    """The results of one of two branches, chosen at run time."""
    blocks = [_trace("then", (), then), _trace("otherwise", (), otherwise)]
    first, second = ([r.type for r in b.results] for b in blocks)
    if first != second:
        raise ShapeError("branches differ in type", op="cond", expected=first, got=second)
    closed, captured = _close(blocks)
    return items(ops.cond(condition, *captured, blocks=closed))


def while_loop(
    condition: Callable[[list[Node]], Node],
    body: Callable[[list[Node]], Sequence[Node]],
    carries: Sequence[Node],
) -> list[Node]:
    """Run body(carries) -> carries while condition(carries) holds."""
    tested = [argument(f"carry{i}", c.type) for i, c in enumerate(carries)]
    worked = [argument(f"carry{i}", c.type) for i, c in enumerate(carries)]
    test = _trace("condition", tested, lambda: [condition(tested)])
    work = _trace("body", worked, lambda: body(worked))
    _check_carries("while_loop", carries, work.results)
    closed, captured = _close([test, work])
    return items(ops.while_loop(*carries, *captured, blocks=closed, carries=len(carries)))


def inline(block: Block, values: Sequence[Node]) -> list[Node]:
    """The results of a closed Block with values in place of its arguments.

    Nodes that own Blocks are copied, Blocks and all: each stays in one place only.
    """
    done = dict(zip(block.arguments, values))
    for node in topological(block.results, stop=lambda n: n in done):
        if node in done:
            continue
        inputs = tuple([done[i] for i in node.inputs])
        if node.blocks:
            done[node] = node.with_inputs(inputs, tuple([fresh_block(b) for b in node.blocks]))
        else:
            done[node] = node.with_inputs(inputs)
    return [done[r] for r in block.results]


def fresh_block(block: Block) -> Block:
    """A copy of a closed Block with arguments of its own."""
    arguments = tuple([argument(a.attrs["name"], a.type) for a in block.arguments])
    return pure_block(block.name, arguments, tuple(inline(block, arguments)))


def custom(
    body: Callable[[list[Node]], Sequence[Node]], inputs: Sequence[Node], rules: Any
) -> list[Node]:
    """body(inputs) whose derivatives come from rules; captured values have none."""
    arguments = [argument(f"input{i}", x.type) for i, x in enumerate(inputs)]
    closed, captured = _close([_trace("custom", arguments, lambda: body(arguments))])
    return items(ops.custom(*inputs, *captured, blocks=closed, rules=rules))


def is_symbolic(shape: Shape) -> bool:
    """Whether a size is not known now."""
    return any(isinstance(s, Expr) for s in shape)


def offset_size(size: Size, amount: int) -> Size:
    """size + amount."""
    return combine(size, amount, 1)
