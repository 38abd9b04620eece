"""Tile IR, portable level: how a kernel computes, with tiles as values.

A Body is one launch: a Block over Memory parameters and Symbols, run once per program of a
grid. Tiles have static shapes; () is a scalar. Elementwise ops take equal shapes (`broadcast`
makes them so). Memory is touched only by load, store, gather and scatter, which are effects
and keep their order. The placed level (`placed.py`) adds roles, barriers and async copies to
the same language. Invariant: an index stays within the Memory's shape unless a mask says so.
"""

from __future__ import annotations

from ..core.dtype import DType, bool_, int32, int64
from ..core.errors import InternalError
from ..ir.block import Block
from ..ir.node import Dialect, Node, Op
from ..ir.types import NOTHING, Memory, Tile, Tuple, Type

tile = Dialect("tile")


def _fail(op: str, message: str) -> InternalError:
    return InternalError(f"tile.{op}", message)


def _tile(node: Node) -> Tile:
    if not isinstance(node.type, Tile):
        raise InternalError("tile", f"{node!r} is not a tile")
    return node.type


# ---- scalars and leaves ---------------------------------------------------------------------

INDEX = Tile((), int64)
program = Op(
    tile,
    "program",
    lambda *, axis: INDEX,
    attrs=("axis",),
    meaning="number of this program along a grid axis",
)
symbol = Op(
    tile, "symbol", lambda *, value: INDEX, attrs=("value",), meaning="run-time value of a Symbol"
)
constant = Op(
    tile,
    "constant",
    lambda *, value, dtype, shape: Tile(shape, dtype),
    attrs=("value", "dtype", "shape"),
    meaning="one value everywhere",
)
iota = Op(
    tile,
    "iota",
    lambda *, size, dtype: Tile((size,), dtype),
    attrs=("size", "dtype"),
    meaning="0 .. size-1",
)

# ---- elementwise ----------------------------------------------------------------------------

UNARY = (
    "negative",
    "absolute",
    "square_root",
    "reciprocal",
    "exp",
    "exp2",
    "log",
    "log2",
    "log10",
    "expm1",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "erf",
    "erfc",
    "erf_inverse",
    "floor",
    "ceil",
    "round",
    "trunc",
    "bit_not",
    "sign",
    "quick_exp",
    "quick_exp2",
    "quick_reciprocal",
)
BINARY = (
    "add",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "remainder",
    "fmod",
    "power",
    "maximum",
    "minimum",
    "bit_and",
    "bit_or",
    "bit_xor",
    "shift_left",
    "shift_right",
    "multiply_high",
    "unsigned_divide",
    "unsigned_remainder",
    "quick_divide",
)
# The quick ones may be off by 2**-18 of the value, and flush what is below the least normal number:
# for values that are rounded to 16 bits, or weighed by their own size.
COMPARE = ("equal", "not_equal", "less", "less_equal")
COMMUTATIVE = {
    "add",
    "multiply",
    "maximum",
    "minimum",
    "bit_and",
    "bit_or",
    "bit_xor",
    "equal",
    "not_equal",
}


def _same(op: str, *inputs: Node) -> Tile:
    first = _tile(inputs[0])
    for other in inputs[1:]:
        if other.type != first:
            raise _fail(op, f"operands differ: {first} and {other.type}")
    return first


def _make_binary(name: str) -> Op:
    def infer(a: Node, b: Node) -> Type:
        return _same(name, a, b)

    return Op(tile, name, infer, group="binary", commutative=name in COMMUTATIVE)


def _make_compare(name: str) -> Op:
    def infer(a: Node, b: Node) -> Type:
        return Tile(_same(name, a, b).shape, bool_)

    return Op(tile, name, infer, group="compare", commutative=name in COMMUTATIVE)


ELEMENTWISE: dict[str, Op] = {}
for _name in UNARY:
    ELEMENTWISE[_name] = Op(tile, _name, lambda x: _tile(x), group="unary")
