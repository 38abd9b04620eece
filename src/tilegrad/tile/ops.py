"""Tile IR, portable level: how a kernel computes, with tiles as values.

A Body is one launch: a Block over Memory parameters and Symbols, run once per program of a
grid. Tiles have static shapes; () is a scalar. Elementwise ops take equal shapes (`broadcast`
makes them so). Memory is touched only by load, store, gather and scatter, which are effects
and keep their order. The placed level (`placed.py`) adds roles, barriers and async copies to
the same language. `row` says what a row is. Invariant: an index stays within the Memory's shape
unless a mask says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.dtype import DType, bool_, int32, int64
from ..ir.block import Block
from ..ir.node import Node
from ..ir.types import NOTHING, Memory, Shape, Tile, Tuple, Type
from . import numeric
from .row import Make, Misfit, TileOp, Touch, box, memory_of, read_and_write, row, tile

__all__ = ["tile"]  # and every row


def _tile(node: Node) -> Tile:
    if not isinstance(node.type, Tile):
        raise Misfit(f"{node!r} is not a tile")
    return node.type


# ---- scalars and leaves ---------------------------------------------------------------------

INDEX = Tile((), int64)


@row()
def program(*, axis: int) -> Type:
    """number of this program along a grid axis"""
    return INDEX


@row()
def symbol(*, value: Any) -> Type:
    """run-time value of a Symbol"""
    return INDEX


@row(numpy=lambda n: np.full(n.shape, np.asarray(n.attrs["value"]).astype(n.dtype.numpy)))
def constant(*, value: Any, dtype: DType, shape: Shape) -> Type:
    """one value everywhere"""
    return Tile(shape, dtype)


@row(numpy=lambda n: np.arange(n.attrs["size"]).astype(n.dtype.numpy))
def iota(*, size: int, dtype: DType) -> Type:
    """0 .. size-1"""
    return Tile((size,), dtype)


# ---- elementwise ----------------------------------------------------------------------------
# What each computes stands in `numeric`. The quick ones may be off by 2**-18 of the value, and
# flush what is below the least normal number: for values that are rounded to 16 bits, or weighed
# by their own size.

OPERANDS = {"unary": 1, "binary": 2, "compare": 2, "ternary": 3}


def _same(*inputs: Node) -> Tile:
    first = _tile(inputs[0])
    for other in inputs[1:]:
        if other.type != first:
            raise Misfit(f"operands differ: {first} and {other.type}")
    return first


def _elementwise(name: str, category: str, function: Callable[..., Any]) -> TileOp:
    """The row of an op on elements of equal tiles."""

    def infer(*inputs: Node) -> Type:
        found = _same(*inputs)
        if len(inputs) != OPERANDS[category]:
            raise Misfit(f"{len(inputs)} operands, not {OPERANDS[category]}")
        if expected := numeric.wanted(name, found.dtype):
            raise Misfit("has no meaning", expected, found.dtype)
        return Tile(found.shape, bool_) if category == "compare" else found

    return TileOp(
        name,
        infer,
        category=category,
        meaning=" ".join((function.__doc__ or "").split()),
        numpy=lambda node, *values: numeric.elementwise(name, node.inputs[0].dtype, list(values)),
    )


ELEMENTWISE: dict[str, TileOp] = {
    name: _elementwise(name, category, function)
    for category, table in numeric.CATEGORIES.items()
    for name, function in table.items()
}
multiply_add = ELEMENTWISE["multiply_add"]
COMPARE = tuple(numeric.COMPARE)


@row("ternary", numpy=lambda n, *values: np.where(*values))
def where(condition: Node, a: Node, b: Node) -> Type:
    """a where the condition holds, else b"""
    result = _same(a, b)
    if condition.type != Tile(result.shape, bool_):
        raise Misfit(f"condition is {condition.type}, values are {result}")
    return result


ELEMENTWISE["where"] = where


@row("unary", numpy=lambda n, x: numeric.cast(x, n.inputs[0].dtype, n.dtype))
def cast(x: Node, *, dtype: DType) -> Type:
    """the same number, as near as the dtype has one"""
    return Tile(_tile(x).shape, dtype)


@row("unary", numpy=lambda n, x: numeric.bitcast(x, n.dtype))
def bitcast(x: Node, *, dtype: DType) -> Type:
    """the same bits"""
    if _tile(x).dtype.bits != dtype.bits:
        raise Misfit(f"{x.dtype} and {dtype} differ in width")
    return Tile(x.shape, dtype)


@row("unary", numpy=lambda n, x: numeric.repeat_bits(x))
def repeat_bits(x: Node) -> Type:
    """the 16 bits of an element in both halves of an int32"""
    if _tile(x).dtype.bits != 16:
        raise Misfit(f"{x.type} has no elements of 16 bits")
    return Tile(_tile(x).shape, int32)


# ---- shape ----------------------------------------------------------------------------------


@row("shape", numpy=lambda n, x: np.broadcast_to(x, n.shape))
def broadcast(x: Node, *, shape: Shape) -> Type:
    """repeated to the shape, axes counted from the right"""
    own = _tile(x).shape
    pad = (1,) * (len(shape) - len(own)) + own
    if len(pad) > len(shape) or any(a != b and a != 1 for a, b in zip(pad, shape)):
        raise Misfit(f"{own} does not broadcast to {shape}")
    return Tile(shape, x.dtype)


@row("shape", numpy=lambda n, x: x.reshape(n.shape))
def reshape(x: Node, *, shape: Shape) -> Type:
    """row-major order kept"""
    if math.prod(shape) != math.prod(_tile(x).shape):
        raise Misfit(f"a reshape of {x.shape} to {shape}")
    return Tile(shape, x.dtype)


@row("shape", numpy=lambda n, x: np.ascontiguousarray(x).view(np.int32))
def words(x: Node) -> Type:
    """neighbours of the last axis, of 8 or 16 bits, that fill an int32, the first the lowest"""
    *lead, size = _tile(x).shape
    if _tile(x).dtype.bits not in (8, 16) or size % (each := 32 // _tile(x).dtype.bits):
        raise Misfit(f"{x.type} has no elements that fill words")
    return Tile((*lead, size // each), int32)


@row("shape", numpy=lambda n, x: x.transpose(n.attrs["order"]))
def transpose(x: Node, *, order: Shape) -> Type:
    """axes in another order"""
    if sorted(order) != list(range(len(_tile(x).shape))):
        raise Misfit(f"{order} is not an order of the axes of {x.shape}")
    return Tile(tuple(x.shape[a] for a in order), x.dtype)


@row("shape", numpy=lambda n, *xs: np.stack(xs).reshape(n.shape))
def stack(*xs: Node) -> Type:
    """scalars as a column: shape (n, 1)"""
    return Tile((len(xs), 1), xs[0].dtype)


@row("shape", numpy=lambda n, *xs: np.stack(xs))
def stack_rows(*xs: Node) -> Type:
    """tiles of one shape along a new first axis"""
    return Tile((len(xs),) + xs[0].shape, xs[0].dtype)


@row("shape", numpy=lambda n, x: np.asarray(x[n.attrs["index"]]))
def extract(x: Node, *, index: int) -> Type:
    """one index of the first axis"""
    return Tile(_tile(x).shape[1:], x.dtype)


@row("shape", numpy=lambda n, x: numeric.part(x, n.attrs["start"], n.shape))
def part(x: Node, *, start: Shape, shape: Shape) -> Type:
    """a rectangle of the tile, from the index `start` on"""
    return Tile(shape, x.dtype)


def _along(x: Node, axis: int, kind: str) -> Tile:
    """What is reduced along an axis that it has."""
    if not 0 <= axis < len(_tile(x).shape):
        raise Misfit(f"axis {axis} of {x.shape}")
    if kind not in numeric.COMBINE:
        raise Misfit(f"no reduction is called {kind!r}")
    return _tile(x)


@row("reduce", numpy=lambda n, x: numeric.fold(x, n.dtype, **n.attrs, whole=True))
def reduce(x: Node, *, axis: int, kind: str) -> Type:
    """sum, prod, max or min along one axis of the tile"""
    shape = _along(x, axis, kind).shape
    return Tile(shape[:axis] + shape[axis + 1 :], x.dtype)


@row("reduce", numpy=lambda n, x: numeric.fold(x, n.dtype, **n.attrs, whole=False))
def cumulative(x: Node, *, axis: int, kind: str) -> Type:
    """running sum, prod, max or min along one axis"""
    return _along(x, axis, kind)


@row("dot", numpy=lambda n, a, b, c: numeric.dot(a, b, c, n.dtype))
def dot(a: Node, b: Node, c: Node) -> Type:
    """a @ b + c in c's dtype"""
    (m, k), (k2, n) = _tile(a).shape, _tile(b).shape
    if k != k2 or _tile(c).shape != (m, n):
        raise Misfit(f"{a.type} @ {b.type} + {c.type}")
    return _tile(c)


