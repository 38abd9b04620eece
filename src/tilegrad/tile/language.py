"""The tile language: the functions a kernel is written with, public as `tilegrad.tile`.

A kernel is a Python function over arrays. It says what one program of a grid does, in tiles:

    @kernel
    def scale(x, *, factor: float):
        (rows, columns), block = x.shape, 64
        i, j = tile.grid(rows, tile.ceil_divide(columns, block))
        out = tile.result(x.shape, x.dtype)
        out[i, j * block : j * block + block] = x[i, j * block : j * block + block] * factor

(`x[...]` alone names a part of an array; `tile.load` and operators read it.) Tiles that stand
at the end of an array know their edges (see `value`), so no masks are needed for them; masks
for anything else are given as in Triton. Invariant: every function adds Nodes to the Body of
the kernel that is being traced, at the user's line, or raises a UserError that names that line.
Words of memory stand in `language_memory`, those of the placed level in `roles`; the elementwise
ones are rows of a table of the package. The file is long because it is one table of functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import accumulator, dtype_of, promote
from ..core.errors import AxisError, DTypeError, ShapeError, UserError
from ..ir.node import Node, Op
from ..ir.symbol import Size, high, low
from ..ir.symbol import ceil_divide as ceil_divide_sizes
from ..ir.types import Shape, Tile
from . import ops
from .arithmetic import aligned, broadcast_shape, common_dtype, elementwise, join_edges
from .arithmetic import broadcast as broadcast_tile
from .inside import bounded
from .numeric import identity
from .trace import Range, tracer
from .value import (
    ABOVE,
    FAR,
    Edge,
    Edges,
    Index,
    MemoryValue,
    TileValue,
    index_of,
    number,
    operate,
    size_of,
    spread,
    tile_of,
)
from .value import cast as cast_tile

INF = math.inf


def do(op: Op, *inputs: Node | Size, **attrs: Any) -> Node:
    """Add an op to the Body."""
    return tracer().builder.do(op, *inputs, **attrs)


# ---- the grid ---------------------------------------------------------------------------------


def grid(*sizes: Any) -> Any:
    """Declare the grid; gives this program's number along each axis (one, or a tuple)."""
    found = [index_of(i) for i in tracer().set_grid([size_of(s, "size") for s in sizes])]
    return found[0] if len(found) == 1 else tuple(found)


def program_id(axis: int = 0) -> Any:
    """This program's number along an axis of the grid."""
    t = tracer()
    if t.grid is None or not 0 <= axis < len(t.grid):
        raise AxisError(
            "the grid has no such axis",
            expected=f"0 <= axis < {len(t.grid or ())}",
            got=axis,
            hint="declare the grid first: tile.grid(...)",
        )
    return index_of(t.programs[axis])


def num_programs(axis: int = 0) -> Any:
    """How many programs there are along an axis of the grid."""
    program_id(axis)
    return index_of((tracer().grid or ())[axis])


class Context:
    """Block sizes and other choices of the Plan, as the kernel sees them."""

    def __getattr__(self, name: str) -> Any:
        t = tracer()
        if name in ("m", "n", "k"):
            return t.block_of(name)
        if name == "d":
            return self._columns()
        if name in ("vector", "warps", "stages", "swizzle"):
            return getattr(t.plan, name)
        sizes = dict(t.plan.sizes)
        if name in sizes:
            return sizes[name]
        raise AttributeError(f"the Plan has no {name!r}")

    def _columns(self) -> int:
        """The columns of the first array, which one tile holds whole."""
        t = tracer()
        columns = t.inputs[0].type.shape[-1] if t.inputs and t.inputs[0].ndim else None
        if not isinstance(columns, int):
            raise ShapeError("T.d needs a static number of columns", got=columns)
        if t.stated.k is not None and t.block_of("k") < columns:
            raise ShapeError(
                "the Plan's k does not hold a whole row",
                expected=f"k >= {columns}",
                got=t.block_of("k"),
            )
        return columns


