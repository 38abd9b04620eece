"""A dot as batch x (m, k) @ (k, n): its sizes, and where an index reads the operands.

Of a grouped product a batch is a group, and its rows are a part of m that only the run knows: a
block of rows begins where its group does, and `end` says where to stop. Invariant: (batch, m, n)
numbers the elements of the result in row-major order; of groups, (m, n) does.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ..core.dtype import int64
from ..graph import build, ops
from ..graph.blocks import operand_of, scales_of
from ..graph.sparse import weights_of
from ..ir.node import Node
from ..ir.symbol import (
    Size,
    atoms,
    ceil_divide,
    coefficient,
    high,
    round_up,
)
from ..ir.types import product
from .access import Index, spread, strides_of, unravel
from .evaluate import Evaluator
from .sheet import Sheet

ALIGNMENT = 16  # bytes
A, B = 0, 1  # the sides of a product
SIZE = (1, 3)  # which of its sizes is that of a side's other axis


class Problem:
    """One dot: sizes, and how an (batch, m, k, n) index reads the operands."""

    grouped = gathered = False
    source: Node  # a as it is stored
    k_last = False  # whether the weights of groups lie along k

    def __init__(self, node: Node) -> None:
        self.node = node
        self.a, self.b = node.inputs
        self.source = self.a
        batch, contract = node.attrs["batch"], node.attrs["contract"]
        self.batch, self.contract = batch, contract
        taken = [b + c for b, c in zip(batch, contract)]
        self.free = [  # axes of m, and of n
            [i for i in range(len(x.shape)) if i not in own] for x, own in zip(node.inputs, taken)
        ]
        self.batch_shape, self.k_shape, self.m_shape = (
            tuple(self.a.shape[i] for i in axes) for axes in (batch[0], contract[0], self.free[0])
        )
        self.n_shape = tuple(self.b.shape[i] for i in self.free[1])
        self.sizes = tuple(
            product(s) for s in (self.batch_shape, self.m_shape, self.k_shape, self.n_shape)
        )

    def index(self, side: int, batch: Size, other: Size, k: Size) -> Index:
        """Where an operand is read: a at a row, b at a column."""
        of = ((self.batch, batch), (self.free, other), (self.contract, k))
        return spread(self.node.inputs[side], *((axes[side], number) for axes, number in of))

    def result_index(self, batch: Size, m: Size, n: Size) -> Index:
        """The index of an element of the result."""
        shapes = (self.batch_shape, self.m_shape, self.n_shape)
        return tuple(i for at, s in zip((batch, m, n), shapes) for i in unravel(at, s))

    def linear(self, batch: Size, m: Size, n: Size) -> Size:
        """The number of an element of the result."""
        return (batch * self.sizes[1] + m) * self.sizes[3] + n

    def index_like(self, other: Node, *at: Size) -> Index:
        """The index of an element of a value with as many: by axes where its shape is the
        result's."""
        if other.shape == self.node.shape:
            return self.result_index(*at)
        return unravel(self.linear(*at), other.shape)

    def write(self, sheet: Sheet, stored: Sequence[Node], at: Index, products: Node) -> None:
        """Evaluate and store what a Region wants of some products, which are at (batch, m, n)."""
        self.bind(sheet.e, products, at[0], at[2])
        for v in stored:
            sheet.write(v, self.index_like(v, *at))

    def bind(self, e: Evaluator, products: Node, batch: Size, n: Size) -> None:
        """Say what the products of a batch and some columns are."""
        own = self.scaled(e, e.body.cast(products, self.node.dtype.wide), batch, n)
        e.own[self.node] = e.settled(own, self.node)

    def scaled(self, e: Evaluator, sums: Node, batch: Size, n: Size) -> Node:
        """Sums of a product times the factors of their batch and column, where it has some."""
        return sums

    @property
    def end(self) -> Size:
        """The row after the last of a program's batch."""
        return self.sizes[1]

    @property
    def most(self) -> tuple[int, int, int, int]:
        """Sizes that Plans are chosen by."""
        batch, m, k, n = (high(s) for s in self.sizes)
        return batch, m, k, n

    def blocks(self, e: Evaluator, rows: int, columns: int) -> tuple[Size, Size, Size, Size]:
        """A program for each block of the result: (grid, batch, first row, first column)."""
        batch, m, _, n = self.sizes
        sizes = (batch, ceil_divide(m, rows), ceil_divide(n, columns))
        at, row, column = unravel(e.body.program(0, product(sizes)), sizes)
        return product(sizes), at, row * rows, column * columns


class OfMatrices(Problem):
    """A product of matrices as they lie."""

    def index(self, side: int, batch: Size, other: Size, k: Size) -> Index:
        """Where an operand is read: both lie along k."""
        return other, k

    def result_index(self, batch: Size, m: Size, n: Size) -> Index:
        """The index of an element of the result."""
        return m, n