# ---- memory ---------------------------------------------------------------------------------


def _boxed(node: Node) -> tuple[Touch]:
    """The box of a load or a store; that of a matrix unit lies along the last two axes."""
    writes, rank = node.op in (store, matrix_store), len(node.inputs[0].shape)
    first, attrs = 2 if writes else 1, node.attrs
    shape = node.inputs[1].shape if writes else attrs["shape"]
    mask = node.inputs[-1] if attrs.get("masked") else None
    index, axes = node.inputs[first : first + rank], attrs.get("axes", (rank - 2, rank - 1))
    return (box(node.inputs[0], writes, index, shape, axes, mask=mask),)


@row("memory", effects=_boxed)
def load(memory: Node, *inputs: Node, shape: Shape, axes: Shape, masked: bool) -> Type:
    """a tile at the index (one scalar per Memory axis): tile axis i lies along Memory axis axes[i];
    where a last mask input is false the value is 0 and nothing is read"""
    rank = len(memory_of(memory).shape)
    if len(inputs) != rank + int(masked) or len(axes) != len(shape):
        raise Misfit(f"{len(inputs)} indices for rank {rank}, axes {axes}, shape {shape}")
    if masked and inputs[-1].type not in (Tile(shape, bool_), Tile((), bool_)):
        raise Misfit(f"mask is {inputs[-1].type}, tile is {shape}")
    return Tile(shape, memory.dtype)