def context() -> Context:
    """The Plan of this kernel: T.m, T.n, T.k (blocks), T.d (columns), T.vector, ..."""
    tracer()
    return Context()


def result(
    shape: Sequence[Any],
    dtype: Any = dtypes.float32,
    *,
    fill: float | str | None = None,
    name: str = "",
) -> MemoryValue:
    """An array the kernel gives back; `fill` sets all of it before any program runs.

    Without it every element must be written: where that is not so, it is an error, and where it is
    not known, the rest is 0. With fill="none" nothing is set, and nobody may read the rest.
    """
    if isinstance(fill, str) and fill != "none":
        raise UserError("no such fill", expected='a number or "none"', got=repr(fill))
    sizes = [size_of(s, "size") for s in (shape if isinstance(shape, (tuple, list)) else [shape])]
    if any(high(s) < 0 for s in sizes):
        raise ShapeError("no array has such sizes", got=tuple(sizes))
    own = dtype_of(dtype)
    if own.is_integer and isinstance(fill, (int, float)):
        if fill != fill or fill % 1 or not own.lowest <= fill <= own.highest:
            raise DTypeError("the dtype has no such number", expected=own, got=fill)
    return tracer().add_result(sizes, own, name, fill)


# ---- loops and sizes --------------------------------------------------------------------------


def range_(*ends: Any, unroll: int = 1, bounds: tuple[int, int] | None = None) -> Range:
    """A loop that runs in the kernel: range(stop), range(start, stop), range(start, stop, step).

    Ends may be symbolic or loaded. `bounds` are the least and the most that the index is, where the
    kernel knows more than the ends say.
    """
    if not 1 <= len(ends) <= 3:
        raise UserError("wrong number of bounds", expected="1, 2 or 3", got=len(ends))
    lower, upper, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise UserError("the step is not a positive integer", got=repr(step))
    return Range(size_of(lower, "bound"), size_of(upper, "bound"), step, unroll, bounds=bounds)


def range_n(size: Any, block: int) -> Range:
    """Blocks of rows of an array: `size` is its shape (the rows are the last axis but one) or
    the number of rows; the loop gives what tile.load takes as rows."""
    if isinstance(size, (tuple, list)):
        size = size[-2]
    count = static(block, "block")
    return replace(range_(0, size, count), block=count)


def static(value: Any, what: str) -> int:
    """An integer that is known while tracing."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ShapeError(
        f"the {what} is not static",
        expected="a plain integer",
        got=repr(value),
        hint="the shape of a tile is fixed when it is compiled; "
        "pass sizes as static (keyword) arguments",
    )


def static_shape(shape: Any) -> Shape:
    """A tile's shape."""
    if isinstance(shape, (int, Index, TileValue)):
        shape = (shape,)
    return tuple(static(s, "shape of a tile") for s in shape)


def index(value: Any, low: int = 0, high: int = FAR) -> Any:
    """An integer that was loaded or computed, with its bounds, for index arithmetic.

    That it keeps to them is checked while the kernel runs, as indices are.
    """
    tile = tile_of(value)
    if tile.shape != () or not tile.dtype.is_integer:
        raise DTypeError("not an integer scalar", got=repr(tile))
    t = tracer()
    return index_of(t.atom_of(bounded(t, tile.node, low, high), low, high))


def hold(value: Any, name: str = "held", bounds: tuple[int, int] | None = None) -> Any:
    """An index computed here, once: what follows knows its bounds (or those that are given), and
    not how it came about."""
    t = tracer()
    if bounds is None:
        size = size_of(value, "index")
        if isinstance(size, int):
            return size
        node, bounds = t.builder.index(size), (low(size), high(size))
    else:
        node = bounded(t, cast_tile(value, dtypes.int64).node, *bounds)
    return index_of(t.builder.atom(name, node, *bounds))


def most(value: Any) -> int:
    """The most that an index is, by its bounds."""
    return high(size_of(value, "index"))


