"""Emit tiles as LLVM vectors: how a tile is held, and ops that change its shape or reduce it.

A tile of shape (..., lanes) is a list of LLVM vectors, one per leading index; a last axis that
is no power of two is cut into pieces, since LLVM scalarises vectors of odd widths. Invariant:
the vectors of a tile stand in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from ...core.dtype import DType
from ...ir.node import Node
from ...ir.symbol import Expr, Size, fold, low
from ...ir.types import Shape
from ...tile.build import Body
from ...tile.numeric import COMBINE, identity
from .rules import Vectors, Writer, literal, mangle, scalar_type, type_of, vector

Values = list[str]


def lanes_of(tile: Node) -> int:
    """Lanes of one vector of a Tile: the last axis, or its largest power-of-two factor."""
    return split_shape(tile.shape)[-1]


def pieces_of(tile: Node) -> int:
    """Vectors along the last axis (LLVM scalarises vectors of odd widths)."""
    return split_shape(tile.shape)[-2]


def count_of(tile: Node) -> int:
    """Vectors of a Tile."""
    return math.prod(split_shape(tile.shape)[:-1])


def split_shape(shape: Shape) -> Shape:
    """The shape with its last axis split into (pieces, lanes)."""
    if not shape:
        return (1, 1)
    lanes = shape[-1] & -shape[-1]
    return (*shape[:-1], shape[-1] // lanes, lanes)


def in_matrix_unit(node: Node) -> bool:
    """Whether a value lives in a register of a matrix unit."""
    while node.op.name == "get":
        node = node.inputs[0].blocks[0].results[node.attrs["index"]]
    return node.op.category == "matrix"


class Emission(Writer):
    """One Body being emitted: its text, and what every value is called in it."""

    def __init__(self, body: Body, native: frozenset[str] = frozenset()) -> None:
        super().__init__(native)
        self.body = body
        self.values: dict[Node, Values] = {}
        self.symbols: dict[Expr, str] = {}
        self.programs: list[str] = []  # this program's numbers, by axes of the grid
        self.sites: dict[Node, int] = {}  # numbers of conditions
        self.fault = ""  # where the number of one that fails is left
        self.scratch = 0  # bytes taken so far

    @cached_property
    def bounds(self) -> Any:
        """Bounds of its values."""
        from ...tile.bounds import Bounds  # not needed where nothing has an angle

        return Bounds(self.body)


Emit = Callable[[Emission, Node], Values | None]  # an op: the vectors of its value


def size_text(e: Emission, value: Size) -> str:
    """An Expr over Symbols as an i64."""
    if isinstance(value, int):
        return str(value)
    if value in e.symbols:
        return e.symbols[value]

    def apply(name: str, a: str, b: str) -> str:
        if name in ("min", "max"):
            return e.intrinsic(f"llvm.s{name}.i64", "i64", ("i64", a), ("i64", b))
        if name in ("div", "mod") and low(value.args[1]) < 1:
            none = e.value(f"icmp eq i64 {b}, 0")
            b = e.value(f"select i1 {none}, i64 1, i64 {b}")
        return e.value(f"{OF_SIZES[name]} i64 {a}, {b}")

    return fold(value, str, lambda x: size_text(e, x), apply)


OF_SIZES = {"add": "add", "multiply": "mul", "div": "udiv", "mod": "urem"}


# ---- shape ----------------------------------------------------------------------------


def splat(e: Emission, x: str, element: str, lanes: int) -> str:
    """A scalar in every lane."""
    if lanes == 1:
        return x
    if not x.startswith("%"):
        return f"splat ({element} {x})"
    type_ = vector(element, lanes)
    one = e.value(f"insertelement {type_} poison, {element} {x}, i64 0")
    return e.value(f"shufflevector {type_} {one}, {type_} poison, <{lanes} x i32> zeroinitializer")


def _broadcast(e: Emission, node: Node) -> Values:
    found, element, shape = e.values[node.inputs[0]], scalar_type(node.dtype), node.inputs[0].shape
    own, wanted = split_shape(shape), split_shape(node.shape)
    if own[-2:] == (1, 1):
        found = [splat(e, x, element, wanted[-1]) for x in found]
    numbers = np.arange(len(found)).reshape(own[:-1])
    return [found[i] for i in np.broadcast_to(numbers, wanted[:-1]).flat]


def flattened(e: Emission, node: Node) -> tuple[str, int]:
    """All elements of a tile in one vector, row-major."""
    lanes, element, parts = lanes_of(node), scalar_type(node.dtype), e.values[node]
    if lanes == 1 and len(parts) > 1:
        return packed(e, parts, element), len(parts)
    while len(parts) > 1:
        if len(parts) % 2:
            parts = [*parts, "poison"]
        v, pairs = vector(element, lanes), zip(parts[::2], parts[1::2])
        parts = [e.shuffle(v, a, b, range(2 * lanes)) for a, b in pairs]
        lanes *= 2
    return parts[0], lanes


def packed(e: Emission, parts: Values, element: str) -> str:
    """Scalars into one vector."""
    type_, whole = vector(element, len(parts)), "poison"
    for i, part in enumerate(parts):
        whole = e.value(f"insertelement {type_} {whole}, {element} {part}, i64 {i}")
    return whole


def rearrange(e: Emission, node: Node, order: list[int]) -> Values:
    """The tile whose element i (row-major) is the input's element order[i]."""
    source, width = flattened(e, node.inputs[0])
    element, lanes = scalar_type(node.dtype), lanes_of(node)
    if width == 1:
        return [source]
    v, result = vector(element, width), []
    for start in range(0, len(order), lanes):
        part = order[start : start + lanes]
        if lanes == 1:
            result.append(lane_of(e, source, element, width, part[0]))
        else:
            result.append(e.shuffle(v, source, "poison", part))
    return result