@row("memory", effects=_boxed)
def store(memory: Node, value: Node, *inputs: Node, axes: Shape, masked: bool) -> Type:
    """write a tile at the index, as load reads it"""
    rank = len(memory_of(memory).shape)
    if len(inputs) != rank + int(masked) or value.dtype is not memory.dtype:
        raise Misfit(f"{len(inputs)} indices, rank {rank}, {value.type} to {memory.type}")
    return NOTHING


def at_offsets(node: Node, first: int, writes: bool) -> Touch:
    """Elements at the offsets that stand at an input, and at its mask if one follows."""
    mask = node.inputs[first + 1] if len(node.inputs) > first + 1 else None
    return Touch(node.inputs[0], writes, mask=mask, offsets=node.inputs[first], some=True)


@row("memory", effects=lambda n: (at_offsets(n, 1, False),))
def gather(memory: Node, offset: Node, *mask: Node) -> Type:
    """elements at linear offsets (in elements); masked off ones are 0"""
    return Tile(_tile(offset).shape, memory.dtype)


@row("memory", effects=lambda n: (at_offsets(n, 2, True),))
def scatter(memory: Node, value: Node, offset: Node, *mask: Node) -> Type:
    """write elements at linear offsets; equal offsets within a tile are taken in order"""
    return NOTHING