def hole(name: str, shape: Any, *inputs: Any, dtype: Any = dtypes.float32) -> TileValue:
    """A tile that whoever uses the kernel computes from `inputs`; see `build.fill`."""
    given = [tile_of(i).node for i in inputs]
    type_ = Tile(static_shape(shape), dtype_of(dtype))
    return TileValue(do(ops.hole, *given, name=name, type=type_))


def ceil_divide(a: Any, b: Any) -> Any:
    """a / b rounded up, of sizes."""
    return index_of(ceil_divide_sizes(size_of(a, "size"), size_of(b, "size")))


# ---- making tiles -----------------------------------------------------------------------------


def full(shape: Any, value: Any, dtype: Any = dtypes.float32) -> TileValue:
    """One value everywhere."""
    sizes, chosen = static_shape(shape), dtype_of(dtype)
    if isinstance(value, (int, float)):
        return TileValue(tracer().builder.constant(value, chosen, sizes))
    return broadcast_tile(cast_tile(value, chosen), sizes)


def zeros(shape: Any, dtype: Any = dtypes.float32) -> TileValue:
    """Zeros."""
    return full(shape, 0, dtype)


def arange(start: int, stop: int | None = None, dtype: Any = dtypes.int64) -> TileValue:
    """start .. stop-1 (0 .. start-1 if alone)."""
    first, last = (0, start) if stop is None else (start, stop)
    size = static(last, "end") - static(first, "start")
    if size < 1:
        raise ShapeError("an empty tile", got=(first, last))
    b = tracer().builder
    chosen = dtype_of(dtype)
    line = TileValue(b.iota(size, chosen))
    return elementwise("add", line, first) if first else line


# ---- shape ------------------------------------------------------------------------------------


def broadcast(x: Any, shape: Any) -> TileValue:
    """x repeated to a shape."""
    return broadcast_tile(tile_of(x), static_shape(shape))


def reshape(x: Any, shape: Any) -> TileValue:
    """The elements in row-major order under another shape."""
    value, sizes = tile_of(x), static_shape(shape)
    node = do(ops.reshape, value.node, shape=sizes)
    return TileValue(node, *_reshaped_edges(value, sizes))


def _reshaped_edges(value: TileValue, sizes: Shape) -> tuple[Edges, tuple[bool, ...]]:
    """Edges stay on their axes where a reshape only adds or drops axes of size 1."""
    if not any(value.edges):
        return (None,) * len(sizes), ()
    live = [(s, e, z) for s, e, z in zip(value.shape, value.edges, value.zero) if s != 1]
    if [s for s, _, _ in live] != [s for s in sizes if s != 1] or any(
        e is not None for s, e in zip(value.shape, value.edges) if s == 1
    ):
        raise ShapeError(
            "a partial tile cannot be cut up",
            got=value.shape,
            hint="give it values first: tile.fill(x, 0)",
        )
    rest = iter(live)
    found = [next(rest) if s != 1 else (1, None, False) for s in sizes]
    return tuple(e for _, e, _ in found), tuple(z for _, _, z in found)


def transpose(x: Any, order: Sequence[int] | None = None) -> TileValue:
    """Axes in another order; alone, the last two swapped."""
    value = tile_of(x)
    if order is None:
        if value.ndim < 2:
            raise AxisError("a transpose needs two axes", got=value.shape)
        order = (*range(value.ndim - 2), value.ndim - 1, value.ndim - 2)
    axes = tuple(_axis(value, a) for a in order)
    node = do(ops.transpose, value.node, order=axes)
    edges = tuple(value.edges[a] for a in axes)
    return TileValue(node, edges, tuple(value.zero[a] for a in axes))