def _reshape(e: Emission, node: Node) -> Values:
    return rearrange(e, node, list(range(math.prod(node.shape))))


def _words(e: Emission, node: Node) -> Values:
    source, wide = node.inputs[0], type_of(node.dtype, lanes_of(node))
    bytes_ = type_of(source.dtype, lanes_of(source))
    return [e.value(f"bitcast {bytes_} {x} to {wide}") for x in e.values[source]]


def _transpose(e: Emission, node: Node) -> Values:
    source, order = node.inputs[0].shape, node.attrs["order"]
    if order == (1, 0) and source[0] == source[1] and source[0] & (source[0] - 1) == 0:
        return turned(e, e.values[node.inputs[0]], scalar_type(node.dtype))
    if order == (1, 0, 2) and source[0] == source[1] and source[2] * node.dtype.bits == 32:
        return transpose_groups(e, node)
    numbers = np.arange(math.prod(source)).reshape(source)
    return rearrange(e, node, numbers.transpose(order).ravel().tolist())


def transpose_groups(e: Emission, node: Node) -> Values:
    """Transpose a square of 32-bit groups of narrower elements."""
    source, size = node.inputs[0], node.shape[0]
    wide = vector("i32", size)
    count = 32 // node.dtype.bits
    narrow = type_of(node.dtype, size * count)
    flat, width = flattened(e, source)
    v = type_of(node.dtype, width)
    rows = []
    for start in range(0, width, size * count):
        row = e.shuffle(v, flat, "poison", range(start, start + size * count))
        rows.append(e.value(f"bitcast {narrow} {row} to {wide}"))
    columns = [e.value(f"bitcast {wide} {r} to {narrow}") for r in turned(e, rows, "i32")]
    lanes, result = node.shape[-1], []
    for row in columns:
        for start in range(0, size * count, lanes):
            result.append(e.shuffle(narrow, row, "poison", range(start, start + lanes)))
    return result


def turned(e: Emission, rows: Values, element: str) -> Values:
    """Transpose a square by swapping off-diagonal blocks of 1, 2, 4, ... lanes."""
    rows, size, block = list(rows), len(rows), 1
    v = vector(element, size)
    while block < size:
        first = [size + n - block if n & block else n for n in range(size)]
        second = [size + n if n & block else n + block for n in range(size)]
        for i in range(size):
            if i & block:
                continue
            a, b = rows[i], rows[i | block]
            rows[i], rows[i | block] = (e.shuffle(v, a, b, mask) for mask in (first, second))
        block *= 2
    return rows


def _stack(e: Emission, node: Node) -> Values:
    return [x for i in node.inputs for x in e.values[i]]


def _stack_rows(e: Emission, node: Node) -> Values:
    found = _stack(e, node)
    return found if node.inputs[0].shape else in_lanes(e, node, found)


def in_lanes(e: Emission, node: Node, scalars: Values) -> Values:
    """Scalars as the lanes of a tile's vectors."""
    lanes, element = lanes_of(node), scalar_type(node.dtype)
    if lanes == 1:
        return scalars
    return [packed(e, scalars[i : i + lanes], element) for i in range(0, len(scalars), lanes)]


def _extract(e: Emission, node: Node) -> Values:
    count, index = count_of(node), node.attrs["index"]
    found = e.values[node.inputs[0]]
    if not node.shape:  # a lane of a vector
        return [element_of(e, found, index, node.inputs[0])]
    return found[index * count : (index + 1) * count]


def _reduce(e: Emission, node: Node) -> Values:
    source = node.inputs[0]
    axis, kind, dtype = node.attrs["axis"], node.attrs["kind"], node.dtype
    found = e.values[source]
    if axis == 1 and source.shape == (lanes_of(source),) * 2 and len(found) > 2:
        return [folded(e, found, kind, dtype)]
    if axis == len(source.shape) - 1:
        pieces, lanes = pieces_of(source), lanes_of(source)
        lines = [found[i : i + pieces] for i in range(0, len(found), pieces)]
        found = [in_turn(e, kind, dtype, lanes, line) for line in lines]
        return in_lanes(e, node, [across(e, x, kind, dtype, lanes) for x in found])
    lead, size = math.prod(source.shape[:axis]), source.shape[axis]
    rest = math.prod(source.shape[axis + 1 : -1]) * pieces_of(source)
    lanes = lanes_of(source)
    return [
        in_turn(e, kind, dtype, lanes, found[i * size * rest + j : (i + 1) * size * rest : rest])
        for i in range(lead)
        for j in range(rest)
    ]


