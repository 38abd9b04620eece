"""The space a Region of elementwise values and reductions is computed over.

Which axis the vectors run along, how many lanes they have, and loops over them. What every
lowering of loops stands on. Invariant: the vector axis is one along which every read is linear,
where there is such an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.config import invariant
from ..core.dtype import DType, float64
from ..core.errors import InternalError
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import (
    Expr,
    Size,
    atoms,
    coefficient,
    floor_divide,
    high,
    loop_index,
    modulo,
    named,
)
from ..ir.types import Memory, product
from ..tile.build import BodyBuilder
from .access import MOVEMENT, Index, Place, below, offset_of, places, unravel
from .evaluate import Evaluator, symbolic
from .fuse import COSTLY, REDUCE, Region, leaves_of, own_index

Line = Callable[[Size, Size, Size, list[Node]], list[Node]]
CHAIN = 64  # additions to one accumulator before it is added to a total
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


def is_blocked(node: Node) -> bool:
    """Whether a long reduction is a sum whose error grows with each addition to one accumulator:
    it is added in blocks of `CHAIN` additions, whose totals are added in float64."""
    dtype = node.inputs[0].dtype
    return node.op is ops.sum_ and dtype.is_float and dtype is not float64


class LoopSpace:
    """A Region, its Body under construction, and the shape of its work."""

    b: BodyBuilder
    e: Evaluator
    inputs: dict[Node, Node]
    outputs: dict[Node, Node]
    shape: Region
    inner: Size
    lanes: int
    strict = False  # whether loaded indices must not vary along a line
    least_line = 32  # elements of a line that is worth being one

    def __init__(self, group: Region, values: set[Node], target: Target, name: str) -> None:
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
        """For each value, how many reductions of the Region must come before it is known."""
        found: dict[Node, int] = {}
        for v in self.group.values:
            inside = [u for u in leaves_of(v, self.all_values) if u in self.members]
            level = max((found[u] for u in inside), default=0)
            found[v] = level + 1 if v in self.reduces else level
        return found

    def is_row_level(self, node: Node) -> bool:
        """Whether a value has one element per row of a Region with reductions."""
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
        return [
            (v, v in self.reduces)
            for v in self.group.values
            if v in self.reduces or v in self.group.stored
        ]

    def pick_inner(self) -> Size:
        """How many neighbouring elements the vector axis has: as many as stay linear. Loaded
        indices change between lines, if those are long enough."""
        extent, ordered = self.cuts()
        if self.reduces and self.order == "row" and invariant():
            return extent  # the order of a sum follows from its length alone
        for self.strict in (True, False):
            for inner in ordered:
                if self.strict and high(inner) < self.least_line:
                    continue
                if modulo(extent, inner) == 0 and self._linear(extent, inner):
                    return inner
        exact = [c for c in ordered if isinstance(c, int)]
        smallest = [c for c in exact if c > 1 and modulo(extent, c) == 0]
        return min(smallest, default=extent)

    def cuts(self) -> tuple[Size, list[Size]]:
        """The elements along which vectors may run, and where that may be cut, longest first."""
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
                size = size * s
                if size != 1:
                    candidates[size] = None
        exact = [c for c in candidates if isinstance(c, int)]
        ordered: list[Size] = [c for c in candidates if not isinstance(c, int)]
        ordered = [extent] + [c for c in ordered if c is not extent] + sorted(exact, reverse=True)
        return extent, ordered

    def _reduced(self, node: Node) -> tuple[Size, ...]:
        axes = node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)
        return tuple(node.inputs[0].shape[a] for a in axes)

    def _linear(self, extent: Size, inner: Size) -> bool:
        """Whether every stored value is read linearly along an inner axis of this size."""
        if inner == 1 or inner == 0:
            return True
        lane = named("loop", "lane", 0, max(1, high(inner) - 1))
        outer = loop_index("outer", floor_divide(extent, inner))
        along = outer * inner + lane
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
                start = (value.inputs[0], reduce_index(value, row, column))
            else:
                if self.is_row_level(value) and self.order == "row":
                    continue
                start = (value, self.index_at(value, row, column))
            if not self._reads_linear(start, lane):
                return False
        return True

    def _shape(self, inner: Size) -> Region:
        """The Region with rows filled in for elementwise work cut at `inner`."""
        g = self.group
        if self.reduces:
            return g
        return Region(g.kind, g.values, g.total, floor_divide(g.total, inner), "row", g.number)

    def _reads_linear(self, start: Place, lane: Expr) -> bool:
        """Whether all that is stored and read below a value is read linearly along the lane."""
        crooked: list[Node] = []

        def step(node: Node, index: Index) -> Sequence[Place]:
            if node in self.all_values and not (node is start[0] and node in self.members):
                if node not in self.members and coefficient(offset_of(node, index), lane) is None:
                    crooked.append(node)
                return ()
            if node.op in MOVEMENT:
                return below(node, index)
            if node.op is ops.gather:
                found = self._gather_reads(node, index, lane)
                crooked.extend([node] if found is None else [])
                return found or ()
            return [(i, index) for i in node.inputs] if node.op is not ops.random_bits else ()

        for _ in places([start], step):
            if crooked:
                break
        return not crooked

    def _gather_reads(self, node: Node, index: Index, lane: Expr) -> list[Place] | None:
        """Where a gather goes on: at its source where its indices do not vary along the lane; None
        where they are loaded ones that do, if that counts."""
        rank = len(node.inputs[1].shape)
        if any(lane in atoms(i) for i in index[:rank]):
            known = not self.strict or all(
                symbolic(i, index[:rank], self.all_values) is not None for i in node.inputs[1:]
            )
            return [] if known else None
        x, axes = node.inputs[0], node.attrs["axes"]
        rest, full = iter(index[rank:]), []
        for a in range(len(x.shape)):
            if a in axes:
                k = axes.index(a)
                exact = symbolic(node.inputs[1 + k], index[:rank], self.all_values)
                full.append(0 if exact is None else exact)
            else:
                full.append(next(rest))
        return [(x, tuple(full))]

    def pick_lanes(self, inner: Size) -> int:
        """Vector lanes: a few registers' worth, fewer where much is computed."""
        widest = 4
        work = 0
        for node in self._inlined():
            if node.dtype.bits > 32 and (node.dtype.is_float or node.op in REDUCE):
                widest = 8
            work += 4 if node.op in COSTLY else 1
        many = 4 if work <= (24 if self.reduces else 12) else 2 if work <= 48 else 1
        if self.reduces and (self.order == "column" or invariant()):
            many = 4
        if self.reduces and self.order == "row" and invariant():
            widest = 8  # whatever else is computed in the same loop
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

    def _memory(self, node: Node, use: str) -> Memory:
        return Memory((product(node.shape),), node.dtype, "global", use)

    def lane_loop(
        self,
        start: Size,
        stop: Size,
        body: Callable[[Size, list[Node]], Sequence[Node]],
        carried: Sequence[Node] = (),
        size: Size | None = None,
        unroll: int = 1,
    ) -> list[Node]:
        """Vectors over [start, stop): whole ones, then one that is masked."""
        size = stop if size is None else size
        b, e, lanes = self.b, self.e, self.lanes
        span = stop - start
        whole = floor_divide(span, lanes) * lanes
        middle = start + whole

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

    # ---- long sums ------------------------------------------------------------------------

    def over_lines(
        self,
        blocked: Sequence[bool],
        fresh: Sequence[Node],
        lines: Size,
        span: tuple[Size, Size],
        run: Line,
        values: list[Node],
    ) -> list[Node]:
        """run(line, first, last, accumulators) over the span of each line of `inner` elements.

        Accumulators that are `blocked` start anew, as `fresh` ones, after CHAIN additions.
        """
        b, e = self.b, self.e
        turns = -(-high(span[1] - span[0]) // self.lanes)

        def whole(first: Size, last: Size, carried: list[Node]) -> list[Node]:
            def nest(line: Size, inside: list[Node]) -> Sequence[Node]:
                with e.scope():
                    return run(line, *span, inside)

            return b.loop("outer", first, last, 1, nest, carried)

        if high(lines) * turns <= CHAIN or not any(blocked):
            return run(0, *span, values) if lines == 1 else whole(0, lines, values)
        totals = [b.cast(x, float64) if t else x for t, x in zip(blocked, values)]
        if lines != 1 and turns <= CHAIN:
            totals = self.in_blocks(blocked, fresh, (0, lines), CHAIN // turns, whole, totals)
        else:

            def line(number: Size, carried: list[Node]) -> list[Node]:
                with e.scope():
                    return self.in_blocks(
                        blocked,
                        fresh,
                        span,
                        CHAIN * self.lanes,
                        lambda *x: run(number, *x),
                        carried,
                    )

            totals = line(0, totals) if lines == 1 else b.loop("outer", 0, lines, 1, line, totals)
        return [b.cast(x, own.dtype) for x, own in zip(totals, fresh)]

    def over_span(
        self,
        blocked: Sequence[bool],
        fresh: list[Node],
        span: tuple[Size, Size],
        block: int,
        run: Callable[[Size, Size, list[Node]], list[Node]],
    ) -> list[Node]:
        """run(first, last, accumulators) over a span; where it is long, in blocks."""
        b = self.b
        if not any(blocked) or high(span[1] - span[0]) <= block:
            return run(*span, fresh)
        totals = [b.cast(x, float64) if t else x for t, x in zip(blocked, fresh)]
        totals = self.in_blocks(blocked, fresh, span, block, run, totals)
        return [b.cast(x, own.dtype) for x, own in zip(totals, fresh)]

    def in_blocks(
        self,
        blocked: Sequence[bool],
        fresh: Sequence[Node],
        span: tuple[Size, Size],
        block: int,
        run: Callable[[Size, Size, list[Node]], list[Node]],
        totals: list[Node],
    ) -> list[Node]:
        """run(first, last, accumulators) over a span, a block at a time, added to totals."""
        b, (start, stop) = self.b, span

        def added(first: Size, last: Size, carried: list[Node]) -> list[Node]:
            own = [f if t else x for t, f, x in zip(blocked, fresh, carried)]
            return [
                b.apply("add", x, b.cast(new, float64)) if t else new
                for t, x, new in zip(blocked, carried, run(first, last, own))
            ]

        def turn(at: Size, carried: list[Node]) -> Sequence[Node]:
            with self.e.scope():
                return added(at, at + block, carried)

        size = stop - start
        middle = start + floor_divide(size, block) * block
        totals = b.loop("block", start, middle, block, turn, totals)
        return totals if modulo(size, block) == 0 else added(middle, stop, totals)