def expand(x: Any, key: tuple[Any, ...]) -> TileValue:
    """x[:, None] and the like: new axes of size 1, and parts; a leading integer picks from the
    first axis."""
    value = tile_of(x)
    if key and isinstance(key[0], int) and not isinstance(key[0], bool):
        place = key[0] + value.shape[0] if key[0] < 0 else key[0]
        if not 0 <= place < value.shape[0]:
            raise AxisError("no such element", expected=value.shape, got=key[0])
        node = do(ops.extract, value.node, index=place)
        return expand(TileValue(node, value.edges[1:], value.zero[1:]), key[1:])
    key = spread(key, value.ndim)
    value = _part(value, [k for k in key if k is not None])
    rest = iter(value.shape)
    sizes = tuple([*[1 if k is None else next(rest, 0) for k in key], *rest])
    if 0 in sizes:
        raise AxisError("too many subscripts", expected=value.shape, got=key)
    return reshape(value, sizes) if sizes != value.shape else value


def _part(value: TileValue, key: Sequence[Any]) -> TileValue:
    """The positions of a tile that slices name; their bounds are plain integers."""
    start, shape = [0] * value.ndim, list(value.shape)
    for axis, (k, size) in enumerate(zip(key, value.shape)):
        first, last = (k.start or 0, size if k.stop is None else k.stop) if _slice(k) else (0, 0)
        if not (0 <= first < last <= size):
            raise ShapeError(
                "no part of a tile",
                expected=f"start:stop within 0:{size}, plain integers",
                got=k,
                hint="a part that moves is loaded from where it lies",
            )
        start[axis], shape[axis] = first, last - first
    if tuple(shape) == value.shape:
        return value
    node = do(ops.part, value.node, start=tuple(start), shape=tuple(shape))
    edges = [e and Edge(e.start + at, e.limit) for e, at in zip(value.edges, start)]
    return TileValue(node, tuple(edges), value.zero)


def _slice(k: Any) -> bool:
    """Whether a subscript is a slice of plain integers."""
    plain = (int, type(None))
    return (
        isinstance(k, slice)
        and all(isinstance(v, plain) for v in (k.start, k.stop))
        and (k.step in (None, 1))
    )


def stack(values: Sequence[Any]) -> TileValue:
    """Tiles of one shape along a new first axis; scalars become a column, (n, 1)."""
    nodes = [tile_of(v).node for v in values]
    op = ops.stack_rows if nodes[0].shape else ops.stack
    return TileValue(do(op, *nodes))


def cast(x: Any, dtype: Any) -> TileValue:
    """x converted to a dtype."""
    return cast_tile(tile_of(x), dtype_of(dtype))


def bitcast(x: Any, dtype: Any) -> TileValue:
    """The same bits as another dtype of the same width."""
    value = tile_of(x)
    return TileValue(tracer().builder.bitcast(value.node, dtype_of(dtype)), value.edges)


def words(x: Any) -> TileValue:
    """Neighbours of the last axis, of 8 or 16 bits, that fill an int32, the first the lowest."""
    return TileValue(do(ops.words, tile_of(x).node))


def repeat_bits(x: Any) -> TileValue:
    """The 16 bits of each element in both halves of an int32."""
    value = tile_of(x)
    node = do(ops.repeat_bits, value.node)
    return TileValue(node, value.edges)


# ---- elementwise ------------------------------------------------------------------------------


def where(condition: Any, a: Any, b: Any) -> TileValue:
    """a where the condition holds, else b."""
    test = tile_of(condition, dtypes.bool_ if number(condition) else None)
    a, b = (v if number(v) else tile_of(v) for v in (a, b))
    dtype = common_dtype([a, b])
    values = aligned([test, *[cast_tile(v, dtype) for v in (a, b)]])
    node = do(ops.where, *[v.node for v in values])
    return TileValue(node, join_edges(values))


def word(name: str, text: str) -> Callable[..., Any]:
    """The word that is an elementwise op."""
    op = "absolute" if name == "abs" else name

    def apply(*values: Any) -> Any:
        return operate(op, *values)

    apply.__name__, apply.__doc__ = name, text
    return apply


