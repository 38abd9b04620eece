"""Sums of exp(x - max): found in the sweep that finds the max.

A thread keeps one largest value of all its elements so far, and the sum of what it took with
respect to that; a larger one shrinks the sum. The tiles of a turn are first combined element by
element (maxima of 16-bit floats as they are, two at a time), so that a turn has one shift, and
one exponential for shrinking, in each thread.

Invariant: the shift of a sum is finite, so that an infinite element gives inf or 0, not nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from ...core.dtype import DType, float32
from ...graph import ops
from ...ir.node import Node, walk
from ...ir.symbol import Size, modulo
from ...tile import ops as tile_ops
from ..access import MOVEMENT, unravel
from ..evaluate import wide
from ..lines import Online
from ..space import reduce_index
from .space_threads import ThreadPart, ThreadSpace
from .tiles import ThreadSheet

FINITE, FINITE_WIDE = 3.4028234663852886e38, 1.7e308  # least and most of a shift

Part = tuple[Node, Node, "Node | None"]  # of a tile: values, their places, a mask


def find_online(space: ThreadSpace) -> list[Online]:
    """Sums of exp(x - max of the row): they need no sweep of their own."""
    found = []
    for v in space.reduces:
        if v.op is not ops.sum_ or space.levels[v] != 2:
            continue
        e = _through_casts(v.inputs[0])
        if e.op is not ops.exp or e.inputs[0].op is not ops.subtract:
            continue
        x, shift = e.inputs[0].inputs
        if any(space.levels[u] for u in own_below(space, x)):
            continue
        first = [u for u in own_below(space, shift) if u.op is ops.max_ and space.levels[u] == 1]
        if first and _per_row(space, shift):
            found.append(Online(v, first[0], x, shift))
    return found


def own_below(space: ThreadSpace, node: Node) -> list[Node]:
    """The Region's own values that an expression rests on, itself included."""

    def step(current: Node) -> Sequence[Node]:
        own = current in space.members or current not in space.all_values
        return current.inputs if own and current not in space.reduces else ()

    return [n for n in walk([node], step) if n in space.members]


def _per_row(space: ThreadSpace, node: Node) -> bool:
    """Whether a value is the same for all columns of a row."""
    while node.op in MOVEMENT:
        if node.op is ops.expand and space.is_per_row(node.inputs[0]):
            return True
        node = node.inputs[0]
    return space.is_per_row(node)


class OnlineSums(ThreadPart):
    """Accumulators of sums of exponentials, beside the largest value on which they rest."""

    def __init__(self, space: ThreadSpace, sheet: ThreadSheet, lanes: int) -> None:
        super().__init__(space, sheet)
        self.lanes = lanes

    def per_thread(self) -> tuple[int]:
        """The shape of what each thread has one of."""
        return (self.lanes // self.space.vector(),)

    def run(self) -> int:
        """Neighbours that a thread holds: as many as rows are aligned to."""
        run = self.space.vector()
        while modulo(self.space.region.columns, run) != 0:
            run //= 2
        return run

    def start(self, online: Online) -> list[Node]:
        """The sum, and the factor and level of its terms, before a sweep."""
        dtype = wide(online.total.dtype)
        return [self.b.constant(x, dtype, self.per_thread()) for x in (0.0, 1.0, -_most(dtype))]

    def take_largest(self, old: Node, parts: Sequence[Part]) -> Node:
        """The largest of each thread's elements with some tiles taken in."""
        b = self.b
        given = [x for x, _, _ in parts]
        if all(_narrow(x) for x in given):  # rounding to more bits keeps their order
            given = [x.inputs[0] for x in given]
        tiles = [b.where(mask, x, float("-inf")) for x, (_, _, mask) in zip(given, parts)]
        most = reduce(lambda x, y: b.apply("maximum", x, y), tiles)
        own = self._within(self._by_thread(most), "max")
        return b.apply("maximum", old, b.cast(own, old.dtype))

    def take_exponentials(
        self, largest: Node, parts: Sequence[Part], total: Node, before: Node, scaled_shift: Node
    ) -> list[Node]:
        """The sum, its factor and scaled shift with some tiles taken in, whose largest is known."""
        b = self.b
        factor, after = self.e.exponent(largest)
        most = b.constant(_most(after.dtype), after.dtype)
        after = b.apply("maximum", after, b.apply("negative", most))
        after = b.apply("minimum", after, most)
        columns = [b.add(tile_ops.reshape(x, shape=(1, *x.shape, 1))) for x in (factor, after)]
        terms = []
        for x, _, mask in parts:
            term = self.e.raised(self._by_thread(x), *columns)
            own = None if mask is None else self._by_thread(mask)
            terms.append(b.where(own, term, 0.0))
        grown = reduce(lambda x, y: b.apply("add", x, y), terms)
        grown = self._within(grown, "sum")
        shrink = self.e.power(b.apply("subtract", scaled_shift, after))
        if factor.dtype is float32:  # a vast largest has come: nothing before weighs
            same, none = b.apply("equal", before, factor), b.constant(0.0, float32)
            shrink = b.apply("where", same, shrink, none)
        return [b.apply("multiply_add", total, shrink, grown), factor, after]

    def finish(
        self,
        online: Online,
        row: Size,
        largest: Node,
        total: Node,
        before: Node,
        scaled_shift: Node,
    ) -> None:
        """Combine the lanes, by the shift of the whole row."""
        b = self.b
        shift = self.e.value(online.shift, reduce_index(online.total, row, 0))
        factor, after = self.e.exponent(shift)
        apart = b.apply("subtract", scaled_shift, after)
        if factor.dtype is float32:  # one of them is vast: so is the difference
            same = b.apply("equal", before, factor)
            apart = b.apply("where", same, apart, b.apply("subtract", largest, shift))
        scale = self.e.power(apart)
        whole = b.add(tile_ops.reduce(b.apply("multiply", total, scale), axis=0, kind="sum"))
        self.e.bind(online.total, unravel(row, online.total.shape), whole)

    def _by_thread(self, x: Node) -> Node:
        """A line of lanes as (rounds, threads, neighbours)."""
        (threads,), run = self.per_thread(), self.run()
        return self.b.add(tile_ops.reshape(x, shape=(self.lanes // threads // run, threads, run)))

    def _within(self, x: Node, kind: str) -> Node:
        """What each thread holds, reduced."""
        x = self.b.add(tile_ops.reduce(x, axis=2, kind=kind))
        return self.b.add(tile_ops.reduce(x, axis=0, kind=kind))


def _most(dtype: DType) -> float:
    return FINITE if dtype is float32 else FINITE_WIDE


def _narrow(x: Node) -> bool:
    """Whether a tile is one of 16-bit floats, cast."""
    return x.op is tile_ops.cast and x.inputs[0].dtype.is_float and x.inputs[0].dtype.bits == 16


def _through_casts(node: Node) -> Node:
    """Below casts of floats to wider floats: exp is computed wide in any case."""
    while node.op is ops.cast and node.dtype.is_float and node.inputs[0].dtype.is_float:
        if node.dtype.bits < node.inputs[0].dtype.bits:
            break
        node = node.inputs[0]
    return node