for _name in BINARY:
    ELEMENTWISE[_name] = _make_binary(_name)
for _name in COMPARE:
    ELEMENTWISE[_name] = _make_compare(_name)


def _where(condition: Node, a: Node, b: Node) -> Type:
    result = _same("where", a, b)
    if condition.type != Tile(result.shape, bool_):
        raise _fail("where", f"condition is {condition.type}, values are {result}")
    return result


where = ELEMENTWISE["where"] = Op(tile, "where", _where, group="ternary")
multiply_add = ELEMENTWISE["multiply_add"] = Op(
    tile,
    "multiply_add",
    lambda a, b, c: _same("multiply_add", a, b, c),
    group="ternary",
    meaning="a * b + c, rounded once",
)


def _byte_dot(a: Node, b: Node, c: Node) -> Type:
    result = _same("byte_dot", a, b, c)
    if result.dtype is not int32:
        raise _fail("byte_dot", f"bytes of {result}, not of int32")
    return result


byte_dot = ELEMENTWISE["byte_dot"] = Op(
    tile,
    "byte_dot",
    _byte_dot,
    group="ternary",
    meaning="c + the sum of the products of a's four bytes, unsigned, by b's, signed; "
    "int32 alone, and it wraps",
)


def _byte_permute(a: Node, b: Node, chosen: Node) -> Type:
    result = _same("byte_permute", a, b, chosen)
    if result.dtype is not int32:
        raise _fail("byte_permute", f"bytes of {result}, not of int32")
    return result


byte_permute = ELEMENTWISE["byte_permute"] = Op(
    tile,
    "byte_permute",
    _byte_permute,
    group="ternary",
    meaning="byte i is the one of a (0..3) and b (4..7) that the low three bits of the third's "
    "hexadecimal digit i name; int32 alone",
)
cast = Op(
    tile, "cast", lambda x, *, dtype: Tile(_tile(x).shape, dtype), attrs=("dtype",), group="unary"
)
bitcast = Op(
    tile,
    "bitcast",
    lambda x, *, dtype: Tile(_tile(x).shape, dtype),
    attrs=("dtype",),
    group="unary",
)

# ---- shape ----------------------------------------------------------------------------------


def _broadcast(x: Node, *, shape: tuple[int, ...]) -> Type:
    own = _tile(x).shape
    pad = (1,) * (len(shape) - len(own)) + own
    if any(a != b and a != 1 for a, b in zip(pad, shape)):
        raise _fail("broadcast", f"{own} does not broadcast to {shape}")
    return Tile(shape, x.dtype)


broadcast = Op(
    tile,
    "broadcast",
    _broadcast,
    attrs=("shape",),
    group="shape",
    meaning="repeated to the shape, axes counted from the right",
)
reshape = Op(
    tile,
    "reshape",
    lambda x, *, shape: Tile(shape, x.dtype),
    attrs=("shape",),
    group="shape",
    meaning="row-major order kept",
)
transpose = Op(
    tile,
    "transpose",
    lambda x, *, order: Tile(tuple(_tile(x).shape[a] for a in order), x.dtype),
    attrs=("order",),
    group="shape",
    meaning="axes in another order",
)


stack = Op(
    tile,
    "stack",
    lambda *xs: Tile((len(xs), 1), xs[0].dtype),
    group="shape",
    meaning="scalars as a column: shape (n, 1)",
)
stack_rows = Op(
    tile,
    "stack_rows",
    lambda *xs: Tile((len(xs),) + xs[0].shape, xs[0].dtype),
    group="shape",
    meaning="tiles of one shape along a new first axis",
)
extract = Op(
    tile,
    "extract",
    lambda x, *, index: Tile(_tile(x).shape[1:], x.dtype),
    attrs=("index",),
    group="shape",
    meaning="one index of the first axis",
)