def sqrt(x: Any) -> Any:
    """The square root; of a number, a number."""
    return math.sqrt(x) if isinstance(x, (int, float)) else operate("square_root", x)


def pair_multiply_add(a: Any, b: Any, c: Any, dtype: Any) -> TileValue:
    """a * b + c of two floats of 16 bits in each int32, each rounded once."""
    return elementwise(f"pair_multiply_add_{dtype_of(dtype).name}", a, b, c)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x); of a number, a number."""
    root = sqrt(x)
    return 1 / root if isinstance(root, float) else operate("reciprocal", root)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x)."""
    return operate("reciprocal", operate("exp", operate("negative", x)) + 1.0)


# ---- edges ------------------------------------------------------------------------------------


def mask_of(shape: Shape, edges: Edges) -> Node | None:
    """Which elements of a tile exist; None if all do."""
    b = tracer().builder
    found: Node | None = None
    for axis, (size, edge) in enumerate(zip(shape, edges)):
        if edge is None:
            continue
        at = b.line(edge.start, size)
        line = b.apply("less", at, edge.limit)
        if low(edge.start) < 0:
            line = b.apply("bit_and", b.apply("less_equal", 0, at), line)
        tail = len(shape) - axis - 1
        if tail:
            line = b.reshape(line, (size, *(1,) * tail))
        found = b.logical_and(found, b.broadcast(line, shape))
    return found


def fill(x: Any, value: Any) -> TileValue:
    """A partial tile with a value where it has no elements: then it is a whole tile."""
    tile = tile_of(x)
    return filled(tile, range(tile.ndim), value)


def filled(x: TileValue, axes: Sequence[int], value: Any) -> TileValue:
    """A value where some axes have no elements; the edges of the others stay."""
    own = tuple(e if i in axes else None for i, e in enumerate(x.edges))
    rest = tuple(None if i in axes else e for i, e in enumerate(x.edges))
    padded = all(z for e, z in zip(own, x.zero) if e is not None)
    if padded and isinstance(value, (int, float)) and value == 0:
        return TileValue(x.node, rest, x.zero)
    return TileValue(masked(x, mask_of(x.shape, own), value).node, rest)


def masked(x: TileValue, mask: Node | None, other: Any) -> TileValue:
    """A tile with another value where a mask does not hold."""
    if other is None or mask is None:
        return x
    rest = cast_tile(other, x.dtype)
    return TileValue(tracer().builder.apply("where", mask, x.node, rest.node), x.edges)


# ---- reductions, scans, products ---------------------------------------------------------------


def _axis(x: TileValue, axis: int) -> int:
    place = axis + x.ndim if axis < 0 else axis
    if not isinstance(axis, int) or not 0 <= place < x.ndim:
        raise AxisError("no such axis", expected=f"an axis of {x.shape}", got=axis)
    return place


def _folded(op: Op, kind: str, x: TileValue, axis: int) -> Node:
    """An axis reduced, or run along, in the dtype that narrow floats are computed in."""
    b = tracer().builder
    return b.cast(do(op, b.cast(x.node, x.dtype.wide), axis=axis, kind=kind), x.dtype)


def _reduce(kind: str, x: Any, axis: int | None, keep: bool = False) -> TileValue:
    value = tile_of(x)
    if axis is None:
        for _ in range(value.ndim):
            value = _reduce(kind, value, value.ndim - 1)
        return value
    place = _axis(value, axis)
    whole = filled(value, [place], identity(kind, value.dtype))
    node = _folded(ops.reduce, kind, whole, place)
    found = TileValue(node, tuple(e for i, e in enumerate(value.edges) if i != place))
    if keep:
        return reshape(found, (*value.shape[:place], 1, *value.shape[place + 1 :]))
    return found


def _reduction(kind: str, text: str) -> Callable[..., TileValue]:
    def apply(x: Any, axis: int | None = None, keep: bool = False) -> TileValue:
        return _reduce(kind, x, axis, keep)

    apply.__name__, apply.__doc__ = kind, text
    return apply


