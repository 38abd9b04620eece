"""Make a portable Body fit a machine with few registers: large tiles become places and loops.

A tile is *large* when it takes more than a quarter of the Target's registers. Large values are held
lazily, as a recipe for any piece of a row (`Source`), until something needs them stored: chains of
elementwise ops run as one loop over pieces, a dot becomes loops around a small dot whose
accumulators stay in registers, a reduction loops over pieces. Places stand in the nearest memory of
the Target. Small tiles pass through as they are, and so does a Body with the note `fits`: its
writer chose tiles by the Target's registers. Invariant: the new Body computes the same values up to
the order of sums, and holds no tile that needs more registers than there are.

A large dot goes to a matrix unit of the Target (AMX on a CPU) where its sizes are whole tiles of
the unit, which keeps its sums in the asked dtype. The right operand is packed so that neighbours
along k lie side by side, as the unit reads them; up to 2 x 2 accumulators of the unit are carried
over k.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..core.errors import InternalError
from ..core.target import MatrixUnit, Target
from ..ir.block import Block, argument
from ..ir.node import Node, located, needs
from ..ir.symbol import Size
from ..ir.types import NOTHING, Memory, Shape, row_major
from . import ops
from .build import Body, BodyBuilder
from .numeric import COMBINE
from .pieces import Indices, Pieces, Source, large, same_axes
from .row import emitters, touch_of


def legalize(body: Body, target: Target) -> Body:
    """The Body with no tile larger than the Target's registers can work with."""
    limit = limit_of(target)
    if "shared" in target.memories or body.notes.get("fits"):
        return body  # many threads hold a tile together, or it was written so
    nodes = list(body.block.all_nodes())
    if not any(large(n.type, limit) or n.op is ops.allocate for n in nodes):
        return body
    if any(n.op.category == "matrix" for n in nodes):
        return body  # written for a matrix unit of this Target: its tiles are what they must be
    given = [(p.attrs["name"], p.type) for p in body.parameters]
    b = BodyBuilder(body.name, given)  # type: ignore[arg-type]
    into = Pieces(b, target, limit)
    into.values.update(zip(body.parameters, b.parameters))
    for node in nodes:
        into.uses.update(needs(node))
        for inner in node.blocks:
            into.uses.update(2 * inner.results)  # which are stored
    _block(into, body.block)
    return b.finish(body.grid, **body.notes)


