"""Loops over lines of elements: vectors with a masked last one, and long sums in blocks.

Invariant: accumulators of sums whose error grows take few additions; their totals are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.dtype import float64
from ..ir.node import Node
from ..ir.symbol import Size, floor_divide, high, modulo
from .sheet import Sheet

Step = Callable[[Size, list[Node]], Sequence[Node] | None]
Line = Callable[[Size, Size, Size, list[Node]], list[Node]]
CHAIN = 64  # additions to one accumulator before it is added to a total


class Lines:
    """Loops of one Body whose vectors or tiles have so many lanes."""

    def __init__(self, sheet: Sheet, lanes: int) -> None:
        self.b, self.e, self.lanes = sheet.b, sheet.e, lanes

    def lane_loop(
        self,
        start: Size,
        stop: Size,
        body: Step,
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
                    return body(lane, values) or ()

            return run

        values = b.loop("i", start, middle, lanes, step(True), carried, unroll)
        if modulo(span, lanes) == 0:
            return values
        if isinstance(span, int) and isinstance(middle, int):
            return list(step(False)(middle, values))
        return b.loop("tail", middle, stop, lanes, step(False), values)

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