sum_ = _reduction("sum", "The sum along an axis (of all elements if none is named).")
prod = _reduction("prod", "The product along an axis.")
max_ = _reduction("max", "The largest along an axis.")
min_ = _reduction("min", "The smallest along an axis.")


def _scan(kind: str, text: str) -> Callable[..., TileValue]:
    def apply(x: Any, axis: int = -1) -> TileValue:
        value = tile_of(x)
        return TileValue(_folded(ops.cumulative, kind, value, _axis(value, axis)), value.edges)

    apply.__name__, apply.__doc__ = f"cumulative_{kind}", text
    return apply


cumsum = _scan("sum", "The running sum along an axis.")
cumprod = _scan("prod", "The running product along an axis.")
cummax = _scan("max", "The running maximum along an axis.")
cummin = _scan("min", "The running minimum along an axis.")


def dot(a: Any, b: Any, c: Any = None, dtype: Any = None) -> TileValue:
    """a @ b (+ c) of tiles (m, k) and (k, n); sums are kept in float32 (int32 for integers)."""
    left, right = tile_of(a), tile_of(b)
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise ShapeError(
            "the tiles do not multiply",
            expected="(m, k) and (k, n)",
            got=f"{left.shape} and {right.shape}",
            hint="tile.transpose(b) swaps the axes of a tile",
        )
    common = promote(left.dtype, right.dtype)
    chosen = dtype_of(dtype) if dtype is not None else accumulator(common)
    shape = (left.shape[0], right.shape[1])
    start = zeros(shape, chosen) if c is None else tile_of(c, chosen)
    if start.shape != shape:
        if not (number(c) or broadcast_shape([start.shape, shape]) == shape):
            raise ShapeError("the accumulator has another shape", expected=shape, got=start.shape)
        start = broadcast_tile(start, shape)
    edges = left.edges[0], right.edges[1]
    left, right = filled(left, [1], 0), filled(right, [0], 0)
    node = do(ops.dot, left.node, right.node, start.node)
    return TileValue(node, join_edges([start, TileValue(node, edges)]))


def softmax_online(scores: Any) -> tuple[TileValue, TileValue, TileValue]:
    """(p, m, l) of a block of scores: m the largest of each row, p = exp(scores - m), l its sum.

    Columns without elements, and rows of only -inf, give p = 0 and l = 0.
    """
    value = tile_of(scores)
    if value.ndim != 2 or not value.dtype.is_float:
        raise ShapeError(
            "scores are not a tile of rows and columns",
            expected="a float tile (rows, columns)",
            got=repr(value),
        )
    value = cast_tile(filled(value, [1], -INF), dtypes.float32)
    largest = max_(value, 1)
    p = operate("exp", value - _finite(largest)[:, None])
    edges = (p.edges[0], tile_of(scores).edges[1])
    return TileValue(p.node, edges, (False, True)), largest, sum_(p, 1)


def _finite(x: TileValue) -> TileValue:
    """-inf replaced by 0, so that differences are never nan."""
    return where(x == -INF, 0.0, x)


def softmax_accumulate(
    acc: Any,
    m: Any,
    l: Any,  # noqa: E741
    p: Any,
    values: Any,
    m_curr: Any,
    l_curr: Any,
) -> tuple[TileValue, TileValue, TileValue]:
    """(acc, m, l) after one more block: what was summed under an older maximum is scaled."""
    largest = operate("maximum", m, m_curr)
    base = _finite(largest)
    old, new = operate("exp", m - base), operate("exp", m_curr - base)
    block, weights = tile_of(values), tile_of(p)
    scaled = weights * new[:, None]
    scaled = TileValue(scaled.node, scaled.edges, weights.zero)
    total = dot(cast_tile(scaled, block.dtype), block, acc * old[:, None])
    return total, largest, l * old + l_curr * new


ABOVE.update(transpose=transpose, expand=expand, dot=dot)
