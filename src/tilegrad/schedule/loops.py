"""Lower a group of elementwise values and reductions to one Body of vector loops.

Row groups: a program takes one row at a time; each stage is one loop over its columns that
feeds all reductions of that stage (vector accumulators, combined across lanes at the end),
later stages read what earlier ones found; a last loop writes element-level results. The row
stays in the cache, so memory is read once and written once. Column groups: a program takes a
block of neighbouring results, and walks the reduced axis with accumulators in scratch memory.

Invariant: the order of every sum depends on shapes and the Plan alone, never on the number of
workers, so results are the same bits run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtype import DType, float32, int64
from ..core.errors import InternalError
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import (
    Expr, Size, atoms, ceil_divide, coefficient, combine, floor_divide, high, loop_index,
    minimum, modulo, multiply, named, substitute,
)  # fmt: skip
from ..ir.types import Memory, product, row_major
from ..tile import ops as tile_ops
from ..tile.build import Body, BodyBuilder
from .access import MOVEMENT, Index, unravel
from .evaluate import Evaluator, ravel_strides, stored_reads, symbolic, wide
from .fuse import COSTLY, REDUCE, Group, leaves_of, own_index

STASH_BYTES = 256 << 10
BLOCK = 8192  # elements of a flat elementwise program
COLUMN_BLOCK = 1024  # results of a column program
KINDS = {ops.sum_: "sum", ops.prod: "prod", ops.max_: "max", ops.min_: "min"}
COMBINE = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def identity(kind: str, dtype: DType) -> Any:
    """The value that changes nothing under a reduction."""
    if kind == "sum":
        return False if dtype.kind == "bool" else (-0.0 if dtype.is_float else 0)
    if kind == "prod":
        return True if dtype.kind == "bool" else 1
    return dtype.lowest if kind == "max" else dtype.highest


def reduce_index(node: Node, row: Size, column: Size) -> Index:
    """Where a reduction reads its input for result number `row`, reduced element `column`."""
    x = node.inputs[0]
    axes = node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)
    kept = [a for a in range(len(x.shape)) if a not in axes]
    found: list[Size] = [0] * len(x.shape)
    for a, i in zip(kept, unravel(row, [x.shape[a] for a in kept])):
        found[a] = i
    for a, i in zip(axes, unravel(column, [x.shape[a] for a in axes])):
        found[a] = i
    return tuple(found)


class LoopLowering:
    """Lowers one group."""

    def __init__(self, group: Group, values: set[Node], target: Target, name: str) -> None:
        self.group, self.all_values, self.target, self.name = group, values, target, name
        self.members = set(group.values)
        self.reads = sorted(group.reads, key=lambda n: n.serial)
        self.reduces = [v for v in group.values if v.op in REDUCE]
        self.order = group.order
        if group.kind == "mixed":
            node = group.values[0]
            last = len(node.inputs[0].shape) - 1
            axes = node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)
            self.order = "row" if last in axes else "column"
        self.levels = self._levels()

    # ---- shape of the work ----------------------------------------------------------------

    def _levels(self) -> dict[Node, int]:
        """For each value, how many reductions of the group must come before it is known."""
        found: dict[Node, int] = {}
        for v in self.group.values:
            inside = [u for u in leaves_of(v, self.all_values) if u in self.members]
            level = max((found[u] for u in inside), default=0)
            found[v] = level + 1 if v in self.reduces else level
        return found

    def is_row_level(self, node: Node) -> bool:
        """Whether a value has one element per row of a group with reductions."""
        rows = self.group.rows
        return bool(self.reduces) and (
            node in self.reduces or (product(node.shape) == rows and rows != self.group.total)
        )

    def index_at(self, node: Node, row: Size, column: Size) -> Index:
        """The element of a value at (row, column)."""
        found = own_index(node, row, column, self.shape)
        if found is None:
            raise InternalError("schedule.loops", f"{node!r} has no place in {self.group}")
        return found

    def expressions(self) -> list[tuple[Node, bool]]:
        """What loops evaluate: (value, is it a reduction)."""
        return [(v, v in self.reduces) for v in self.group.values
                if v in self.reduces or v in self.group.stored]  # fmt: skip

    def pick_inner(self) -> Size:
        """How many neighbouring elements the vector axis has: as many as stay linear."""
        group = self.group
        if not self.reduces:
            extent, shapes = group.total, [v.shape for v in group.values]
        elif self.order == "row":
            extent = group.columns
            shapes = [self._reduced(v) for v in self.reduces]
        else:
            assert group.rows is not None
            extent = group.rows
            shapes = [v.shape for v in self.reduces]
        candidates: dict[Size, None] = {extent: None}
        for shape in shapes:
            size: Size = 1
            for s in reversed(shape):
                size = multiply(size, s)
                if size != 1:
                    candidates[size] = None
        exact = [c for c in candidates if isinstance(c, int)]
        ordered: list[Size] = [c for c in candidates if not isinstance(c, int)]
        ordered = [extent] + [c for c in ordered if c is not extent] + sorted(exact, reverse=True)
        for inner in ordered:
            if modulo(extent, inner) == 0 and self._linear(extent, inner):
                return inner
        smallest = [c for c in exact if c > 1 and modulo(extent, c) == 0]
        return min(smallest, default=extent)

    def _reduced(self, node: Node) -> tuple[Size, ...]:
        axes = node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)
        return tuple(node.inputs[0].shape[a] for a in axes)

    def _linear(self, extent: Size, inner: Size) -> bool:
        """Whether every stored value is read linearly along an inner axis of this size."""
        if inner == 1 or inner == 0:
            return True
        lane = named("loop", "lane", 0, max(1, high(inner) - 1))
        outer = loop_index("outer", floor_divide(extent, inner))
        along = combine(multiply(outer, inner), lane, 1)
        self.shape = self._shape(inner)
        row: Size = outer
        column: Size = lane
        if self.reduces and self.order == "row":
            assert self.group.rows is not None
            row, column = loop_index("row", self.group.rows), along
        elif self.reduces:
            row, column = along, loop_index("column", self.group.columns)
        for value, is_reduce in self.expressions():
            if is_reduce:
                start = [(value.inputs[0], reduce_index(value, row, column))]
            else:
                if self.is_row_level(value) and self.order == "row":
                    continue
                start = [(value, self.index_at(value, row, column))]
            if not self._reads_linear(start, lane):
                return False
        return True

    def _shape(self, inner: Size) -> Group:
        """The group with rows filled in for elementwise work cut at `inner`."""
        g = self.group
        if self.reduces:
            return g
        return Group(g.kind, g.values, g.total, floor_divide(g.total, inner), "row", g.number)

    def _reads_linear(self, stack: list[tuple[Node, Any]], lane: Expr) -> bool:
        seen: set[Any] = set()
        first = True
        while stack:
            node, index = stack.pop()
            if (node, index) in seen:
                continue
            seen.add((node, index))
            if node in self.all_values and not (first and node in self.members):
                first = False
                if node in self.members:
                    continue
                offset = ravel_strides(index, row_major(node.shape))
                if coefficient(offset, lane) is None:
                    return False
                continue
            first = False
            if node.op in MOVEMENT:
                below, _ = MOVEMENT[node.op](node, index)
                stack.append((node.inputs[0], below))
            elif node.op is ops.concatenate:
                stack.extend((i, index) for i in node.inputs)
            elif node.op is ops.gather:
                self._gather_reads(node, index, lane, stack)
            elif node.op is not ops.random_bits:
                stack.extend((i, index) for i in node.inputs)
        return True

    def _gather_reads(self, node: Node, index: Index, lane: Expr, stack: list[Any]) -> None:
        """Follow a gather: through its source where its indices do not vary along the lane."""
        rank = len(node.inputs[1].shape)
        if any(lane in atoms(i) for i in index[:rank]):
            return  # a true gather, whatever the inner size
        x, axes = node.inputs[0], node.attrs["axes"]
        rest, full = iter(index[rank:]), []
        for a in range(len(x.shape)):
            if a in axes:
                k = axes.index(a)
                exact = symbolic(node.inputs[1 + k], index[:rank], self.all_values)
                full.append(0 if exact is None else exact)
            else:
                full.append(next(rest))
        stack.append((x, tuple(full)))

    def pick_lanes(self, inner: Size) -> int:
        """Vector lanes: a few registers' worth, fewer where much is computed."""
        widest = 4
        work = 0
        for node in self._inlined():
            if node.dtype.bits > 32 and (node.dtype.is_float or node.op in REDUCE):
                widest = 8
            work += 4 if node.op in COSTLY else 1
        many = 4 if work <= (24 if self.reduces else 12) else 2 if work <= 48 else 1
        if self.order == "column" and self.reduces:
            many = 4
        lanes = max(1, self.target.vector_bytes // widest) * many
        size = high(inner)
        while lanes > 1 and lanes >= 2 * size:
            lanes //= 2
        return lanes

    def _inlined(self) -> list[Node]:
        found: dict[Node, None] = {}
        stack = list(self.group.values)
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found[node] = None
            stack.extend(i for i in node.inputs if i not in self.all_values)
        return list(found)

    # ---- the Body -------------------------------------------------------------------------

    def lower(self) -> Body:
        """The Body; its parameters are `reads` then `stored`."""
        parameters = [(f"in{i}", self._memory(n, "value")) for i, n in enumerate(self.reads)]
        parameters += [(f"out{i}", self._memory(n, "result"))
                       for i, n in enumerate(self.group.stored)]  # fmt: skip
        self.b = BodyBuilder(self.name, parameters)
        self.inputs = dict(zip(self.reads, self.b.parameters))
        self.outputs = dict(zip(self.group.stored, self.b.parameters[len(self.reads) :]))
        self.e = Evaluator(self.b, self.inputs)
        inner = self.pick_inner()
        self.shape = self._shape(inner)
        self.inner, self.lanes = inner, self.pick_lanes(inner)
        if self.reduces and self.order == "column":
            grid = self.column_body()
        elif self.reduces:
            grid = self.row_body()
        elif turned := self.turned_reads():
            grid = self.turned_body(turned)
        else:
            grid = self.flat_body()
        return self.b.finish(grid, lanes=self.lanes, inner=inner)

    def _memory(self, node: Node, use: str) -> Memory:
        return Memory((product(node.shape),), node.dtype, "global", use)

    def lane_loop(
        self, start: Size, stop: Size, body: Callable[[Size, list[Node]], Sequence[Node]],
        carried: Sequence[Node] = (), size: Size | None = None, unroll: int = 1,
    ) -> list[Node]:  # fmt: skip
        """Vectors over [start, stop): whole ones, then one that is masked."""
        size = stop if size is None else size
        b, e, lanes = self.b, self.e, self.lanes
        span = combine(stop, start, -1)
        whole = multiply(floor_divide(span, lanes), lanes)
        middle = combine(start, whole, 1)

        def step(is_whole: bool) -> Callable[[Size, list[Node]], Sequence[Node]]:
            def run(base: Size, values: list[Node]) -> Sequence[Node]:
                with e.vector(base, lanes, stop if not is_whole else size, is_whole) as lane:
                    return body(lane, values)

            return run

        values = b.loop("i", start, middle, lanes, step(True), carried, unroll)
        if modulo(span, lanes) == 0:
            return values
        if isinstance(span, int) and isinstance(middle, int):
            return list(step(False)(middle, values))
        return b.loop("tail", middle, stop, lanes, step(False), values)

    def flat_body(self) -> tuple[Size, ...]:
        """Elementwise: rows of `inner` elements, long rows in blocks."""
        rows, inner = self.shape.rows, self.inner
        assert rows is not None
        block = BLOCK
        blocks: Size = ceil_divide(inner, block) if high(inner) > 2 * block else 1
        p = self.b.program(0, multiply(rows, blocks))
        row = floor_divide(p, blocks)
        stored = self.group.stored

        def body(lane: Size, _: list[Node]) -> Sequence[Node]:
            self.write_all(row, lane)
            return ()

        lane = named("loop", "lane", 0, max(1, high(inner) - 1))
        with self.e.scope():
            for v in stored:
                self.e.hoist(v, self.index_at(v, row, lane), [lane])
            if blocks == 1:
                self.lane_loop(0, inner, body)
            else:
                start = multiply(modulo(p, blocks), block)
                stop = minimum(combine(start, block, 1), inner)
                self.lane_loop(start, stop, body, size=inner)
        return (multiply(rows, blocks),)

    # ---- turned: reads that run across the rows -------------------------------------------

    def turned_reads(self) -> list[tuple[Node, Index]]:
        """Reads that jump along the lanes but are contiguous along rows: worth turning."""
        side, inner, rows = self.target.lanes(float32), self.inner, self.shape.rows
        if not isinstance(inner, int) or not isinstance(rows, int) or side < 4:
            return []
        if inner < side or rows % side or inner * rows < 1 << 12:
            return []
        lane = named("loop", "lane", 0, max(1, inner - 1))
        block, turn = loop_index("block", rows // side), named("loop", "turn", 0, side - 1)
        row = combine(multiply(block, side), turn, 1)
        found: dict[tuple[Node, Index], None] = {}
        for v in self.group.stored:
            for node, index in stored_reads([(v, self.index_at(v, row, lane))], self.inputs):
                offset = ravel_strides(index, row_major(node.shape))
                if coefficient(offset, lane) in (0, 1):
                    continue
                if coefficient(offset, turn) != 1 or coefficient(offset, lane) is None:
                    return []
                found[(node, index)] = None
        return list(found)

    def turned_body(self, reads: list[tuple[Node, Index]]) -> tuple[Size, ...]:
        """Square tiles: read along rows, turned in registers, computed and written along lanes."""
        side, inner, rows = self.target.lanes(float32), self.inner, self.shape.rows
        assert isinstance(inner, int) and isinstance(rows, int)
        self.lanes = side
        b, e = self.b, self.e
        p = b.program(0, rows // side)
        lane = named("loop", "lane", 0, max(1, inner - 1))
        block, turn = loop_index("block", rows // side), named("loop", "turn", 0, side - 1)

        def place(index: Index, at_lane: Size, at_turn: Size) -> Index:
            mapping = {lane: at_lane, turn: at_turn}
            if isinstance(block, Expr):
                mapping[block] = p
            return tuple(substitute(i, mapping) for i in index)

        def square(base: Size, _: list[Node]) -> Sequence[Node]:
            lines: list[list[Node]] = []
            for node, index in reads:
                rows_ = []
                for k in range(side):
                    at = place(index, combine(base, k, 1), 0)
                    offset = ravel_strides(at, row_major(node.shape))
                    rows_.append(b.load(self.inputs[node], (offset,), (side,), (0,)))
                turned = b.add(tile_ops.transpose(b.add(tile_ops.stack_rows(*rows_)), order=(1, 0)))
                lines.append([b.add(tile_ops.extract(turned, index=k)) for k in range(side)])
            for k in range(side):
                row = combine(multiply(p, side), k, 1)
                with e.vector(base, side, inner, True) as own:
                    for (node, index), line in zip(reads, lines):
                        e.bind(node, place(index, own, k), b.cast(line[k], wide(node.dtype)))
                    self.write_all(row, own)
            return ()

        def rest(at: Size, _: list[Node]) -> Sequence[Node]:
            row = combine(multiply(p, side), at, 1)
            with e.scope(), e.vector(inner // side * side, side, inner, False) as own:
                self.write_all(row, own)
            return ()

        b.loop("i", 0, inner // side * side, side, square)
        if inner % side:
            b.loop("turn", 0, side, 1, rest)
        return (rows // side,)

    def write_all(self, row: Size, lane: Size) -> None:
        """Evaluate and store every wanted value at (row, lane)."""
        for v in self.group.stored:
            index = self.index_at(v, row, lane)
            x = self.e.value(v, index)
            self.e.bind(v, index, x)
            self.e.store(self.outputs[v], x, ravel_strides(index, row_major(v.shape)))

    # ---- rows -----------------------------------------------------------------------------

    def row_body(self) -> tuple[Size, ...]:
        """One row a program."""
        rows = self.group.rows
        assert rows is not None
        row = self.b.program(0, rows)
        stages = max(self.levels[v] for v in self.reduces)
        element = [v for v in self.group.stored if not self.is_row_level(v)]
        self.plan_stash(row, stages, element)
        for stage in range(1, stages + 1):
            reduces = [v for v in self.reduces if self.levels[v] == stage]
            writes = [v for v in element if self.levels[v] == stage - 1]
            self.row_stage(row, stage, reduces, writes)
            self.row_results(row, stage)
        last = [v for v in element if self.levels[v] == stages]
        if last:
            self.row_stage(row, stages + 1, [], last)
        return (rows,)

    def row_results(self, row: Size, stage: int) -> None:
        """Write what is known of the row after a stage."""
        for v in self.group.stored:
            if self.is_row_level(v) and self.levels[v] == stage:
                index = unravel(row, v.shape)
                x = self.e.value(v, index)
                self.e.store(self.outputs[v], x, ravel_strides(index, row_major(v.shape)))

    def loop_expressions(self, reduces: Sequence[Node], writes: Sequence[Node], row: Size,
                         column: Size) -> list[tuple[Node, Index]]:  # fmt: skip
        """What one loop evaluates, and where."""
        found = [(v.inputs[0], reduce_index(v, row, column)) for v in reduces]
        return found + [(v, self.index_at(v, row, column)) for v in writes]

    def plan_stash(self, row: Size, stages: int, element: Sequence[Node]) -> None:
        """Costly values that several loops need are kept in scratch, if a row is not too long."""
        self.stash: dict[Any, Node] = {}
        self.filled: set[Any] = set()
        columns = self.group.columns
        if not isinstance(columns, int) or columns * 4 > STASH_BYTES:
            return
        lane = named("loop", "lane", 0, max(1, high(self.inner) - 1))
        column = self._column(loop_index("outer", floor_divide(columns, self.inner)), lane)
        counts: dict[Any, int] = {}
        for stage in range(1, stages + 2):
            reduces = [v for v in self.reduces if self.levels[v] == stage]
            writes = [v for v in element if self.levels[v] == min(stage - 1, stages)]
            for key in self._costly(self.loop_expressions(reduces, writes, row, column), lane):
                counts[key] = counts.get(key, 0) + 1
        wanted = [k for k, n in counts.items() if n > 1][:4]
        for key in wanted:
            self.stash[key] = self.b.allocate((columns,), wide(key[0].dtype), "l1")

    def _column(self, outer: Size, lane: Size) -> Size:
        return combine(multiply(outer, self.inner), lane, 1)

    def _costly(self, stack: list[tuple[Node, Index]], lane: Expr) -> set[Any]:
        """The costly inlined Nodes an expression reaches, at lane-dependent indices."""
        found: set[Any] = set()
        seen: set[Any] = set()
        while stack:
            key = stack.pop()
            node, index = key
            if key in seen or node in self.inputs or node in self.reduces:
                continue
            seen.add(key)
            if node.op in COSTLY and any(lane in atoms(i) for i in index):
                found.add(key)
            if node.op in MOVEMENT:
                below, _ = MOVEMENT[node.op](node, index)
                stack.append((node.inputs[0], below))
            elif node.op.group in ("unary", "binary", "compare", "ternary"):
                stack.extend((i, index) for i in node.inputs)
        return found

    def row_stage(self, row: Size, stage: int, reduces: Sequence[Node],
                  writes: Sequence[Node]) -> None:  # fmt: skip
        """One loop over the columns of a row."""
        b, e = self.b, self.e
        columns = self.group.columns
        outer_size = floor_divide(columns, self.inner)
        lane = named("loop", "lane", 0, max(1, high(self.inner) - 1))
        outer_atom = loop_index("outer", outer_size)
        at = self.loop_expressions(reduces, writes, row, self._column(outer_atom, lane))
        inner_atoms = [a for a in (outer_atom, lane) if isinstance(a, Expr)]
        for node, index in at:
            e.hoist(node, index, inner_atoms)
        start = [x for v in reduces for x in self.start_values(v)]
        needed = self._costly(list(at), lane) & set(self.stash)
        fill = needed - self.filled
        load = needed & self.filled

        def vectors(outer: Size, values: list[Node]) -> list[Node]:
            column = self._column(outer, lane)

            def body(_: Size, carried: list[Node]) -> Sequence[Node]:
                for key in load:
                    node, index = self._moved(key, outer_atom, outer)
                    e.bind(node, index, e._load(self.stash[key], column))
                new = self.feed(reduces, row, column, carried)
                for v in writes:
                    index = self.index_at(v, row, column)
                    x = e.value(v, index)
                    e.store(self.outputs[v], x, ravel_strides(index, row_major(v.shape)))
                for key in fill:
                    e.store(self.stash[key], e.value(*self._moved(key, outer_atom, outer)), column)
                return new

            return self.lane_loop(0, self.inner, body, values)

        if outer_size == 1:
            values = vectors(0, start)
        else:
            def nest(outer: Size, carried: list[Node]) -> Sequence[Node]:
                with e.scope():
                    return vectors(outer, carried)

            values = b.loop("outer", 0, outer_size, 1, nest, start)
        self.filled |= fill
        self.finish_rows(row, reduces, values)

    def _moved(self, key: Any, outer_atom: Size, outer: Size) -> Any:
        node, index = key
        if not isinstance(outer_atom, Expr):
            return key
        return node, tuple(substitute(i, {outer_atom: outer}) for i in index)

    def start_values(self, node: Node) -> list[Node]:
        """Accumulators of a reduction before its loop."""
        dtype = wide(node.inputs[0].dtype)
        if node.op is ops.argmax:
            best = self.b.constant(dtype.lowest, dtype, (self.lanes,))
            first = 1 << 62 if self.group.columns != 0 else 0  # of nothing: index 0
            return [best, self.b.constant(first, int64, (self.lanes,))]
        return [self.b.constant(identity(KINDS[node.op], dtype), dtype, (self.lanes,))]

    def feed(self, reduces: Sequence[Node], row: Size, column: Size,
             carried: list[Node]) -> list[Node]:  # fmt: skip
        """Accumulators after one vector."""
        b, e, result = self.b, self.e, []
        position = 0
        for v in reduces:
            x = e.value(v.inputs[0], reduce_index(v, row, column))
            x = b.broadcast(x, (self.lanes,))
            if v.op is ops.argmax:
                best, where = carried[position : position + 2]
                position += 2
                result += self.better(x, b.broadcast(b.index(column), (self.lanes,)), best, where)
                continue
            kind, acc = KINDS[v.op], carried[position]
            position += 1
            new = b.apply(COMBINE[kind], acc, x)
            result.append(new if e.mask is None else b.apply("where", e.mask, new, acc))
        return result

    def better(self, x: Node, place: Node, best: Node, where: Node) -> list[Node]:
        """The larger of two (value, index) pairs; the first nan wins, then the lower index."""
        b = self.b
        take = b.apply("less", best, x)
        if x.dtype.is_float:
            new_nan = b.apply("not_equal", x, x)
            old_number = b.apply("equal", best, best)
            take = b.apply("bit_or", take, b.apply("bit_and", new_nan, old_number))
        first = b.apply("equal", where, b.constant(1 << 62, int64))
        take = b.apply("bit_or", take, first)
        if self.e.mask is not None:
            take = b.apply("bit_and", take, self.e.mask)
        return [b.apply("where", take, x, best), b.apply("where", take, place, where)]

    def finish_rows(self, row: Size, reduces: Sequence[Node], values: list[Node]) -> None:
        """Combine lanes and say what each reduction gave."""
        b, position = self.b, 0
        for v in reduces:
            index = unravel(row, v.shape)
            if v.op is ops.argmax:
                best, where = values[position : position + 2]
                position += 2
                self.e.bind(v, index, self.best_lane(best, where))
                continue
            kind = KINDS[v.op]
            total = values[position]
            position += 1
            if total.shape:
                total = b.add(tile_ops.reduce(total, axis=0, kind=kind))
            self.e.bind(v, index, total)

    def best_lane(self, best: Node, where: Node) -> Node:
        """The index of the first largest over lanes."""
        b = self.b
        if not best.shape:
            return where
        top = b.add(tile_ops.reduce(best, axis=0, kind="max"))
        same = b.apply("equal", best, b.broadcast(top, best.shape))
        if best.dtype.is_float:
            same = b.apply("bit_or", same, b.apply("not_equal", best, best))
            nan = b.broadcast(b.apply("not_equal", top, top), best.shape)
            number = b.apply("equal", best, best)
            same = b.apply("bit_and", same, b.apply("bit_not", b.apply("bit_and", nan, number)))
        place = b.apply("where", same, where, b.constant(1 << 62, int64))
        return b.add(tile_ops.reduce(place, axis=0, kind="min"))

    # ---- columns --------------------------------------------------------------------------

    def column_body(self) -> tuple[Size, ...]:
        """A block of neighbouring results a program."""
        rows, inner = self.group.rows, self.inner
        assert rows is not None
        outer_size = floor_divide(rows, inner)
        block = min(COLUMN_BLOCK, max(self.lanes, high(inner)))
        if high(inner) >= 2 * self.lanes:
            share = -(-high(inner) // (2 * max(2, self.target.cores)) // self.lanes) * self.lanes
            block = min(block, max(self.lanes, share))
        blocks = ceil_divide(inner, block)
        p = self.b.program(0, multiply(outer_size, blocks))
        outer = floor_divide(p, blocks)
        start = multiply(modulo(p, blocks), block)
        stop = minimum(combine(start, block, 1), inner)
        self.outer_row, self.start, self.stop = outer, start, stop
        self.places = {v: self.accumulators(v, block) for v in self.reduces}
        stages = max(self.levels[v] for v in self.reduces)
        for stage in range(1, stages + 1):
            self.column_stage([v for v in self.reduces if self.levels[v] == stage], stage)
        self.column_results(stages)
        return (multiply(outer_size, blocks),)

    def accumulators(self, node: Node, block: int) -> list[Node]:
        """Scratch for the running results of a reduction."""
        size = -(-block // self.lanes) * self.lanes
        places = [self.b.allocate((size,), wide(node.inputs[0].dtype), "l1")]
        if node.op is ops.argmax:
            places.append(self.b.allocate((size,), int64, "l1"))
        return places

    def over_block(self, body: Callable[[Size, Size], None]) -> None:
        """body(row, place in the block) for each vector of results."""

        def run(lane: Size, _: list[Node]) -> Sequence[Node]:
            row = combine(multiply(self.outer_row, self.inner), lane, 1)
            body(row, combine(lane, self.start, -1))
            return ()

        self.lane_loop(self.start, self.stop, run, size=self.inner)

    def peek(self, memory: Node, place: Size) -> Node:
        """Running results; the scratch is a whole number of vectors, so no mask is needed."""
        start = substitute(place, {self.e.lane: self.e.base}) if self.e.lane is not None else place
        return self.b.load(memory, (start,), (self.lanes,), (0,))

    def poke(self, memory: Node, value: Node, place: Size) -> None:
        """Put running results back."""
        start = substitute(place, {self.e.lane: self.e.base}) if self.e.lane is not None else place
        self.b.store(memory, self.b.broadcast(value, (self.lanes,)), (start,), (0,))

    def known_results(self, stage: int, row: Size, place: Size) -> None:
        """Bind the reductions of earlier stages at this place."""
        for v in self.reduces:
            if self.levels[v] < stage:
                index = unravel(row, v.shape)
                self.e.bind(v, index, self.peek(self.places[v][-1], place))

    def column_stage(self, reduces: Sequence[Node], stage: int) -> None:
        """Walk the reduced elements, a few at a time, over the block."""

        def clear(row: Size, place: Size) -> None:
            for v in reduces:
                for memory, x in zip(self.places[v], self.start_values(v)):
                    self.poke(memory, x, place)

        self.over_block(clear)
        columns = self.group.columns
        many = 8 if high(columns) >= 64 else 1
        whole = multiply(floor_divide(columns, many), many)

        def walk(count: int) -> Callable[[Size, list[Node]], Sequence[Node]]:
            def at(column: Size, _: list[Node]) -> Sequence[Node]:
                def body(row: Size, place: Size) -> None:
                    self.known_results(stage, row, place)
                    values = [self.peek(m, place) for v in reduces for m in self.places[v]]
                    for k in range(count):
                        values = self.feed(reduces, row, combine(column, k, 1), values)
                        if count > 1:
                            self.ask_ahead(reduces, row, combine(column, count + k, 1))
                    memories = [m for v in reduces for m in self.places[v]]
                    for memory, x in zip(memories, values):
                        self.poke(memory, x, place)

                with self.e.scope():
                    self.over_block(body)
                return ()

            return at

        self.b.loop("column", 0, whole, many, walk(many))
        if modulo(columns, many) != 0:
            self.b.loop("rest", whole, columns, 1, walk(1))

    def ask_ahead(self, reduces: Sequence[Node], row: Size, column: Size) -> None:
        """Prefetch what a later turn reads: each row is a page of its own, unknown to hardware."""
        e, b = self.e, self.b
        assert e.lane is not None
        starts = [(v.inputs[0], reduce_index(v, row, column)) for v in reduces]
        for node, index in stored_reads(starts, self.inputs):
            offset = ravel_strides(index, row_major(node.shape))
            if coefficient(offset, e.lane) != 1:
                continue
            for part in range(0, self.lanes, max(1, 64 // node.dtype.size)):
                at = substitute(offset, {e.lane: combine(e.base, part, 1)})
                b.add(tile_ops.prefetch(self.inputs[node], b.index(at)))

    def column_results(self, stages: int) -> None:
        """Write results and what follows from them."""

        def body(row: Size, place: Size) -> None:
            self.known_results(stages + 1, row, place)
            for v in self.group.stored:
                index = unravel(row, v.shape)
                x = self.e.value(v, index)
                self.e.store(self.outputs[v], x, ravel_strides(index, row_major(v.shape)))

        self.over_block(body)