part = Op(
    tile,
    "part",
    lambda x, *, start, shape: Tile(shape, x.dtype),
    attrs=("start", "shape"),
    group="shape",
    meaning="a rectangle of the tile, from the index `start` on",
)


def _reduce(x: Node, *, axis: int, kind: str) -> Type:
    shape = _tile(x).shape
    return Tile(shape[:axis] + shape[axis + 1 :], x.dtype)


reduce = Op(
    tile,
    "reduce",
    _reduce,
    attrs=("axis", "kind"),
    group="reduce",
    meaning="sum, prod, max or min along one axis of the tile",
)
cumulative = Op(
    tile,
    "cumulative",
    lambda x, *, axis, kind: _tile(x),
    attrs=("axis", "kind"),
    group="reduce",
    meaning="running sum, prod, max or min along one axis",
)


def _dot(a: Node, b: Node, c: Node) -> Type:
    (m, k), (k2, n) = _tile(a).shape, _tile(b).shape
    if k != k2 or _tile(c).shape != (m, n):
        raise _fail("dot", f"{a.type} @ {b.type} + {c.type}")
    return _tile(c)


dot = Op(tile, "dot", _dot, group="dot", meaning="a @ b + c in c's dtype")

# ---- memory ---------------------------------------------------------------------------------


def _memory(node: Node) -> Memory:
    if not isinstance(node.type, Memory):
        raise InternalError("tile", f"{node!r} is not a Memory")
    return node.type


def _load(
    memory: Node, *inputs: Node, shape: tuple[int, ...], axes: tuple[int, ...], masked: bool
) -> Type:
    rank = len(_memory(memory).shape)
    if len(inputs) != rank + int(masked) or len(axes) != len(shape):
        raise _fail("load", f"{len(inputs)} indices for rank {rank}, axes {axes}, shape {shape}")
    if masked and inputs[-1].type not in (Tile(shape, bool_), Tile((), bool_)):
        raise _fail("load", f"mask is {inputs[-1].type}, tile is {shape}")
    return Tile(shape, memory.dtype)


load = Op(
    tile,
    "load",
    _load,
    attrs=("shape", "axes", "masked"),
    effect=True,
    group="memory",
    meaning="a tile at the index (one scalar per Memory axis): tile axis i walks Memory "
    "axis axes[i]; where a last mask input is false the value is 0 and nothing is "
    "read",
)


def _store(memory: Node, value: Node, *inputs: Node, axes: tuple[int, ...], masked: bool) -> Type:
    rank = len(_memory(memory).shape)
    if len(inputs) != rank + int(masked) or value.dtype is not memory.dtype:
        raise _fail("store", f"{len(inputs)} indices, rank {rank}, {value.type} to {memory.type}")
    return NOTHING


store = Op(
    tile,
    "store",
    _store,
    attrs=("axes", "masked"),
    effect=True,
    group="memory",
    meaning="write a tile at the index, as load reads it",
)


def _gather(memory: Node, offset: Node, *mask: Node) -> Type:
    return Tile(_tile(offset).shape, memory.dtype)


gather = Op(
    tile,
    "gather",
    _gather,
    effect=True,
    group="memory",
    meaning="elements at linear offsets (in elements); masked off ones are 0",
)
scatter = Op(
    tile,
    "scatter",
    lambda memory, value, offset, *mask, mode: NOTHING,
    attrs=("mode",),
    effect=True,
    group="memory",
    meaning="write, or combine ('add', 'multiply', 'max', 'min'), elements at linear "
    "offsets; equal offsets within a tile are taken in order",
)


prefetch = Op(
    tile,
    "prefetch",
    lambda memory, *index, to: NOTHING,
    attrs=("to",),
    effect=True,
    group="memory",
    meaning="bring the line at an index into a cache, 'l1' or 'l2'; it may lie past the end",
)


def _allocate(*, shape: tuple[int, ...], dtype: DType, scope: str, layout: str) -> Type:
    return Memory(shape, dtype, scope, "state", None, layout)