def limit_of(target: Target) -> int:
    """Elements of the largest tile that stays in registers."""
    space = target.memories.get("register")
    held = 1 << 20 if space is None else space.bytes
    return max(16, held // 16)


DEEPEST = 96  # values on values before one is stored


# ---- elementwise and shape ------------------------------------------------------------------


def _by_element(into: Pieces, node: Node) -> None:
    """An op on elements, on those of a Memory at offsets, or a check of them."""
    memories = [into.values[i] for i in node.inputs if isinstance(i.type, Memory)]
    inputs = [into.source(i) for i in node.inputs[len(memories) :]]

    def piece(index: Indices, lanes: int) -> Node:
        pieces = [s.piece(index, lanes) for s in inputs]
        return into.b.do(node.op, *memories, *pieces, **node.attrs)

    if node.type is NOTHING:
        for index, lanes in into.each(inputs[0].shape):
            piece(index, lanes)
        return
    found = Source(node.shape, node.dtype, piece, depth=1 + max(s.depth for s in inputs))
    if node.op.effect or found.depth > DEEPEST:  # pieces are made by calls within calls
        found = into.keep(found)
    into.give(node, found)


def _constant(into: Pieces, node: Node) -> None:
    into.give(node, into.cheap(node))


_iota = _broadcast = _constant


def _reshape(into: Pieces, node: Node) -> None:
    inner = into.source(node.inputs[0])
    if same_axes(inner.shape, node.shape):
        into.give(node, into.viewed(inner, node.shape))
    else:
        into.give(node, into.keep(inner, node.shape))


def _words(into: Pieces, node: Node) -> None:
    inner = into.source(node.inputs[0])

    def piece(index: Indices, lanes: int) -> Node:
        return into.b.do(ops.words, inner.piece((*index[:-1], index[-1] * 4), lanes * 4))

    into.give(node, into.keep(Source(node.shape, node.dtype, piece)))


def _transpose(into: Pieces, node: Node) -> None:
    inner, order = into.source(node.inputs[0]), node.attrs["order"]
    if order == (1, 0):
        inner = inner if inner.place is not None else into.keep(inner)
        flat = _strided(into, inner, order, node.shape)
        flat.turned = inner
        into.give(node, flat)
    elif order[-1] == len(order) - 1:

        def piece(index: Indices, lanes: int) -> Node:
            own: list[Size] = [0] * len(order)
            for axis, i in zip(order, index):
                own[axis] = i
            return inner.piece(tuple(own), lanes)

        into.give(node, Source(node.shape, inner.dtype, piece, depth=inner.depth + 1))
    else:
        into.give(node, into.keep(_strided(into, inner, order, node.shape)))


def _strided(into: Pieces, inner: Source, order: Shape, shape: Shape) -> Source:
    """Any order of the axes of a stored value, by gathering along its strides."""
    strides = row_major(inner.shape)
    return into.gathered(into.kept(inner), shape, [strides[a] for a in order])


def _extract(into: Pieces, node: Node) -> None:
    inner, place = into.source(node.inputs[0]), node.attrs["index"]
    found = Source(node.shape, node.dtype, lambda index, n: inner.piece((place, *index), n))
    into.give(node, found)


# ---- reductions and products ----------------------------------------------------------------


def _reduce(into: Pieces, node: Node) -> None:
    inner, rank = into.source(node.inputs[0]), len(node.shape)
    if rank == 0:
        into.values[node] = _reduced(into, inner, node, (), 0)
        return
    place = into.room(node.shape, node.dtype)
    for index, lanes in into.each(node.shape if node.attrs["axis"] < rank else (*node.shape, 1)):
        into.b.store(place, _reduced(into, inner, node, index[:rank], lanes), index[:rank])
    into.give(node, into.stored(place))


def _reduced(into: Pieces, inner: Source, node: Node, index: Indices, lanes: int) -> Node:
    """A piece of what a reduction gives: one number where the axis is the last, all of whose
    elements are in pieces."""
    across = node.attrs["axis"] < len(index)
    wide = lanes if across else into.width(inner.shape)
    total: list[Node] = []
    for _ in _running(into, inner, node, index, wide, total):
        pass
    return total[0] if across else into.b.reduce(total[0], 0, node.attrs["kind"])


def _running(
    into: Pieces, inner: Source, node: Node, index: Indices, lanes: int, total: list[Node]
) -> Iterator[Indices]:
    """Where each piece along the axis of a reduction lies; `total` is it and those before it."""
    axis, combine = node.attrs["axis"], COMBINE[node.attrs["kind"]]
    step = lanes if axis == len(inner.shape) - 1 else 1
    total[:] = [inner.piece((*index[:axis], 0, *index[axis:]), lanes)]
    yield (*index[:axis], 0, *index[axis:])
    for k in into.b.each("k", step, inner.shape[axis], step, total):
        here = (*index[:axis], k, *index[axis:])
        total[:] = [into.b.apply(combine, total[0], inner.piece(here, lanes))]
        yield here


def _cumulative(into: Pieces, node: Node) -> None:
    inner, axis, last = into.source(node.inputs[0]), node.attrs["axis"], len(node.shape) - 1
    place = into.room(node.shape, node.dtype)
    rest = (*node.shape[:axis], *node.shape[axis + 1 :]) if axis < last else (*node.shape[:-1], 1)
    for index, lanes in into.each(rest):
        total: list[Node] = []
        for here in _running(into, inner, node, index[:last], lanes, total):
            into.b.store(place, total[0], here, (last,))
    into.give(node, into.stored(place))


def _dot(into: Pieces, node: Node) -> None:
    unit = unit_for(into.target, node)
    into.give(node, _vector_dot(into, node) if unit is None else unit_dot(into, node, unit))


def _vector_dot(into: Pieces, node: Node) -> Source:
    """A dot by rows of accumulators in vector registers."""
    m, n = node.shape
    wide = node.dtype.wide
    left, right = (into.kept(into.source(i), wide) for i in node.inputs[:2])
    c, place = into.source(node.inputs[2]), into.room((m, n), wide)
    lanes = into.target.lanes(wide)
    columns = min(n & -n, 2 * lanes)
    most = max(1, into.target.vector_registers * 3 // 4 // max(1, columns // lanes))
    rows = max(r for r in range(1, min(m, most) + 1) if m % r == 0)
    if rows * 2 < min(m, most):
        rows = min(m, most)  # a few rows are left over
    depth, whole = node.inputs[0].shape[1], m // rows * rows

    def tile(i: Size, j: Size, rows: int) -> None:
        if c.place is not None and c.dtype is wide:
            total = [into.b.load(c.place, (i, j), (rows, columns))]
        else:
            lines = [into.b.cast(c.piece((i + r, j), columns), wide) for r in range(rows)]
            total = [into.b.do(ops.stack_rows, *lines)]
        for p in into.b.each("k", 0, depth, 1, total, unroll=4 if depth % 4 == 0 else 1):
            x = into.b.load(left, (i, p), (rows, 1))
            y = into.b.load(right, (p, j), (1, columns))
            total[:] = [into.b.do(ops.dot, x, y, total[0])]
        into.b.store(place, total[0], (i, j))

    for j in into.b.each("column", 0, n, columns):
        for i in into.b.each("row", 0, whole, rows):
            tile(i, j, rows)
        if whole < m:
            tile(whole, j, m - whole)
    found = into.stored(place)
    return found if wide is node.dtype else into.keep(found, dtype=node.dtype)


# ---- memory ---------------------------------------------------------------------------------


def _load(into: Pieces, node: Node) -> None:
    touch = touch_of(node)
    memory, mask = into.values[touch.memory], into.mask(touch.mask)

    def piece(index: Indices, lanes: int) -> Node:
        where = into.at(touch, index)
        return into.b.load(memory, where, (lanes,), touch.axes[-1:], mask(index, lanes))

    into.sources[node] = into.keep(Source(node.shape, node.dtype, piece))


def _store(into: Pieces, node: Node) -> None:
    touch, value = touch_of(node), into.source(node.inputs[1])
    memory, mask = into.values[touch.memory], into.mask(touch.mask)
    for index, lanes in into.each(value.shape):
        piece, where = value.piece(index, lanes), into.at(touch, index)
        into.b.store(memory, piece, where, touch.axes[-1:], mask(index, lanes))


# ---- the walk -------------------------------------------------------------------------------


def _block(into: Pieces, block: Block) -> None:
    for node in block.nodes:
        with located(node.location):
            _node(into, node)


def _node(into: Pieces, node: Node) -> None:
    name = node.op.name
    if name not in ALL_SIZES and not any(into.large(x) for x in (node, *node.inputs)):
        inputs = tuple(into.values[i] for i in node.inputs)
        into.values[node] = into.b.add(node.with_inputs(inputs))
    elif name in HANDLERS:
        HANDLERS[name](into, node)
    elif node.op.category in BY_ELEMENT or name in BY_ELEMENT:
        _by_element(into, node)
    else:
        raise InternalError("tile.legalize", f"{node.op} of a large tile: {node.type}")


def _allocate(into: Pieces, node: Node) -> None:
    attrs = dict(node.attrs)
    if attrs["scope"] not in into.target.memories:
        attrs.update(scope=into.scope, layout="")
    into.values[node] = into.b.allocate(**attrs)


def _loop(into: Pieces, node: Node) -> None:
    block, carried = node.blocks[0], node.inputs[2:]
    kept = {i: into.keep(into.source(c)) for i, c in enumerate(carried) if into.large(c)}
    own = [i for i in range(len(carried)) if i not in kept]
    small = [block.arguments[0], *[block.arguments[1 + i] for i in own]]
    given = tuple(argument(a.attrs["name"], a.type) for a in small)
    into.values.update(zip(small, given))
    for i, held in kept.items():
        into.sources[block.arguments[1 + i]] = replace(held, carried=True)
    new = _inside(into, block, given, own, kept)
    bounds = [into.values[i] for i in node.inputs[:2]]
    starts = [into.values[carried[i]] for i in own]
    made = into.b.add(ops.loop(*bounds, *starts, blocks=(new,), **node.attrs))
    _results(into, node, own, made, kept)


def _inside(
    into: Pieces, block: Block, given: tuple[Node, ...], own: list[int], kept: dict[int, Source]
) -> Block:
    """A Block of a loop or a branch: small results leave it, large ones go to the places that
    the next trip reads."""
    into.spilled.append({})
    with into.b.builder.block(block.name, given) as new:
        _block(into, block)
        found = []
        for i in kept:
            source = into.source(block.results[i])
            fresh = source.place is not None and not source.carried
            found.append(source if fresh else into.keep(source))
        for source, target in zip(found, kept.values()):
            into.keep(source, place=target.place)
        new.results = tuple(into.b.add(into.values[block.results[i]]) for i in own)
    into.spilled.pop()
    return new


def _results(into: Pieces, node: Node, own: list[int], made: Node, kept: dict[int, Source]) -> None:
    """Bind the results of a loop or a branch: small ones by `get`, large ones by place."""
    for i in range(len(own) + len(kept)):
        old = ops.get(node, index=i)
        if i in kept:
            into.sources[old] = kept[i]
        else:
            into.values[old] = into.b.add(ops.get(made, index=own.index(i)))


def _branch(into: Pieces, node: Node) -> None:
    first = node.blocks[0].results
    wide = {i: r for i, r in enumerate(first) if into.large(r)}
    own = [i for i in range(len(first)) if i not in wide]
    kept = {i: into.stored(into.room(r.shape, r.dtype)) for i, r in wide.items()}
    blocks = tuple([_inside(into, block, (), own, kept) for block in node.blocks])
    made = into.b.add(ops.branch(into.values[node.inputs[0]], blocks=blocks))
    _results(into, node, own, made, kept)


def _get(into: Pieces, node: Node) -> None:
    """Nothing: set by its loop or branch."""


ALL_SIZES = ("loop", "branch", "allocate", "get")  # rows for small values too
BY_ELEMENT = (*ops.OPERANDS, "gather", "scatter", "atomic_add", "require")  # categories and ops
HANDLERS: dict[str, Callable[[Pieces, Node], None]] = emitters(sys.modules[__name__])


# ---- products on a matrix unit ------------------------------------------------------------------


SIDE = 16  # of the squares that are packed


def unit_for(target: Target, node: Node) -> MatrixUnit | None:
    """The unit that can do a dot, if there is one."""
    a, b, c = node.inputs
    (m, k), n = a.shape, b.shape[1]
    for unit in target.matrix_units(a.dtype, b.dtype):
        whole = m % unit.m == 0 and n % unit.n == 0 and k % unit.k == 0
        if whole and unit.accumulator is c.dtype:
            return unit
    return None


def unit_dot(into: Pieces, node: Node, unit: MatrixUnit) -> Source:
    """a @ b + c."""
    b, shape, depth = into.b, node.shape, node.inputs[0].shape[1]
    a, together = into.kept(into.source(node.inputs[0])), 4 // node.inputs[0].dtype.size
    packed = _packed(into, into.source(node.inputs[1]), together)
    start = node.inputs[2]
    zero = start.op is ops.constant and start.attrs["value"] == 0
    begin = None if zero else into.kept(into.source(start))
    place = into.room(shape, node.dtype)
    rows, columns = (
        [n * step for n in range(2 if size % (2 * step) == 0 else 1)]
        for size, step in zip(shape, (unit.m, unit.n))
    )

    def taken(memory: Node, row: Size, column: Size, size: tuple[int, int]) -> Node:
        return b.do(ops.matrix_load, memory, row, column, shape=size, unit=unit.name)

    def first(corner: tuple[Size, Size]) -> Node:
        if begin is None:
            return b.do(ops.matrix_zero, shape=(unit.m, unit.n), dtype=node.dtype, unit=unit.name)
        return taken(begin, *corner, (unit.m, unit.n))

    for i, j in into.blocks(shape, (len(rows) * unit.m, len(columns) * unit.n)):
        corners = [(i + r, j + q) for r in rows for q in columns]
        sums = [first(corner) for corner in corners]
        for p in b.each("k", 0, depth, unit.k, sums):
            left = [taken(a, i + r, p, (unit.m, unit.k)) for r in rows]
            packs = (unit.k // together, unit.n * together)
            right = [taken(packed, p // together, (j + q) * together, packs) for q in columns]
            pairs = [(x, y) for x in left for y in right]
            sums[:] = [b.do(ops.matrix_dot, s, *xy, unit=unit.name) for s, xy in zip(sums, pairs)]
        for total, corner in zip(sums, corners):
            b.do(ops.matrix_store, place, total, *corner, unit=unit.name)
    return into.stored(place)


def _packed(into: Pieces, source: Source, together: int) -> Node:
    """The right operand (k, n) as (k / together, n * together), neighbours along k side by side."""
    b, (depth, n) = into.b, source.shape
    place = into.room((depth // together, n * together), source.dtype)
    if source.turned is not None:  # from (n, k), where they lie side by side already
        inner = into.kept(source.turned)
        for p, j in into.blocks((depth // together, n), (SIDE, SIDE)):
            tile = b.load(inner, (j, p * together), (SIDE, SIDE * together))
            tile = b.reshape(tile, (SIDE, SIDE, together))
            tile = b.do(ops.transpose, tile, order=(1, 0, 2))
            tile = b.reshape(tile, (SIDE, SIDE * together))
            b.store(place, tile, (p, j * together))
        return place
    for p, j in into.blocks((depth // together, n), (1, SIDE)):
        rows = [source.piece((p * together + r, j), SIDE) for r in range(together)]
        line = b.reshape(b.turned(rows), (SIDE * together,))
        b.store(place, line, (p, j * together))
    return place
