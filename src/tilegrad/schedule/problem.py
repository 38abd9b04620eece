"""A dot as batch x (m, k) @ (k, n): its sizes, and where an index reads the operands.

Invariant: (batch, m, n) numbers the elements of the result in row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.node import Node
from ..ir.symbol import Expr, Size, ceil_divide, coefficient, floor_divide, modulo
from ..ir.types import product
from ..tile.build import BodyBuilder
from .access import Index, offset_of, through, unravel
from .evaluate import Evaluator


class Problem:
    """One dot: sizes, and how an (batch, m, k, n) index reads the operands."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.a, self.b = node.inputs
        batch, contract = node.attrs["batch"], node.attrs["contract"]
        self.batch, self.contract = batch, contract
        self.free_a = [i for i in range(len(self.a.shape)) if i not in batch[0] + contract[0]]
        self.free_b = [i for i in range(len(self.b.shape)) if i not in batch[1] + contract[1]]
        self.batch_shape = tuple(self.a.shape[i] for i in batch[0])
        self.m_shape = tuple(self.a.shape[i] for i in self.free_a)
        self.n_shape = tuple(self.b.shape[i] for i in self.free_b)
        self.k_order = self._k_order()
        self.k_shape = tuple(self.a.shape[contract[0][i]] for i in self.k_order)
        self.sizes = tuple(
            product(s) for s in (self.batch_shape, self.m_shape, self.k_shape, self.n_shape)
        )

    def _k_order(self) -> list[int]:
        """Contracted axes in the order b's storage likes them (as given)."""
        return list(range(len(self.contract[0])))

    def index_a(self, batch: Size, m: Size, k: Size) -> Index:
        """Where a is read."""
        return self._index(self.a, 0, self.free_a, self.m_shape, batch, m, k)

    def index_b(self, batch: Size, k: Size, n: Size) -> Index:
        """Where b is read."""
        return self._index(self.b, 1, self.free_b, self.n_shape, batch, n, k)

    def result_index(self, batch: Size, m: Size, n: Size) -> Index:
        """The index of an element of the result."""
        shapes = (self.batch_shape, self.m_shape, self.n_shape)
        return tuple(i for at, s in zip((batch, m, n), shapes) for i in unravel(at, s))

    def linear(self, batch: Size, m: Size, n: Size) -> Size:
        """The number of an element of the result."""
        return (batch * self.sizes[1] + m) * self.sizes[3] + n

    def index_like(self, shape: Sequence[Size], other: Node, *at: Size) -> Index:
        """The index of an element of a value with as many: by axes where a shape, mostly its own,
        is the result's."""
        if tuple(shape) == self.node.shape:
            return self.result_index(*at)
        return unravel(self.linear(*at), other.shape)

    def blocks(self, b: BodyBuilder, rows: int, columns: int) -> tuple[Size, Size, Size, Size]:
        """A program for each block of the result: (grid, batch, first row, first column)."""
        batch, m, _, n = self.sizes
        across = ceil_divide(n, columns)
        each = ceil_divide(m, rows) * across
        p = b.program(0, batch * each)
        at, rest = floor_divide(p, each), modulo(p, each)
        return batch * each, at, floor_divide(rest, across) * rows, modulo(rest, across) * columns

    def _index(
        self,
        x: Node,
        side: int,
        free: Sequence[int],
        shape: Sequence[Size],
        batch: Size,
        other: Size,
        k: Size,
    ) -> Index:
        found: list[Size] = [0] * len(x.shape)
        for axis, i in zip(self.batch[side], unravel(batch, self.batch_shape)):
            found[axis] = i
        for axis, i in zip(free, unravel(other, shape)):
            found[axis] = i
        for position, i in zip(self.k_order, unravel(k, self.k_shape)):
            found[self.contract[side][position]] = i
        return tuple(found)


def stride_of(e: Evaluator, node: Node, index: Index, atom: Size) -> Size | None:
    """The element stride of a stored value along an atom of its index, if it is linear."""
    place = through(node, index, e.memories)
    if place is None or not isinstance(atom, Expr):
        return None if place is None else 0
    return coefficient(offset_of(*place), atom)


def power_of_two(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << max(0, size - 1).bit_length()