@row("memory", effect=True)
def prefetch(memory: Node, *index: Node, to: str) -> Type:
    """bring the line at an index into a cache, 'l1' or 'l2'; it may lie past the end"""
    return NOTHING


@row("memory", effects=Make())
def allocate(*, shape: Shape, dtype: DType, scope: str, layout: str) -> Type:
    """a place in a Scope, private to the program, not initialised"""
    return Memory(shape, dtype, scope, "state", None, layout)


@row(
    "memory",
    name="sort",
    effects=lambda n: tuple(
        touch for i in n.inputs[:2] for touch in read_and_write(Touch(i, True, some=True))
    ),
)
def sort_rows(
    keys: Node,
    numbers: Node,
    other_keys: Node,
    other_numbers: Node,
    count: Node,
    *,
    size: int,
    descending: bool,
) -> Type:
    """stable sort of the first `count` keys of a Memory, in place, moving `numbers` along; nan is
    largest; two Memories of the same sizes are scratch"""
    return NOTHING


# ---- conditions -----------------------------------------------------------------------------


@row("check", effect=True)
def require(condition: Node, *, message: str, location: str) -> Type:
    """every element of a bool tile holds, else the run ends in an index error with this message
    at 'file:line'; the program goes on, so an access guards itself by its mask or a clamped
    index"""
    if _tile(condition).dtype is not bool_:
        raise Misfit(f"the condition is {condition.type}")
    return NOTHING


# ---- control --------------------------------------------------------------------------------


@row("control", effect=True)
def loop(*inputs: Node, step: int, unroll: int, blocks: tuple[Block, ...]) -> Type:
    """inputs: lower, upper, carried...; Block(index, carried...) -> carried; runs for index =
    lower, lower+step, ... < upper"""
    carried = tuple(i.type for i in inputs[2:])
    if tuple(r.type for r in blocks[0].results) != carried:
        raise Misfit(f"carries {carried}, body gives {[r.type for r in blocks[0].results]}")
    return Tuple(carried)


@row("control", effect=True)
def branch(condition: Node, *, blocks: tuple[Block, ...]) -> Type:
    """two Blocks() -> results; the first runs where the scalar holds"""
    return Tuple(tuple(r.type for r in blocks[0].results))


@row("tuple", numpy=lambda n, values: values[n.attrs["index"]])
def get(x: Node, *, index: int) -> Type:
    """one result of a loop or a branch"""
    return x.type.items[index]  # type: ignore[union-attr]


@row("hole", effect=True)
def hole(*inputs: Node, name: str, type: Type) -> Type:
    """a named place that fusion fills: epilogue(acc, rows, columns)"""
    return type


# ---- matrix units ---------------------------------------------------------------------------
# A tile in a matrix unit's own Scope (AMX) is a value like any other; `unit` names an entry of
# target.matrices.


@row("matrix", numpy=lambda n: np.zeros(n.shape, n.dtype.numpy))
def matrix_zero(*, shape: Shape, dtype: DType, unit: str) -> Type:
    """a tile of zeros in the unit's Scope"""
    return Tile(shape, dtype)


@row("matrix", effects=_boxed)
def matrix_load(memory: Node, *index: Node, shape: Shape, unit: str) -> Type:
    """load a 2-D tile, along the last two axes of the Memory, into the unit's Scope"""
    return Tile(shape, memory.dtype)


@row("matrix", numpy=lambda n, *values: numeric.matrix_dot(*values))
def matrix_dot(acc: Node, a: Node, b: Node, *, unit: str) -> Type:
    """acc + a @ b; b holds groups of k packed along its rows, as elements or as words of 32
    bits"""
    return _tile(acc)


@row("matrix", effects=_boxed)
def matrix_store(memory: Node, value: Node, *index: Node, unit: str) -> Type:
    """write a tile of the unit's Scope, as matrix_load reads it"""
    return NOTHING
