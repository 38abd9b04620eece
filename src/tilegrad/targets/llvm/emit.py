"""From a Body to LLVM IR text: one function per Body, explicit vectors, structured control.

A tile of shape (..., lanes) is a list of LLVM vectors of `lanes` elements, one per leading
index; a scalar is one value. The function runs grid programs [start, stop):

    void name(ptr args, ptr scalars, i64 start, i64 stop, ptr scratch)

`args` holds one pointer per Memory parameter, `scalars` the values of the Body's Symbols in
sorted order, `scratch` memory private to the worker. Invariant: pure text, no state; the same
Body gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.block import Block
from ...ir.node import Node
from ...ir.symbol import Expr, Size, atoms
from ...ir.types import Memory, Tile
from ...tile.build import Body
from .rules import (
    Writer, convert, literal, mangle, memory_type, row_for, scalar_type, splat_constant, vector,
)  # fmt: skip
from .sort import sort_function

Values = list[str]
COMBINE = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def lanes_of(type_: Tile) -> int:
    """Lanes of one vector of the tile: the last axis, or its largest power-of-two factor."""
    if not type_.shape:
        return 1
    size = type_.shape[-1]
    return size & -size


def pieces_of(type_: Tile) -> int:
    """Vectors along the last axis (LLVM scalarises vectors of odd widths)."""
    return type_.shape[-1] // lanes_of(type_) if type_.shape else 1


def count_of(type_: Tile) -> int:
    """Vectors of the tile."""
    return math.prod(type_.shape[:-1]) * pieces_of(type_) if type_.shape else 1


def split_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last axis split into (pieces, lanes)."""
    if not shape:
        return (1, 1)
    lanes = shape[-1] & -shape[-1]
    return (*shape[:-1], shape[-1] // lanes, lanes)


def body_symbols(body: Body) -> list[Expr]:
    """The Symbols a Body reads at run time, in the order of its scalars."""
    found: dict[Expr, None] = {}

    def walk(block: Block) -> None:
        for node in block.nodes:
            if node.op.name == "symbol":
                found[node.attrs["value"]] = None
            for inner in node.blocks:
                walk(inner)

    for parameter in body.parameters:
        for size in (*parameter.type.shape, *parameter.type.element_strides()):  # type: ignore[union-attr]
            for atom in atoms(size):
                found[atom] = None
    for size in body.grid:
        for atom in atoms(size):
            found[atom] = None
    walk(body.block)
    return sorted(found, key=lambda e: e.name)


def emit(body: Body, name: str | None = None, target: Target | None = None) -> tuple[str, int]:
    """The LLVM IR of a Body and the scratch bytes it needs."""
    native = frozenset() if target is None else target.feature_set
    return Emitter(body, native).run(name or body.name)


class Emitter:
    """Emits one Body."""

    def __init__(self, body: Body, native: frozenset[str] = frozenset()) -> None:
        self.body = body
        self.w = Writer(native)
        self.values: dict[Node, Values] = {}
        self.symbols: dict[Expr, str] = {}
        self.scratch = 0
        self.matrix_shapes: dict[str, tuple[int, int]] = {}

    # ---- frame ----------------------------------------------------------------------------

    def run(self, name: str) -> tuple[str, int]:
        """Emit the function."""
        w = self.w
        w.start("entry")
        for i, parameter in enumerate(self.body.parameters):
            slot = w.value(f"getelementptr ptr, ptr %args, i64 {i}")
            self.values[parameter] = [w.value(f"load ptr, ptr {slot}")]
        for i, symbol in enumerate(body_symbols(self.body)):
            slot = w.value(f"getelementptr i64, ptr %scalars, i64 {i}")
            self.symbols[symbol] = w.value(f"load i64, ptr {slot}")
        self.program_loop()
        w.line("ret void")
        head = (
            f"define void @{name}(ptr noalias %args, ptr noalias %scalars, i64 %start, i64 %stop, "
            "ptr noalias align 64 %scratch) #0 {"
        )
        declares = "\n".join(sorted(w.declared.values()))
        text = "\n".join([head, *w.lines, "}"])
        return f"{text}\n{declares}\nattributes #0 = {{ nounwind }}\n", self.scratch

    def program_loop(self) -> None:
        """The loop over this worker's programs."""
        w = self.w
        head, inside, done = (w.fresh_label(n) for n in ("programs", "program", "done"))
        before = w.label
        w.line(f"br label %{head}")
        w.start(head)
        number, after = w.name(), w.name()
        slot = len(w.lines)
        w.line("")  # the phi, written when the last label is known
        going = w.value(f"icmp slt i64 {number}, %stop")
        w.line(f"br i1 {going}, label %{inside}, label %{done}")
        w.start(inside)
        self.programs = self.delinearize(number)
        self.block(self.body.block)
        w.line(f"{after} = add nsw i64 {number}, 1")
        w.lines[slot] = f"  {number} = phi i64 [ %start, %{before} ], [ {after}, %{w.label} ]"
        w.line(f"br label %{head}")
        w.start(done)

    def delinearize(self, number: str) -> list[str]:
        """Program numbers per grid axis, the last fastest."""
        grid = self.body.grid
        found: list[str] = []
        for size in reversed(grid[1:]):
            extent = self.size(size)
            found.append(self.w.value(f"urem i64 {number}, {extent}"))
            number = self.w.value(f"udiv i64 {number}, {extent}")
        return [number, *reversed(found)]

    def size(self, value: Size) -> str:
        """An Expr over Symbols as an i64."""
        w = self.w
        if isinstance(value, int):
            return str(value)
        if value in self.symbols:
            return self.symbols[value]
        if value.kind == "sum":
            total = str(value.constant)
            for product, factor in sorted(value.terms, key=repr):  # the same in every process
                term = str(factor)
                for atom in sorted(product, key=repr):
                    term = w.value(f"mul i64 {term}, {self.size(atom)}")
                total = w.value(f"add i64 {total}, {term}")
            return total
        a, b = (self.size(x) for x in value.args)
        if value.kind in ("div", "mod"):
            if not isinstance(value.args[1], int) and value.args[1].low < 1:
                none = w.value(f"icmp eq i64 {b}, 0")
                b = w.value(f"select i1 {none}, i64 1, i64 {b}")
            return w.value(f"{'udiv' if value.kind == 'div' else 'urem'} i64 {a}, {b}")
        test = w.value(f"icmp {'slt' if value.kind == 'min' else 'sgt'} i64 {a}, {b}")
        return w.value(f"select i1 {test}, i64 {a}, i64 {b}")

    # ---- blocks ---------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        """Emit the Nodes of a Block in order."""
        for node in block.nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        """Emit one Node."""
        handler = getattr(self, "emit_" + node.op.name, None)
        if handler is not None:
            handler(node)
        elif node.op.group in ("unary", "binary", "compare", "ternary"):
            self.elementwise(node)
        else:
            raise InternalError("llvm.emit", f"no way to emit {node.op}")

    def elementwise(self, node: Node) -> None:
        """One row of `rules`, for every vector of the tile."""
        inputs = [self.values[i] for i in node.inputs]
        dtype = node.inputs[-1].dtype
        row, lanes = row_for(node.op.name), lanes_of(node.type)  # type: ignore[arg-type]
        self.values[node] = [row(self.w, dtype, lanes, list(parts)) for parts in zip(*inputs)]

    def emit_program(self, node: Node) -> None:
        self.values[node] = [self.programs[node.attrs["axis"]]]

    def emit_symbol(self, node: Node) -> None:
        self.values[node] = [self.symbols[node.attrs["value"]]]

    def emit_constant(self, node: Node) -> None:
        one = splat_constant(node.attrs["value"], node.dtype, lanes_of(node.type))  # type: ignore[arg-type]
        self.values[node] = [one] * count_of(node.type)  # type: ignore[arg-type]

    def emit_iota(self, node: Node) -> None:
        size, dtype = node.attrs["size"], node.dtype
        if size == 1:
            self.values[node] = [literal(0, dtype)]
            return
        lanes, found = lanes_of(node.type), []  # type: ignore[arg-type]
        for start in range(0, size, lanes):
            each = [literal(i, dtype) for i in range(start, start + lanes)]
            items = ", ".join(f"{scalar_type(dtype)} {x}" for x in each)
            found.append(each[0] if lanes == 1 else f"<{items}>")
        self.values[node] = found

    def emit_cast(self, node: Node) -> None:
        source, lanes = node.inputs[0].dtype, lanes_of(node.type)  # type: ignore[arg-type]
        self.values[node] = [
            convert(self.w, source, node.dtype, lanes, x) for x in self.values[node.inputs[0]]
        ]

    def emit_bitcast(self, node: Node) -> None:
        lanes = lanes_of(node.type)  # type: ignore[arg-type]
        a = vector(scalar_type(node.inputs[0].dtype), lanes)
        b = vector(scalar_type(node.dtype), lanes)
        found = self.values[node.inputs[0]]
        self.values[node] = found if a == b else [
            self.w.value(f"bitcast {a} {x} to {b}") for x in found
        ]  # fmt: skip

    # ---- shape ----------------------------------------------------------------------------

    def splat(self, x: str, element: str, lanes: int) -> str:
        """A scalar in every lane."""
        if lanes == 1:
            return x
        if not x.startswith("%"):
            return f"splat ({element} {x})"
        type_ = vector(element, lanes)
        one = self.w.value(f"insertelement {type_} poison, {element} {x}, i64 0")
        return self.w.value(
            f"shufflevector {type_} {one}, {type_} poison, <{lanes} x i32> zeroinitializer"
        )

    def emit_broadcast(self, node: Node) -> None:
        source, target = node.inputs[0].type, node.type
        assert isinstance(source, Tile) and isinstance(target, Tile)
        found, element = self.values[node.inputs[0]], scalar_type(node.dtype)
        own, wanted = split_shape(source.shape), split_shape(target.shape)
        if not source.shape or source.shape[-1] == 1:
            own = (*own[:-2], 1, 1)
            found = [self.splat(x, element, wanted[-1]) for x in found]
        own = (1,) * (len(wanted) - len(own)) + own
        result: Values = []
        for number in range(count_of(target)):
            index = unravel(number, wanted[:-1])
            place = tuple(0 if s == 1 else i for i, s in zip(index, own[:-1]))
            result.append(found[ravel(place, own[:-1])])
        self.values[node] = result

    def flat(self, node: Node) -> tuple[str, int]:
        """All elements of a tile in one vector, row-major."""
        type_ = node.type
        assert isinstance(type_, Tile)
        lanes, element, parts = lanes_of(type_), scalar_type(node.dtype), self.values[node]
        if lanes == 1 and len(parts) > 1:
            return self.pack(parts, element), len(parts)
        while len(parts) > 1:
            if len(parts) % 2:
                parts = [*parts, "poison"]
            mask = ", ".join(f"i32 {i}" for i in range(2 * lanes))
            v = vector(element, lanes)
            parts = [
                self.w.value(f"shufflevector {v} {a}, {v} {b}, <{2 * lanes} x i32> <{mask}>")
                for a, b in zip(parts[::2], parts[1::2])
            ]
            lanes *= 2
        return parts[0], lanes

    def pack(self, parts: Values, element: str) -> str:
        """Scalars into one vector."""
        type_, whole = vector(element, len(parts)), "poison"
        for i, part in enumerate(parts):
            whole = self.w.value(f"insertelement {type_} {whole}, {element} {part}, i64 {i}")
        return whole

    def rearrange(self, node: Node, order: list[int]) -> None:
        """The tile whose element i (row-major) is the input's element order[i]."""
        target = node.type
        assert isinstance(target, Tile)
        source, width = self.flat(node.inputs[0])
        element, lanes = scalar_type(node.dtype), lanes_of(target)
        if width == 1:
            self.values[node] = [source]
            return
        v, result = vector(element, width), []
        for start in range(0, len(order), lanes):
            part = order[start : start + lanes]
            if lanes == 1:
                result.append(self.w.value(f"extractelement {v} {source}, i64 {part[0]}"))
                continue
            mask = ", ".join(f"i32 {i}" for i in part)
            result.append(
                self.w.value(f"shufflevector {v} {source}, {v} poison, <{lanes} x i32> <{mask}>")
            )
        self.values[node] = result

    def emit_reshape(self, node: Node) -> None:
        self.rearrange(node, list(range(math.prod(node.shape))))

    def emit_transpose(self, node: Node) -> None:
        source, order = node.inputs[0].shape, node.attrs["order"]
        if order == (1, 0) and source[0] == source[1] and source[0] & (source[0] - 1) == 0:
            self.values[node] = self.turn(self.values[node.inputs[0]], scalar_type(node.dtype))
            return
        if order == (1, 0, 2) and source[0] == source[1] and source[2] * node.dtype.bits == 32:
            self.turn_groups(node)
            return
        places = []
        for number in range(math.prod(node.shape)):
            index = unravel(number, node.shape)
            own = [0] * len(order)
            for axis, position in zip(order, index):
                own[axis] = position
            places.append(ravel(tuple(own), source))
        self.rearrange(node, places)

    def turn_groups(self, node: Node) -> None:
        """Transpose a square of 32-bit groups of narrower elements."""
        source, size = node.inputs[0], node.shape[0]
        narrow, wide = vector(scalar_type(node.dtype), 2), vector("i32", size)
        count = 32 // node.dtype.bits
        narrow = vector(scalar_type(node.dtype), size * count)
        flat, width = self.flat(source)
        v, element = vector(scalar_type(node.dtype), width), scalar_type(node.dtype)
        rows = []
        for start in range(0, width, size * count):
            mask = ", ".join(f"i32 {i}" for i in range(start, start + size * count))
            row = self.w.value(
                f"shufflevector {v} {flat}, {v} poison, <{size * count} x i32> <{mask}>")
            rows.append(self.w.value(f"bitcast {narrow} {row} to {wide}"))
        turned = [self.w.value(f"bitcast {wide} {r} to {narrow}") for r in self.turn(rows, "i32")]
        lanes, result = node.shape[-1], []
        for row in turned:
            for start in range(0, size * count, lanes):
                mask = ", ".join(f"i32 {i}" for i in range(start, start + lanes))
                result.append(self.w.value(
                    f"shufflevector {narrow} {row}, {narrow} poison, <{lanes} x i32> <{mask}>"))
        assert element
        self.values[node] = result

    def turn(self, rows: Values, element: str) -> Values:
        """Transpose a square by swapping off-diagonal blocks of 1, 2, 4, ... lanes."""
        rows, size, block = list(rows), len(rows), 1
        v = vector(element, size)
        while block < size:
            first = ", ".join(f"i32 {size + n - block if n & block else n}" for n in range(size))
            second = ", ".join(f"i32 {size + n if n & block else n + block}" for n in range(size))
            for i in range(size):
                if i & block:
                    continue
                a, b = rows[i], rows[i | block]
                rows[i], rows[i | block] = (
                    self.w.value(f"shufflevector {v} {a}, {v} {b}, <{size} x i32> <{mask}>")
                    for mask in (first, second)
                )
            block *= 2
        return rows

    def emit_stack(self, node: Node) -> None:
        self.values[node] = [x for i in node.inputs for x in self.values[i]]

    def emit_stack_rows(self, node: Node) -> None:
        found = [x for i in node.inputs for x in self.values[i]]
        lanes = lanes_of(node.type)  # type: ignore[arg-type]
        if not node.inputs[0].shape and lanes > 1:  # scalars become the lanes of vectors
            element = scalar_type(node.dtype)
            found = [self.pack(found[i : i + lanes], element) for i in range(0, len(found), lanes)]
        self.values[node] = found

    def emit_extract(self, node: Node) -> None:
        count, index = count_of(node.type), node.attrs["index"]  # type: ignore[arg-type]
        found = self.values[node.inputs[0]]
        if not node.shape:  # a lane of a vector
            self.values[node] = [self.element(found, index, node.inputs[0])]
            return
        self.values[node] = found[index * count : (index + 1) * count]

    def emit_reduce(self, node: Node) -> None:
        source = node.inputs[0].type
        assert isinstance(source, Tile)
        axis, kind, dtype = node.attrs["axis"], node.attrs["kind"], node.dtype
        found = self.values[node.inputs[0]]
        if axis == len(source.shape) - 1:
            found = self.join_pieces(found, kind, dtype, source)
            found = [self.across(x, kind, dtype, lanes_of(source)) for x in found]
            lanes = lanes_of(node.type)  # type: ignore[arg-type]
            if lanes > 1:
                found = [
                    self.pack(found[i : i + lanes], scalar_type(dtype))
                    for i in range(0, len(found), lanes)
                ]
            self.values[node] = found
            return
        lead, size = math.prod(source.shape[:axis]), source.shape[axis]
        rest = math.prod(source.shape[axis + 1 : -1]) * pieces_of(source)
        row, lanes = row_for(COMBINE[kind]), lanes_of(source)
        result = []
        for i in range(lead):
            for j in range(rest):
                total = found[(i * size) * rest + j]
                for k in range(1, size):
                    total = row(self.w, dtype, lanes, [total, found[(i * size + k) * rest + j]])
                result.append(total)
        self.values[node] = result

    def emit_cumulative(self, node: Node) -> None:
        """Running reduction: by vectors along a leading axis, lane by lane along the last."""
        type_, kind, dtype = node.type, node.attrs["kind"], node.dtype
        assert isinstance(type_, Tile)
        axis, found = node.attrs["axis"], list(self.values[node.inputs[0]])
        row, lanes, element = row_for(COMBINE[kind]), lanes_of(type_), scalar_type(dtype)
        pieces = pieces_of(type_)
        if axis < len(type_.shape) - 1:
            stride = math.prod(type_.shape[axis + 1 : -1]) * pieces
            for i in range(len(found)):
                if i // stride % type_.shape[axis]:
                    found[i] = row(self.w, dtype, lanes, [found[i - stride], found[i]])
            self.values[node] = found
            return
        for first in range(0, len(found), pieces):
            line = found[first : first + pieces]
            parts = [self.lane(x, element, lanes, n) for x in line for n in range(lanes)]
            for n in range(1, len(parts)):
                parts[n] = row(self.w, dtype, 1, [parts[n - 1], parts[n]])
            for i in range(pieces):
                own = parts[i * lanes : (i + 1) * lanes]
                found[first + i] = self.pack(own, element) if lanes > 1 else own[0]
        self.values[node] = found

    def join_pieces(self, found: Values, kind: str, dtype: DType, source: Tile) -> Values:
        """One vector per line, its pieces combined."""
        pieces, lanes, row = pieces_of(source), lanes_of(source), row_for(COMBINE[kind])
        result = []
        for start in range(0, len(found), pieces):
            total = found[start]
            for x in found[start + 1 : start + pieces]:
                total = row(self.w, dtype, lanes, [total, x])
            result.append(total)
        return result

    def across(self, x: str, kind: str, dtype: DType, lanes: int) -> str:
        """Reduce the lanes of one vector."""
        if lanes == 1:
            return x
        element = scalar_type(dtype)
        v, m = vector(element, lanes), mangle(element, lanes)
        if dtype.is_float and kind in ("sum", "prod"):
            name, start = ("fadd", -0.0) if kind == "sum" else ("fmul", 1.0)
            full = f"llvm.vector.reduce.{name}.{m}"
            self.w.declared[full] = f"declare {element} @{full}({element}, {v})"
            return self.w.value(
                f"call reassoc {element} @{full}({element} {literal(start, dtype)}, {v} {x})"
            )
        names = {
            "float": {"max": "fmaximum", "min": "fminimum"},
            "int": {"sum": "add", "prod": "mul", "max": "smax", "min": "smin"},
            "uint": {"sum": "add", "prod": "mul", "max": "umax", "min": "umin"},
            "bool": {"sum": "or", "prod": "and", "max": "or", "min": "and"},
        }
        return self.w.intrinsic(f"llvm.vector.reduce.{names[dtype.kind][kind]}.{m}", element, (v, x))

    def emit_dot(self, node: Node) -> None:
        """Outer products: a row of accumulators per row of a, by fused multiply-add."""
        a, b, c = node.inputs
        (m, k), dtype = a.shape, node.dtype
        element, n, pieces = scalar_type(dtype), lanes_of(c.type), pieces_of(c.type)  # type: ignore[arg-type]
        v = vector(element, n)
        left, right, total = self.values[a], self.values[b], list(self.values[c])
        for p in range(k):
            line = [convert(self.w, b.dtype, dtype, n, x) for x in right[p * pieces : (p + 1) * pieces]]
            for i in range(m):
                one = self.element(left, i * k + p, a)
                one = self.splat(convert(self.w, a.dtype, dtype, 1, one), element, n)
                for q, x in enumerate(line):
                    at = i * pieces + q
                    total[at] = self.multiply_add(v, dtype, one, x, total[at])
        self.values[node] = total

    def element(self, parts: Values, number: int, node: Node) -> str:
        """One element of a tile, by its row-major number."""
        lanes = lanes_of(node.type)  # type: ignore[arg-type]
        if lanes == 1:
            return parts[number]
        v = vector(scalar_type(node.dtype), lanes)
        return self.w.value(f"extractelement {v} {parts[number // lanes]}, i64 {number % lanes}")

    def multiply_add(self, v: str, dtype: DType, a: str, b: str, c: str) -> str:
        """a * b + c of vectors."""
        if dtype.is_float:
            lanes = int(v[1:].split(" ")[0]) if v.startswith("<") else 1
            name = f"llvm.fma.{mangle(scalar_type(dtype), lanes)}"
            return self.w.intrinsic(name, v, (v, a), (v, b), (v, c))
        product = self.w.value(f"mul {v} {a}, {b}")
        return self.w.value(f"add {v} {product}, {c}")

    # ---- memory ---------------------------------------------------------------------------

    def offset(self, memory: Node, index: list[str]) -> str:
        """The element offset of an index."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        total = "0"
        for position, stride in zip(index, type_.element_strides()):
            if position == "0" or stride == 0:
                continue
            term = position
            if stride != 1:
                term = self.w.value(f"mul nsw i64 {position}, {self.size(stride)}")
            total = term if total == "0" else self.w.value(f"add nsw i64 {total}, {term}")
        return total

    def pointer(self, memory: Node, offset: str) -> str:
        """The address of an element."""
        base = self.values[memory][0]
        if offset == "0":
            return base
        return self.w.value(f"getelementptr {memory_type(memory.dtype)}, ptr {base}, i64 {offset}")

    def rows(self, memory: Node, shape: tuple[int, ...], axes: tuple[int, ...],
             offset: str) -> tuple[list[str], str]:  # fmt: skip
        """Element offsets of each vector of a tile, and the stride along its lanes."""
        strides = [memory.type.element_strides()[a] for a in axes]  # type: ignore[union-attr]
        if not shape:
            return [offset], "1"
        offsets = []
        split = split_shape(shape)
        strides = [*strides[:-1], strides[-1] * split[-1], strides[-1]]
        for number in range(math.prod(split[:-1])):
            total = offset
            for position, stride in zip(unravel(number, split[:-1]), strides):
                if position:
                    step = self.size(stride * position)
                    total = self.w.value(f"add nsw i64 {total}, {step}")
            offsets.append(total)
        return offsets, self.size(strides[-1])

    def from_memory(self, x: str, dtype: DType, lanes: int) -> str:
        """A loaded vector as it is held in registers."""
        if memory_type(dtype) == scalar_type(dtype):
            return x
        if dtype.kind != "bool":  # int4
            return self.w.value(f"trunc {vector('i8', lanes)} {x} to {vector('i4', lanes)}")
        return self.w.value(f"icmp ne {vector('i8', lanes)} {x}, {splat_constant(0, dtypes.int8, lanes)}")

    def to_memory(self, x: str, dtype: DType, lanes: int) -> str:
        """A vector as it is stored."""
        own = scalar_type(dtype)
        if memory_type(dtype) == own:
            return x
        wider = "zext" if dtype.kind == "bool" else "sext"
        return self.w.value(f"{wider} {vector(own, lanes)} {x} to {vector('i8', lanes)}")

    def masks(self, node: Node, mask: Node | None, count: int, lanes: int) -> list[str | None]:
        """One mask operand per vector."""
        if mask is None:
            return [None] * count
        found = self.values[mask]
        if not mask.shape:
            found = [self.splat(found[0], "i1", lanes)]
        return list(found) if len(found) == count else [found[0]] * count

    def emit_load(self, node: Node) -> None:
        memory, dtype = node.inputs[0], node.dtype
        rank = len(memory.type.shape)  # type: ignore[union-attr]
        index = [self.values[i][0] for i in node.inputs[1 : 1 + rank]]
        mask = node.inputs[1 + rank] if node.attrs["masked"] else None
        shape: tuple[int, ...] = node.attrs["shape"]
        lanes = lanes_of(node.type)  # type: ignore[arg-type]
        offsets, stride = self.rows(memory, shape, node.attrs["axes"], self.offset(memory, index))
        masks = self.masks(node, mask, len(offsets), lanes)
        self.values[node] = [
            self.load_vector(memory, o, stride, lanes, m, dtype) for o, m in zip(offsets, masks)
        ]

    def load_vector(self, memory: Node, offset: str, stride: str, lanes: int, mask: str | None,
                    dtype: DType) -> str:  # fmt: skip
        """One vector from memory: contiguous, or strided by a gather."""
        element = memory_type(dtype)
        v = vector(element, lanes)
        align = dtype.size
        if lanes == 1 and mask is None:
            x = self.w.value(f"load {v}, ptr {self.pointer(memory, offset)}, align {align}")
        elif lanes == 1:
            x = self.guarded_load(memory, offset, mask or "true", v, align)
        elif stride == "1" and mask is None:
            x = self.w.value(f"load {v}, ptr {self.pointer(memory, offset)}, align {align}")
        elif stride == "1":
            name = f"llvm.masked.load.{mangle(element, lanes)}.p0"
            self.w.declared[name] = f"declare {v} @{name}(ptr, <{lanes} x i1>, {v})"
            x = self.w.value(
                f"call {v} @{name}(ptr align {align} {self.pointer(memory, offset)}, <{lanes} x i1> {mask}, "
                f"{v} zeroinitializer)"
            )
        else:
            x = self.gather_vector(memory, self.lane_offsets(offset, stride, lanes), lanes, mask, dtype)
        return self.from_memory(x, dtype, lanes)

    def guarded_load(self, memory: Node, offset: str, mask: str, element: str, align: int) -> str:
        """A scalar load that happens only where the mask holds: else it reads element 0's copy."""
        w = self.w
        read, join = w.fresh_label("read"), w.fresh_label("join")
        before = w.label
        w.line(f"br i1 {mask}, label %{read}, label %{join}")
        w.start(read)
        x = w.value(f"load {element}, ptr {self.pointer(memory, offset)}, align {align}")
        w.line(f"br label %{join}")
        w.start(join)
        zero = "0.0" if element in ("float", "double", "half", "bfloat") else "0"
        if element == "bfloat":
            zero = "0xR0000"
        return w.value(f"phi {element} [ {zero}, %{before} ], [ {x}, %{read} ]")

    def lane_offsets(self, offset: str, stride: str, lanes: int) -> str:
        """offset + lane * stride, as a vector."""
        v = f"<{lanes} x i64>"
        lane = "<" + ", ".join(f"i64 {i}" for i in range(lanes)) + ">"
        steps = self.w.value(f"mul {v} {lane}, {self.splat(stride, 'i64', lanes)}")
        return self.w.value(f"add {v} {steps}, {self.splat(offset, 'i64', lanes)}")

    def pointers(self, memory: Node, offsets: str, lanes: int) -> str:
        """Addresses of elements at a vector of offsets."""
        element, base = memory_type(memory.dtype), self.values[memory][0]
        return self.w.value(f"getelementptr {element}, ptr {base}, <{lanes} x i64> {offsets}")

    def gather_vector(self, memory: Node, offsets: str, lanes: int, mask: str | None,
                      dtype: DType) -> str:  # fmt: skip
        """Elements at a vector of offsets."""
        element = memory_type(dtype)
        v = vector(element, lanes)
        if lanes == 1:
            if mask is None:
                return self.w.value(f"load {v}, ptr {self.pointer(memory, offsets)}, align {dtype.size}")
            return self.guarded_load(memory, offsets, mask, v, dtype.size)
        name = f"llvm.masked.gather.{mangle(element, lanes)}.v{lanes}p0"
        self.w.declared[name] = f"declare {v} @{name}(<{lanes} x ptr>, <{lanes} x i1>, {v})"
        mask = mask or "splat (i1 true)"
        return self.w.value(
            f"call {v} @{name}(<{lanes} x ptr> align {dtype.size} {self.pointers(memory, offsets, lanes)}, "
            f"<{lanes} x i1> {mask}, {v} zeroinitializer)"
        )

    def emit_gather(self, node: Node) -> None:
        memory, offset = node.inputs[0], node.inputs[1]
        mask = node.inputs[2] if len(node.inputs) > 2 else None
        lanes, found = lanes_of(node.type), self.values[offset]  # type: ignore[arg-type]
        masks = self.masks(node, mask, len(found), lanes)
        self.values[node] = [
            self.from_memory(self.gather_vector(memory, o, lanes, m, node.dtype), node.dtype, lanes)
            for o, m in zip(found, masks)
        ]

    def emit_store(self, node: Node) -> None:
        memory, value = node.inputs[0], node.inputs[1]
        rank = len(memory.type.shape)  # type: ignore[union-attr]
        index = [self.values[i][0] for i in node.inputs[2 : 2 + rank]]
        mask = node.inputs[2 + rank] if node.attrs["masked"] else None
        shape, lanes = value.shape, lanes_of(value.type)  # type: ignore[arg-type]
        offsets, stride = self.rows(memory, shape, node.attrs["axes"], self.offset(memory, index))
        masks = self.masks(node, mask, len(offsets), lanes)
        for x, o, m in zip(self.values[value], offsets, masks):
            self.store_vector(memory, self.to_memory(x, value.dtype, lanes), o, stride, lanes, m)

    def store_vector(self, memory: Node, x: str, offset: str, stride: str, lanes: int,
                     mask: str | None) -> None:  # fmt: skip
        """One vector to memory."""
        dtype = memory.dtype
        element = memory_type(dtype)
        v = vector(element, lanes)
        if lanes == 1:
            self.guarded(mask, lambda: self.w.line(
                f"store {v} {x}, ptr {self.pointer(memory, offset)}, align {dtype.size}"))  # fmt: skip
        elif stride == "1" and mask is None:
            self.w.line(f"store {v} {x}, ptr {self.pointer(memory, offset)}, align {dtype.size}")
        elif stride == "1":
            name = f"llvm.masked.store.{mangle(element, lanes)}.p0"
            self.w.declared[name] = f"declare void @{name}({v}, ptr, <{lanes} x i1>)"
            self.w.line(
                f"call void @{name}({v} {x}, ptr align {dtype.size} {self.pointer(memory, offset)}, "
                f"<{lanes} x i1> {mask})"
            )
        else:
            self.scatter_vector(memory, x, self.lane_offsets(offset, stride, lanes), lanes, mask)

    def scatter_vector(self, memory: Node, x: str, offsets: str, lanes: int, mask: str | None) -> None:
        """Write elements at a vector of offsets, in lane order."""
        element, dtype = memory_type(memory.dtype), memory.dtype
        v = vector(element, lanes)
        name = f"llvm.masked.scatter.{mangle(element, lanes)}.v{lanes}p0"
        self.w.declared[name] = f"declare void @{name}({v}, <{lanes} x ptr>, <{lanes} x i1>)"
        self.w.line(
            f"call void @{name}({v} {x}, <{lanes} x ptr> align {dtype.size} "
            f"{self.pointers(memory, offsets, lanes)}, <{lanes} x i1> {mask or 'splat (i1 true)'})"
        )

    def guarded(self, mask: str | None, action: Any) -> None:
        """Do something only where a scalar mask holds."""
        if mask is None:
            action()
            return
        w = self.w
        yes, join = w.fresh_label("write"), w.fresh_label("join")
        w.line(f"br i1 {mask}, label %{yes}, label %{join}")
        w.start(yes)
        action()
        w.line(f"br label %{join}")
        w.start(join)

    def emit_scatter(self, node: Node) -> None:
        memory, value, offset = node.inputs[:3]
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        mode, lanes = node.attrs["mode"], lanes_of(value.type)  # type: ignore[arg-type]
        found = self.values[value]
        masks = self.masks(node, mask, len(found), lanes)
        for x, o, m in zip(found, self.values[offset], masks):
            if mode == "set" and lanes > 1:
                self.scatter_vector(memory, self.to_memory(x, value.dtype, lanes), o, lanes, m)
                continue
            for lane in range(lanes):
                self.combine(memory, value.dtype, mode, *(
                    self.lane(part, kind, lanes, lane)
                    for part, kind in ((x, scalar_type(value.dtype)), (o, "i64"), (m, "i1"))
                ))  # fmt: skip

    def lane(self, x: str | None, element: str, lanes: int, lane: int) -> Any:
        """One lane of a vector."""
        if x is None or lanes == 1:
            return x
        return self.w.value(f"extractelement {vector(element, lanes)} {x}, i64 {lane}")

    def combine(self, memory: Node, dtype: DType, mode: str, x: str, offset: str,
                mask: str | None) -> None:  # fmt: skip
        """memory[offset] = op(memory[offset], x)."""

        def act() -> None:
            where = self.pointer(memory, offset)
            element = memory_type(dtype)
            new = x
            if mode != "set":
                old = self.w.value(f"load {element}, ptr {where}, align {dtype.size}")
                old = self.from_memory(old, dtype, 1)
                name = {"add": "add", "multiply": "multiply", "max": "maximum", "min": "minimum"}[mode]
                if dtype.is_float and dtype.bits < 32:
                    wide = [convert(self.w, dtype, dtypes.float32, 1, v) for v in (old, x)]
                    result = row_for(name)(self.w, dtypes.float32, 1, wide)
                    new = convert(self.w, dtypes.float32, dtype, 1, result)
                else:
                    new = row_for(name)(self.w, dtype, 1, [old, x])
            new = self.to_memory(new, dtype, 1)
            self.w.line(f"store {element} {new}, ptr {where}, align {dtype.size}")

        self.guarded(mask, act)

    def emit_prefetch(self, node: Node) -> None:
        memory = node.inputs[0]
        where = self.pointer(memory, self.offset(memory, [self.values[i][0] for i in node.inputs[1:]]))
        self.w.intrinsic("llvm.prefetch.p0", "void", ("ptr", where), ("i32", "0"), ("i32", "3"),
                         ("i32", "1"))  # fmt: skip

    def emit_sort(self, node: Node) -> None:
        name, text = sort_function(node.inputs[0].dtype, node.attrs["descending"])
        self.w.declared["llvm.smin.i64"] = "declare i64 @llvm.smin.i64(i64, i64)"
        self.w.declared[name] = text  # a helper in the same module
        pointers = ", ".join(f"ptr {self.values[i][0]}" for i in node.inputs[:4])
        self.w.line(f"call void @{name}({pointers}, i64 {self.values[node.inputs[4]][0]})")

    def emit_allocate(self, node: Node) -> None:
        type_ = node.type
        assert isinstance(type_, Memory)
        size = type_.dtype.size * math.prod(type_.shape)  # type: ignore[arg-type]
        self.values[node] = [self.w.value(f"getelementptr i8, ptr %scratch, i64 {self.scratch}")]
        self.scratch += (size + 63) // 64 * 64

    # ---- control --------------------------------------------------------------------------

    def emit_get(self, node: Node) -> None:
        index, source = node.attrs["index"], node.inputs[0]
        results = source.blocks[0].results
        start = sum(self.width(r) for r in results[:index])
        self.values[node] = self.values[source][start : start + self.width(results[index])]

    def width(self, node: Node) -> int:
        """Vectors (or matrix registers) that hold a value."""
        return 1 if in_matrix_unit(node) else count_of(node.type)  # type: ignore[arg-type]

    def emit_loop(self, node: Node) -> None:
        lower, upper = self.values[node.inputs[0]][0], self.values[node.inputs[1]][0]
        carried = [x for i in node.inputs[2:] for x in self.values[i]]
        unroll, step = node.attrs["unroll"], node.attrs["step"]
        if unroll > 1:
            span = self.w.value(f"sub nsw i64 {upper}, {lower}")
            wide = step * unroll
            whole = self.w.value(f"sdiv i64 {span}, {wide}")
            whole = self.w.value(f"mul nsw i64 {whole}, {wide}")
            middle = self.w.value(f"add nsw i64 {lower}, {whole}")
            carried = self.one_loop(node, lower, middle, wide, unroll, carried)
            lower = middle
        self.values[node] = self.one_loop(node, lower, upper, step, 1, carried)

    def one_loop(self, node: Node, lower: str, upper: str, step: int, copies: int,
                 carried: Values) -> Values:  # fmt: skip
        """A loop whose body is written `copies` times."""
        w, block = self.w, node.blocks[0]
        types = self.register_types(block.results)
        head, inside, done = (w.fresh_label(n) for n in (block.name, "in", "out"))
        before = w.label
        w.line(f"br label %{head}")
        w.start(head)
        index, following = w.name(), w.name()
        phis = [w.name() for _ in carried]
        slot = len(w.lines)
        w.lines.extend([""] * (1 + len(phis)))
        going = w.value(f"icmp slt i64 {index}, {upper}")
        w.line(f"br i1 {going}, label %{inside}, label %{done}")
        w.start(inside)
        current, place = list(phis), index
        for copy in range(copies):
            if copy:
                place = w.value(f"add nsw i64 {index}, {copy * node.attrs['step']}")
            current = self.loop_body(block, place, current)
        w.line(f"{following} = add nsw i64 {index}, {step}")
        w.lines[slot] = f"  {index} = phi i64 [ {lower}, %{before} ], [ {following}, %{w.label} ]"
        for i, (phi, first, last, type_) in enumerate(zip(phis, carried, current, types)):
            w.lines[slot + 1 + i] = f"  {phi} = phi {type_} [ {first}, %{before} ], [ {last}, %{w.label} ]"
        w.line(f"br label %{head}")
        w.start(done)
        return phis

    def register_types(self, nodes: Sequence[Node]) -> list[str]:
        """LLVM types of the vectors (or matrix registers) that hold some values."""
        found = []
        for node in nodes:
            type_ = node.type
            assert isinstance(type_, Tile)
            one = "x86_amx" if in_matrix_unit(node) else vector(
                scalar_type(type_.dtype), lanes_of(type_)
            )  # fmt: skip
            found += [one] * self.width(node)
        return found

    def loop_body(self, block: Block, index: str, carried: Values) -> Values:
        """Emit a loop's Block once; gives the carried vectors for the next trip."""
        self.values[block.arguments[0]] = [index]
        position = 0
        for argument, result in zip(block.arguments[1:], block.results):
            count = self.width(result)
            self.values[argument] = carried[position : position + count]
            position += count
        self.block(block)
        return [x for r in block.results for x in self.values[r]]

    def emit_branch(self, node: Node) -> None:
        w = self.w
        condition = self.values[node.inputs[0]][0]
        yes, no, join = (w.fresh_label(n) for n in ("then", "otherwise", "join"))
        w.line(f"br i1 {condition}, label %{yes}, label %{no}")
        ends = []
        for label, block in zip((yes, no), node.blocks):
            w.start(label)
            self.block(block)
            ends.append(([x for r in block.results for x in self.values[r]], w.label))
            w.line(f"br label %{join}")
        w.start(join)
        types = self.register_types(node.blocks[0].results)
        (first, first_label), (second, second_label) = ends
        self.values[node] = [
            w.value(f"phi {t} [ {a}, %{first_label} ], [ {b}, %{second_label} ]")
            for t, a, b in zip(types, first, second)
        ]

    # ---- matrix unit (AMX) ----------------------------------------------------------------

    def emit_matrix_zero(self, node: Node) -> None:
        rows, columns = node.shape
        self.values[node] = [self.w.intrinsic(
            "llvm.x86.tilezero.internal", "x86_amx", ("i16", str(rows)),
            ("i16", str(columns * node.dtype.size)))]  # fmt: skip

    def matrix_address(self, memory: Node, index: list[Node]) -> tuple[str, str]:
        """Address and row pitch in bytes of a 2-D tile (the last two axes of the Memory)."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        where = self.pointer(memory, self.offset(memory, [self.values[i][0] for i in index]))
        pitch = self.size(type_.element_strides()[-2] * type_.dtype.size)
        return where, pitch

    def emit_matrix_load(self, node: Node) -> None:
        rows, columns = node.shape
        where, pitch = self.matrix_address(node.inputs[0], list(node.inputs[1:]))
        self.values[node] = [self.w.intrinsic(
            "llvm.x86.tileloadd64.internal", "x86_amx", ("i16", str(rows)),
            ("i16", str(columns * node.dtype.size)), ("ptr", where), ("i64", pitch))]  # fmt: skip

    def emit_matrix_dot(self, node: Node) -> None:
        acc, a, b = node.inputs
        rows, columns = acc.shape
        self.values[node] = [self.w.intrinsic(
            f"llvm.x86.{node.attrs['unit']}.internal", "x86_amx", ("i16", str(rows)),
            ("i16", str(columns * acc.dtype.size)), ("i16", str(a.shape[1] * a.dtype.size)),
            ("x86_amx", self.values[acc][0]), ("x86_amx", self.values[a][0]),
            ("x86_amx", self.values[b][0]))]  # fmt: skip

    def emit_matrix_store(self, node: Node) -> None:
        memory, value = node.inputs[:2]
        rows, columns = value.shape
        where, pitch = self.matrix_address(memory, list(node.inputs[2:]))
        self.w.intrinsic(
            "llvm.x86.tilestored64.internal", "void", ("i16", str(rows)),
            ("i16", str(columns * value.dtype.size)), ("ptr", where), ("i64", pitch),
            ("x86_amx", self.values[value][0]))  # fmt: skip


def in_matrix_unit(node: Node) -> bool:
    """Whether a value lives in a register of a matrix unit."""
    while node.op.name == "get":
        node = node.inputs[0].blocks[0].results[node.attrs["index"]]
    return node.op.group == "matrix"


def unravel(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a row-major number."""
    index = []
    for size in reversed(shape):
        index.append(number % size)
        number //= size
    return tuple(reversed(index))


def ravel(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The row-major number of an index."""
    number = 0
    for position, size in zip(index, shape):
        number = number * size + position
    return number
