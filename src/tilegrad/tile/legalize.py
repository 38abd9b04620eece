"""Make a portable Body fit a machine with few registers: large tiles become places and loops.

A tile is *large* when it takes more than a quarter of the Target's registers. Large values are
held lazily, as a recipe for any piece of a row (`Source`), until something needs them stored:
chains of elementwise ops run as one loop over pieces, a dot becomes loops around a small dot
whose accumulators stay in registers, a reduction walks pieces. Places stand in the nearest
memory of the Target. Small tiles pass through as they are, and so does a Body with the note
`fits`: its writer chose tiles by the Target's registers. Invariant: the new Body computes the
same values up to the order of sums, and holds no tile that needs more registers than there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtype import DType, float32, int64
from ..core.errors import InternalError
from ..core.target import Target
from ..ir.block import Block, argument
from ..ir.node import Node, located, needs
from ..ir.symbol import Size
from . import ops
from .build import Body
from .legalize_matrix import MatrixPieces
from .pieces import Indices, Piece, Source, large, same_axes
from .placed import PlacedBuilder
from .value import FAR

COMBINE = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def legalize(body: Body, target: Target) -> Body:
    """The Body with no tile larger than the Target's registers can work with."""
    limit = limit_of(target)
    if "shared" in target.memories or not _has_large(body.block, limit):
        return body  # many threads hold a tile together
    if body.notes.get("fits"):
        return body
    if _names_unit(body.block):
        return body  # written for a matrix unit of this Target: its tiles are what they must be
    return _Legalizer(body, target, limit).run()