def in_turn(e: Emission, kind: str, dtype: DType, lanes: int, parts: Values) -> str:
    """Vectors combined one after the other."""
    vectors, (total, *rest) = Vectors(e, lanes), parts
    for part in rest:
        total = vectors.apply(COMBINE[kind], dtype, total, part)
    return total


def folded(e: Emission, rows: Values, kind: str, dtype: DType) -> str:
    """Reduce the rows of a square, all at once: lane i has row i, halves folded in turn."""
    rows, size, block = list(rows), len(rows), 1
    vectors, v = Vectors(e, size), type_of(dtype, size)
    while block < size:
        own = [size + n if n & block else n for n in range(size)]
        far = [(size if n & block else 0) + (n ^ block) for n in range(size)]
        folded = []
        for a, b in zip(rows[::2], rows[1::2]):
            parts = [e.shuffle(v, a, b, mask) for mask in (own, far)]
            folded.append(vectors.apply(COMBINE[kind], dtype, *parts))
        rows, block = folded, 2 * block
    return rows[0]


def lane_of(e: Emission, x: str | None, element: str, lanes: int, lane: int) -> Any:
    """One lane of a vector."""
    if x is None or lanes == 1:
        return x
    return e.value(f"extractelement {vector(element, lanes)} {x}, i64 {lane}")


def _cumulative(e: Emission, node: Node) -> Values:
    """Running reduction: by vectors along a leading axis, lane by lane along the last."""
    shape, kind, dtype = node.shape, node.attrs["kind"], node.dtype
    axis, found = node.attrs["axis"], list(e.values[node.inputs[0]])
    lanes, pieces, element = lanes_of(node), pieces_of(node), scalar_type(dtype)
    if axis < len(shape) - 1:
        stride = math.prod(shape[axis + 1 : -1]) * pieces
        for i in range(len(found)):
            if i // stride % shape[axis]:
                found[i] = in_turn(e, kind, dtype, lanes, [found[i - stride], found[i]])
        return found
    for first in range(0, len(found), pieces):
        line = found[first : first + pieces]
        parts = [lane_of(e, x, element, lanes, n) for x in line for n in range(lanes)]
        for n in range(1, len(parts)):
            parts[n] = in_turn(e, kind, dtype, 1, parts[n - 1 : n + 1])
        found[first : first + pieces] = in_lanes(e, node, parts)
    return found


def across(e: Emission, x: str, kind: str, dtype: DType, lanes: int) -> str:
    """Reduce the lanes of one vector."""
    if lanes == 1:
        return x
    element = scalar_type(dtype)
    v, m = vector(element, lanes), mangle(element, lanes)
    name = REDUCED[dtype.kind][[*COMBINE].index(kind)]
    full = f"llvm.vector.reduce.{name}.{m}"
    if dtype.is_float and kind in ("sum", "prod"):
        start = literal(identity(kind, dtype), dtype)
        e.declared[full] = f"declare {element} @{full}({element}, {v})"
        return e.value(f"call reassoc {element} @{full}({element} {start}, {v} {x})")
    return e.intrinsic(full, element, (v, x))


REDUCED = {  # in the order of COMBINE
    "float": ("fadd", "fmul", "fmaximum", "fminimum"),
    "int": ("add", "mul", "smax", "smin"),
    "uint": ("add", "mul", "umax", "umin"),
    "bool": ("or", "and", "or", "and"),
}


def _dot(e: Emission, node: Node) -> Values:
    """Outer products: a row of accumulators per row of a, by fused multiply-add."""
    a, b, c = node.inputs
    (m, k), dtype = a.shape, node.dtype
    element, n, pieces = scalar_type(dtype), lanes_of(c), pieces_of(c)
    left, right, total = e.values[a], e.values[b], list(e.values[c])
    vectors, one_lane = Vectors(e, n), Vectors(e, 1)
    for p in range(k):
        own = right[p * pieces : (p + 1) * pieces]
        line = [vectors.convert(x, b.dtype, dtype) for x in own]
        for i in range(m):
            one = element_of(e, left, i * k + p, a)
            one = splat(e, one_lane.convert(one, a.dtype, dtype), element, n)
            for q, x in enumerate(line):
                at = i * pieces + q
                total[at] = vectors.apply("multiply_add", dtype, one, x, total[at])
    return total


def element_of(e: Emission, parts: Values, number: int, node: Node) -> str:
    """One element of a tile, by its row-major number."""
    lanes = lanes_of(node)
    part, lane = divmod(number, lanes)
    return str(lane_of(e, parts[part], scalar_type(node.dtype), lanes, lane))