allocate = Op(
    tile,
    "allocate",
    _allocate,
    attrs=("shape", "dtype", "scope", "layout"),
    effect=True,
    group="memory",
    meaning="a place in a Scope, private to the program, not initialised",
)
sort_rows = Op(
    tile,
    "sort",
    lambda keys, places, other_keys, other_places, count, *, size, descending: NOTHING,
    attrs=("size", "descending"),
    effect=True,
    group="memory",
    meaning="stable sort of the first `count` keys of a Memory, in place, moving "
    "`places` along; nan is largest; two Memories of the same sizes are "
    "scratch",
)

# ---- conditions -----------------------------------------------------------------------------


def _require(condition: Node, *, message: str, location: str) -> Type:
    if _tile(condition).dtype is not bool_:
        raise _fail("require", f"the condition is {condition.type}")
    return NOTHING


require = Op(
    tile,
    "require",
    _require,
    attrs=("message", "location"),
    effect=True,
    group="check",
    meaning="every element of a bool tile holds, else the run ends in an index error "
    "with this message at 'file:line'; the program goes on, so an access guards itself "
    "by its mask or a clamped index",
)

# ---- control --------------------------------------------------------------------------------


def _loop(*inputs: Node, step: int, unroll: int, blocks: tuple[Block, ...]) -> Type:
    carried = tuple(i.type for i in inputs[2:])
    if tuple(r.type for r in blocks[0].results) != carried:
        raise _fail("loop", f"carries {carried}, body gives {[r.type for r in blocks[0].results]}")
    return Tuple(carried)


loop = Op(
    tile,
    "loop",
    _loop,
    attrs=("step", "unroll"),
    effect=True,
    group="control",
    meaning="inputs: lower, upper, carried...; Block(index, carried...) -> carried; runs "
    "for index = lower, lower+step, ... < upper",
)
branch = Op(
    tile,
    "branch",
    lambda condition, *, blocks: Tuple(tuple(r.type for r in blocks[0].results)),
    effect=True,
    group="control",
    meaning="two Blocks() -> results; the first runs where the scalar holds",
)


def _get(x: Node, *, index: int) -> Type:
    return x.type.items[index]  # type: ignore[union-attr]


get = Op(tile, "get", _get, attrs=("index",), group="tuple")


def _hole(*inputs: Node, name: str, type: Type) -> Type:
    return type


hole = Op(
    tile,
    "hole",
    _hole,
    attrs=("name", "type"),
    effect=True,
    group="hole",
    meaning="a named place that fusion fills: epilogue(acc, rows, columns)",
)


# ---- matrix units ---------------------------------------------------------------------------
# A tile in a matrix unit's own Scope (AMX) is a value like any other; `unit` names an entry of
# target.matrices.


def _matrix_load(memory: Node, *index: Node, shape: tuple[int, ...], unit: str) -> Type:
    return Tile(shape, memory.dtype)


matrix_zero = Op(
    tile,
    "matrix_zero",
    lambda *, shape, dtype, unit: Tile(shape, dtype),
    attrs=("shape", "dtype", "unit"),
    group="matrix",
)
matrix_load = Op(
    tile,
    "matrix_load",
    _matrix_load,
    attrs=("shape", "unit"),
    effect=True,
    group="matrix",
    meaning="load a 2-D tile into the unit's Scope",
)
matrix_dot = Op(
    tile,
    "matrix_dot",
    lambda acc, a, b, *, unit: _tile(acc),
    attrs=("unit",),
    group="matrix",
    meaning="acc + a @ b; b holds groups of k packed along its rows, as elements or "
    "as words of 32 bits",
)
matrix_store = Op(
    tile,
    "matrix_store",
    lambda memory, value, *index, unit: NOTHING,
    attrs=("unit",),
    effect=True,
    group="matrix",
)