def limit_of(target: Target) -> int:
    """Elements of the largest tile that stays in registers."""
    space = target.memories.get("register")
    held = 1 << 20 if space is None else space.bytes
    return max(16, held // 16)


def _has_large(block: Block, limit: int) -> bool:
    return any(
        large(n.type, limit) or n.op is ops.allocate or any(_has_large(i, limit) for i in n.blocks)
        for n in block.nodes
    )


def _names_unit(block: Block) -> bool:
    return any(n.op.group == "matrix" or any(_names_unit(i) for i in n.blocks) for n in block.nodes)


DEEPEST = 96  # values on values before one is stored


class _Legalizer(MatrixPieces):
    def __init__(self, body: Body, target: Target, limit: int) -> None:
        given = [(p.attrs["name"], p.type) for p in body.parameters]
        super().__init__(PlacedBuilder(body.name, given), target, limit)  # type: ignore[arg-type]
        self.body = body
        self.values.update(zip(body.parameters, self.b.parameters))
        self.bases: dict[Node, Size] = {}
        self.count(body.block)

    def run(self) -> Body:
        self.block(self.body.block)
        return self.b.finish(self.body.grid, **self.body.notes)

    def count(self, block: Block) -> None:
        """How often each value is used, Blocks within included."""
        for node in block.nodes:
            for i in needs(node):
                self.uses[i] = self.uses.get(i, 0) + 1
            for inner in node.blocks:
                self.count(inner)
        for r in block.results:
            self.uses[r] = self.uses.get(r, 0) + 2  # results are stored

    # ---- blocks ---------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for node in block.nodes:
            with located(node.location):
                self.node(node)

    def node(self, node: Node) -> None:
        name = node.op.name
        if name in ("loop", "branch"):
            getattr(self, "_" + name)(node)
        elif name == "get":
            return  # set by the loop or the branch
        elif name == "allocate":
            self._allocate(node)
        elif not (self.large(node) or any(self.large(i) for i in node.inputs)):
            self.values[node] = self.b.add(node.with_inputs(tuple(map(self.value, node.inputs))))
        else:
            handler = getattr(self, "_" + name, None)
            if handler is None and node.op.group in ("unary", "binary", "compare", "ternary"):
                handler = self._elementwise
            if handler is None:
                raise InternalError("tile.legalize", f"{node.op} of a large tile: {node.type}")
            handler(node)

    def value(self, node: Node) -> Node:
        return self.values[node]

    def base(self, node: Node) -> Size:
        """A scalar of the old Body as part of an index."""
        new = self.values[node]
        if new.op is ops.constant:
            return int(new.attrs["value"])
        if new not in self.bases:
            self.bases[new] = self.b.atom("base", new, -FAR, FAR)
        return self.bases[new]

    # ---- elementwise and shape ------------------------------------------------------------

    def _elementwise(self, node: Node) -> None:
        inputs = [self.source(i) for i in node.inputs]

        def piece(index: Indices, lanes: int) -> Node:
            parts = tuple(s.piece(index, lanes) for s in inputs)
            return self.b.add(node.op.make(parts, node.attrs))

        found = Source(node.shape, node.dtype, piece, depth=1 + max(s.depth for s in inputs))
        if found.depth > DEEPEST:  # pieces are made by calls within calls
            self.sources[node] = self.keep(found)
        else:
            self.set(node, found)

    def _constant(self, node: Node) -> None:
        self.set(node, self.constant(node.attrs["value"], node.type))

    def _iota(self, node: Node) -> None:
        self.set(node, self.iota(node))

    def _broadcast(self, node: Node) -> None:
        self.set(node, self.repeated(node))

    def _reshape(self, node: Node) -> None:
        inner = self.source(node.inputs[0])
        if same_axes(inner.shape, node.shape):
            self.set(node, self.viewed(inner, node.shape))
        else:
            self.set(node, self.keep(inner, node.shape))

    def _transpose(self, node: Node) -> None:
        inner, order = self.source(node.inputs[0]), node.attrs["order"]
        if order == (1, 0):
            inner = inner if inner.place is not None else self.keep(inner)
            flat = self.strided(inner, order, node.shape)
            flat.turned = inner
            self.sources[node] = self.keep(flat) if self.uses.get(node, 0) > 1 else flat
        elif order[-1] == len(order) - 1:
            self.set(node, self.permuted(inner, order, node.shape))
        else:
            self.set(node, self.keep(self.strided(inner, order, node.shape)))

    def permuted(self, inner: Source, order: tuple[int, ...], shape: tuple[int, ...]) -> Source:
        """Leading axes in another order."""

        def piece(index: Indices, lanes: int) -> Node:
            own: list[Size] = [0] * len(order)
            for axis, i in zip(order, index):
                own[axis] = i
            return inner.piece(tuple(own), lanes)

        return Source(shape, inner.dtype, piece, depth=inner.depth + 1)

    def strided(self, inner: Source, order: tuple[int, ...], shape: tuple[int, ...]) -> Source:
        """Any order of the axes of a stored value, by gathering along its strides."""
        kept = inner if inner.place is not None else self.keep(inner)
        strides = [math.prod(inner.shape[a + 1 :]) for a in order]

        def piece(index: Indices, lanes: int) -> Node:
            assert kept.place is not None
            start: Size = 0
            for i, stride in zip(index, strides):
                start = start + i * stride
            line = self.b.add(ops.iota(size=lanes, dtype=int64))
            line = self.b.apply("multiply", line, self.b.constant(strides[-1], int64))
            return self.b.gather(kept.place, self.b.apply("add", self.b.index(start), line))

        return Source(shape, inner.dtype, piece, turned=None)

    def _extract(self, node: Node) -> None:
        inner, place = self.source(node.inputs[0]), node.attrs["index"]
        found = Source(node.shape, node.dtype, lambda index, n: inner.piece((place, *index), n))
        self.give(node, found if self.large(node) else self.keep(found))

    # ---- reductions and products ----------------------------------------------------------

    def _reduce(self, node: Node) -> None:
        inner, axis, kind = self.source(node.inputs[0]), node.attrs["axis"], node.attrs["kind"]
        last = len(inner.shape) - 1
        if node.shape == ():
            self.values[node] = self.folded(inner, (), kind)
            return
        place = self.b.allocate(node.shape, node.dtype, self.scope)

        def whole_row(index: Indices, _: int) -> None:
            self.b.store(place, self.folded(inner, index, kind), index)

        def column(index: Indices, lanes: int) -> None:
            def at(k: Size) -> Node:
                return inner.piece((*index[:axis], k, *index[axis:]), lanes)

            def step(k: Size, carried: list[Node]) -> list[Node]:
                return [self.b.apply(COMBINE[kind], carried[0], at(k))]

            (total,) = self.b.loop("k", 1, inner.shape[axis], 1, step, [at(0)])
            self.b.store(place, total, index, (len(node.shape) - 1,))

        if axis == last:
            self.scalars(node.shape, whole_row)
        else:
            self.each(node.shape, column)
        self.give(node, self.stored(place, node.shape))

    def folded(self, inner: Source, index: Indices, kind: str) -> Node:
        """The reduction of one row, along the last axis."""
        lanes = self.width(inner.shape)

        def step(i: Size, carried: list[Node]) -> list[Node]:
            return [self.b.apply(COMBINE[kind], carried[0], inner.piece((*index, i), lanes))]

        size = inner.shape[-1]
        first = [inner.piece((*index, 0), lanes)]
        (total,) = self.b.loop("i", lanes, size, lanes, step, first, bounds=(lanes, size - lanes))
        return self.b.add(ops.reduce(total, axis=0, kind=kind))

    def scalars(self, shape: tuple[int, ...], act: Callable[[Indices, int], None]) -> None:
        """Run act for every element."""
        self.each((*shape, 1), lambda index, lanes: act(index[:-1], lanes))

    def _cumulative(self, node: Node) -> None:
        inner, axis, kind = self.source(node.inputs[0]), node.attrs["axis"], node.attrs["kind"]
        place = self.b.allocate(node.shape, node.dtype, self.scope)
        last = len(node.shape) - 1
        rest = (
            (*node.shape[:axis], *node.shape[axis + 1 :]) if axis < last else (*node.shape[:-1], 1)
        )

        def line(index: Indices, lanes: int) -> None:
            outer = index[:-1] if axis == last else index

            def at(k: Size) -> Indices:
                return (*outer[:axis], k, *outer[axis:])

            def step(k: Size, carried: list[Node]) -> list[Node]:
                total = self.b.apply(COMBINE[kind], carried[0], inner.piece(at(k), lanes))
                self.b.store(place, total, at(k), (last,))
                return [total]

            first = inner.piece(at(0), lanes)
            self.b.store(place, first, at(0), (last,))
            self.b.loop("k", 1, node.shape[axis], 1, step, [first])

        self.each(rest, line)
        self.give(node, self.stored(place, node.shape))

    def _dot(self, node: Node) -> None:
        unit = self.unit_for(node)
        if unit is None:
            self.give(node, self.vector_dot(node))
            return
        left = self.operand(node.inputs[0], node.inputs[0].dtype)
        self.give(node, self.stored(self.matrix_dot(node, left, unit), node.shape))

    def vector_dot(self, node: Node) -> Source:
        """A dot by rows of accumulators in vector registers."""
        m, n = node.shape
        wide = float32 if node.dtype.is_float and node.dtype.bits < 32 else node.dtype
        a, b = (self.operand(i, wide) for i in node.inputs[:2])
        c, place = self.source(node.inputs[2]), self.b.allocate((m, n), wide, self.scope)
        lanes = self.target.lanes(wide)
        columns = min(n & -n, 2 * lanes)
        most = max(1, self.target.vector_registers * 3 // 4 // max(1, columns // lanes))
        rows = max(r for r in range(1, min(m, most) + 1) if m % r == 0)
        if rows * 2 < min(m, most):
            rows = min(m, most)  # a few rows are left over

        def tile(i: Size, j: Size, rows: int) -> None:
            def step(p: Size, carried: list[Node]) -> list[Node]:
                x = self.b.load(a, (i, p), (rows, 1), (0, 1))
                y = self.b.load(b, (p, j), (1, columns), (0, 1))
                return [self.b.add(ops.dot(x, y, carried[0]))]

            start = [self.corner(c, i, j, (rows, columns), wide)]
            depth = node.inputs[0].shape[1]
            unroll = 4 if depth % 4 == 0 else 1
            (total,) = self.b.loop("k", 0, depth, 1, step, start, unroll=unroll)
            self.b.store(place, total, (i, j), (0, 1))

        def column(j: Size, _: list[Node]) -> Sequence[Node]:
            whole = m // rows * rows
            self.b.loop(
                "row",
                0,
                whole,
                rows,
                lambda i, _: tile(i, j, rows),
                bounds=(0, max(0, whole - rows)),
            )
            if whole < m:
                tile(whole, j, m - whole)
            return []

        self.b.loop("column", 0, n, columns, column, bounds=(0, n - columns))
        found = self.stored(place, node.shape)
        return found if wide is node.dtype else self.keep(found, dtype=node.dtype)

    def operand(self, node: Node, dtype: DType) -> Node:
        """The place of an operand of a dot, in the dtype of its sums."""
        source = self.source(node)
        if source.place is None or source.dtype is not dtype:
            source = self.keep(source, dtype=dtype)
        assert source.place is not None
        return source.place

    def corner(self, c: Source, i: Size, j: Size, shape: tuple[int, int], dtype: DType) -> Node:
        """A small tile of a value."""
        if c.place is not None and c.dtype is dtype:
            return self.b.load(c.place, (i, j), shape, (0, 1))
        rows = [self.b.cast(c.piece((i + r, j), shape[1]), dtype) for r in range(shape[0])]
        return self.b.add(ops.stack_rows(*rows))

    # ---- memory ---------------------------------------------------------------------------

    def _allocate(self, node: Node) -> None:
        attrs = node.attrs
        known = attrs["scope"] in self.target.memories
        self.values[node] = self.b.allocate(
            attrs["shape"],
            attrs["dtype"],
            attrs["scope"] if known else self.scope,
            attrs["layout"] if known else "",
        )

    def at(self, base: Sequence[Node], axes: tuple[int, ...], index: Indices) -> list[Size]:
        """Where in a Memory a piece of a tile begins."""
        found = [self.base(i) for i in base]
        for axis, i in zip(axes, index):
            found[axis] = found[axis] + i
        return found

    def mask(self, node: Node | None) -> Piece:
        if node is None:
            return lambda index, lanes: None  # type: ignore[return-value]
        return self.source(node).piece

    def _load(self, node: Node) -> None:
        rank, attrs = len(node.inputs[0].shape), node.attrs
        memory, base = self.value(node.inputs[0]), node.inputs[1 : 1 + rank]
        mask = self.mask(node.inputs[-1] if attrs["masked"] else None)
        axes = attrs["axes"]

        def piece(index: Indices, lanes: int) -> Node:
            where = self.at(base, axes, index)
            return self.b.load(memory, where, (lanes,), (axes[-1],), mask(index, lanes))

        self.sources[node] = self.keep(Source(node.shape, node.dtype, piece))

    def _store(self, node: Node) -> None:
        rank, attrs = len(node.inputs[0].shape), node.attrs
        memory, base = self.value(node.inputs[0]), node.inputs[2 : 2 + rank]
        value = self.source(node.inputs[1])
        mask = self.mask(node.inputs[-1] if attrs["masked"] else None)
        axes = attrs["axes"]
        self.each(
            value.shape,
            lambda index, lanes: self.b.store(
                memory,
                value.piece(index, lanes),
                self.at(base, axes, index),
                (axes[-1],),
                mask(index, lanes),
            ),
        )

    def _gather(self, node: Node) -> None:
        memory, offset = self.value(node.inputs[0]), self.source(node.inputs[1])
        mask = self.mask(node.inputs[2] if len(node.inputs) > 2 else None)

        def piece(index: Indices, lanes: int) -> Node:
            return self.b.gather(memory, offset.piece(index, lanes), mask(index, lanes))

        self.sources[node] = self.keep(Source(node.shape, node.dtype, piece))

    def _scatter(self, node: Node) -> None:
        memory = self.value(node.inputs[0])
        value, offset = (self.source(i) for i in node.inputs[1:3])
        mask = self.mask(node.inputs[3] if len(node.inputs) > 3 else None)
        self.each(
            offset.shape,
            lambda index, lanes: self.b.scatter(
                memory,
                value.piece(index, lanes),
                offset.piece(index, lanes),
                mask(index, lanes),
                node.attrs["mode"],
            ),
        )

    def _require(self, node: Node) -> None:
        condition = self.source(node.inputs[0])

        def piece(index: Indices, lanes: int) -> None:
            self.b.add(ops.require(condition.piece(index, lanes), **node.attrs))

        self.each(condition.shape, piece)

    def _atomic_add(self, node: Node) -> None:
        memory = self.value(node.inputs[0])
        value, offset = (self.source(i) for i in node.inputs[1:3])
        mask = self.mask(node.inputs[3] if len(node.inputs) > 3 else None)

        def piece(index: Indices, lanes: int) -> Node:
            extra = mask(index, lanes)
            parts = [memory, value.piece(index, lanes), offset.piece(index, lanes)]
            return self.b.add(node.op.make((*parts, *([] if extra is None else [extra])), {}))

        self.sources[node] = self.keep(Source(node.shape, node.dtype, piece))

    # ---- control --------------------------------------------------------------------------

    def _loop(self, node: Node) -> None:
        block, carried = node.blocks[0], node.inputs[2:]
        wide = [i for i, c in enumerate(carried) if self.large(c)]
        own = [i for i in range(len(carried)) if i not in wide]
        places = {i: self.keep(self.source(carried[i])) for i in wide}
        arguments = [argument(a.attrs["name"], a.type) for a in block.arguments]
        given = (arguments[0], *[arguments[1 + i] for i in own])
        with self.b.builder.block(block.name, given) as new:
            self.spilled.append({})
            self.values[block.arguments[0]] = arguments[0]
            for i in own:
                self.values[block.arguments[1 + i]] = arguments[1 + i]
            for i in wide:
                held = self.stored(places[i].place, carried[i].shape)  # type: ignore[arg-type]
                held.carried = True
                self.sources[block.arguments[1 + i]] = held
            self.block(block)
            self.write_back([block.results[i] for i in wide], [places[i] for i in wide])
            new.results = tuple(self.b.add(self.value(block.results[i])) for i in own)
            self.spilled.pop()
        bounds = [self.value(i) for i in node.inputs[:2]]
        starts = [self.value(carried[i]) for i in own]
        made = self.b.add(ops.loop(*bounds, *starts, blocks=(new,), **node.attrs))
        self.results(node, own, made, places)

    def write_back(self, results: Sequence[Node], places: Sequence[Source]) -> None:
        """Results of a trip to the places that the next one reads."""
        found = []
        for r in results:
            source = self.source(r)
            fresh = source.place is not None and not source.carried
            found.append(source if fresh else self.keep(source))
        for source, target in zip(found, places):
            self.keep(source, place=target.place)

    def results(self, node: Node, own: list[int], made: Node, places: dict[int, Source]) -> None:
        """Bind the results of a loop or a branch: small ones by `get`, large ones by place."""
        type_: Any = node.type
        for i, item in enumerate(type_.items):
            old = ops.get(node, index=i)
            if i in places:
                self.sources[old] = self.stored(places[i].place, item.shape)  # type: ignore[arg-type]
            else:
                self.values[old] = self.b.add(ops.get(made, index=own.index(i)))

    def _branch(self, node: Node) -> None:
        first = node.blocks[0].results
        wide = [i for i, r in enumerate(first) if self.large(r)]
        own = [i for i in range(len(first)) if i not in wide]
        places = {
            i: self.stored(
                self.b.allocate(first[i].shape, first[i].dtype, self.scope), first[i].shape
            )
            for i in wide
        }
        blocks = []
        for block in node.blocks:
            with self.b.builder.block(block.name) as new:
                self.spilled.append({})
                self.block(block)
                self.write_back([block.results[i] for i in wide], [places[i] for i in wide])
                new.results = tuple(self.b.add(self.value(block.results[i])) for i in own)
                self.spilled.pop()
            blocks.append(new)
        made = self.b.add(ops.branch(self.value(node.inputs[0]), blocks=tuple(blocks)))
        self.results(node, own, made, places)