class Grouped(OfMatrices):
    """One grouped product: batch g is the rows of group g."""

    grouped = True

    def __init__(self, node: Node) -> None:
        self.node, self.k_last = node, node.attrs["axis"] == 2
        self.source, self.b, self.offsets = node.inputs[:3]
        rows = ops.group_lists(node)[1:]  # of the source, where they are not its own
        self.gathered, self.a = bool(rows), self.source
        if scales_of(node):
            self.a, self.b = (operand_of(node, side) for side in range(2))
        self.a = build.gather(self.a, rows, [0]) if rows else self.a
        self.sizes = (self.b.shape[0], *self.a.shape, node.shape[1])
        self.stop: Size = self.sizes[1]

    def index(self, side: int, batch: Size, other: Size, k: Size) -> Index:
        """Where an operand is read: b is the weights of all groups."""
        if side == A:
            return other, k
        return (batch, other, k) if self.k_last else (batch, k, other)

    def linear(self, batch: Size, m: Size, n: Size) -> Size:
        """The number of an element of the result."""
        return m * self.sizes[3] + n

    def scaled(self, e: Evaluator, sums: Node, batch: Size, n: Size) -> Node:
        """Those of the group."""
        factors = ops.group_scales(self.node)
        if len(factors) != 1:
            return sums
        return e.body.apply("multiply", sums, e.value(factors[0], (batch, n)))

    @property
    def end(self) -> Size:
        """The row after the last of a program's group; known after `blocks`."""
        return self.stop

    @property
    def most(self) -> tuple[int, int, int, int]:
        """Sizes that Plans are chosen by: rows as if groups had equal ones."""
        batch, m, k, n = (high(s) for s in self.sizes)
        return min(batch, m), ceil_divide(m, batch), k, n

    def blocks(self, e: Evaluator, rows: int, columns: int) -> tuple[Size, Size, Size, Size]:
        """A program for each block of rows that there may be, group g's from number
        offset // rows + g on: none has more than there are up to the next group's."""
        b, (row_groups, m, _, n) = e.body, self.sizes
        across, count = ceil_divide(n, columns), high(row_groups)
        grid = (ceil_divide(m, rows) + count) * across
        p = b.program(0, grid)
        number, row_group = p // across, b.index(0)

        def begins(at: Size) -> Size:
            value = b.cast(e.value(self.offsets, (at,)), int64)
            return b.bounded("offset", value, 0, high(m))

        for half in reversed(range((count - 1).bit_length())):  # the last that begins by then
            at = b.bounded("at", b.apply("add", row_group, 1 << half), 0, count - 1)
            here = b.less_equal(begins(at) // rows + at, number)
            row_group = b.where(here, b.index(at), row_group)
        at = b.atom("group", row_group, 0, count - 1)
        first, self.stop = begins(at), begins(at + 1)
        far = number - first // rows - at
        row = b.atom("first", b.index(first + far * rows), 0, high(m) + rows * (count + 1))
        return grid, at, row, p % across * columns


class Unpacked(OfMatrices):
    """One product of codes with a scale for each block, which are unpacked for other kernels, or
    with weights of which two of every four are kept, which are spread out."""

    def __init__(self, node: Node) -> None:
        self.node, self.source = node, node.inputs[0]
        if node.op is ops.sparse_dot:
            self.a, self.b = self.source, weights_of(node)
        else:
            self.a, self.b = (operand_of(node, side) for side in range(2))
        self.sizes = (1, *self.a.shape, node.shape[1])


def breaks_of_groups(node: Node, *rows: int) -> list[tuple[Size, int]]:
    """(Symbol, first value): where a grouped product comes to have more rows than so many times
    its groups; none for other products."""
    if node.op is not ops.grouped_dot:
        return []
    found: list[tuple[Size, int]] = []
    size, row_groups = node.shape[0], high(node.inputs[1].shape[0])
    for symbol in atoms(size, {}):
        each = coefficient(size, symbol)
        if isinstance(each, int) and each > 0:
            found += [(symbol, count * row_groups // each + 1) for count in rows]
    return found


def problem_of(node: Node) -> Problem:
    """The problem of a dot, of a grouped one, or of one with sparse weights or scales of blocks."""
    if node.op is ops.grouped_dot:
        return Grouped(node)
    return (Problem if node.op is ops.dot else Unpacked)(node)


@dataclass(frozen=True)
class Matrix:
    """How an operand lies: the stored Node, and element strides of batch, rows and columns."""

    node: Node
    batch: int
    rows: int
    columns: int

    @property
    def aligned(self) -> bool:
        """Whether a tensor map can describe it: one axis dense, the others in steps of 16 bytes."""
        size = self.node.dtype.size
        others = [s for s in (self.rows, self.columns) if s != 1]
        return 1 in (self.rows, self.columns) and all(
            s > 0 and s * size % ALIGNMENT == 0 for s in (*others, self.batch or ALIGNMENT)
        )


def matrix_of(
    node: Node, index: Index, probes: Sequence[Size], reads: Container[Node], copied: bool = True
) -> Matrix | None:
    """How an operand lies, or None where it is no plain matrix (that a tensor map describes, where
    it is copied)."""
    lies = strides_of(node, index, reads, probes)
    if lies is None or lies[2] != 0:
        return None
    strides = [s for s in lies[1] if isinstance(s, int)]
    if len(strides) < len(probes):
        return None
    step = round_up(max(1 + high(p) for p in probes[1:]), ALIGNMENT)
    single = [isinstance(p, int) for p in probes[1:]]  # a row or column: any step will do
    found = Matrix(lies[0], strides[0], *(step if x else s for x, s in zip(single, strides[1:])))
    return found if found.aligned or not copied else None
