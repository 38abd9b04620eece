"""Lower `dot` for a Target whose programs are blocks of threads: a plain tiled matmul.

Every dot is batch x (m, k) @ (k, n). A program computes one tile of (rows, columns) results, walks
k in steps with `dot` on tiles that masked loads bring in, and hands the finished tile to the
epilogue. It takes any dtype, strides, batch and padding: the fallback where no library kernel
applies. Invariant: the order of a sum over k depends on the shape alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import dtype as dtypes
from ..core.config import invariant
from ..core.dtype import DType
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, floor_divide, high, modulo
from ..ir.types import Memory, product
from ..tile import ops as tile_ops
from ..tile.build import Body
from .access import Index, offset_of, unravel
from .evaluate import wide
from .family import Bodies, Family, Offer
from .fuse import Fuser, Region
from .problem import Problem
from .threads.tiles import TileEvaluator, Viewed, power_of_two

STEP = 32  # of k
SIDE = 64  # most rows and columns of a tile
LEAST = 16


class TiledDot:
    """Lowers one dot Region."""

    def __init__(self, group: Region, reads: Sequence[Node], name: str) -> None:
        self.group, self.reads = group, list(reads)
        self.dot, self.stored = group.values[0], group.stored
        self.problem = Problem(self.dot)
        self.accumulator = wide(dtypes.accumulator(self.dot.inputs[0].dtype))
        parameters = [
            (f"in{i}", Memory((product(r.shape),), r.dtype)) for i, r in enumerate(self.reads)
        ]
        parameters += [
            (f"out{i}", Memory((product(v.shape),), v.dtype, "global", "result"))
            for i, v in enumerate(self.stored)
        ]
        self.b = Viewed(name, parameters)
        self.e = TileEvaluator(self.b, dict(zip(self.reads, self.b.parameters)))
        self.e.rounded = group.rounded
        self.outputs = dict(zip(self.stored, self.b.parameters[len(self.reads) :]))

    def lower(self) -> list[tuple[Body, list[tuple[str, Any]]]]:
        """The Body with the roles of its parameters."""
        batch, m, k, n = self.problem.sizes
        rows, columns, warps = tile_of(self.problem)
        blocks_m, blocks_n = ceil_divide(m, rows), ceil_divide(n, columns)
        tiles = blocks_m * blocks_n
        p = self.b.program(0, batch * tiles)
        batch_at, rest = floor_divide(p, tiles), modulo(p, tiles)
        row = floor_divide(rest, blocks_n) * rows
        column = modulo(rest, blocks_n) * columns
        whole = floor_divide(k, STEP) * STEP

        def step(start: Size, carried: list[Node], size: Size) -> Sequence[Node]:
            with self.e.scope():
                with self.e.tile(row, rows, m, start, STEP, size) as (i, depth):
                    a = self.operand(self.problem.a, self.problem.index_a(batch_at, i, depth))
                with self.e.tile(start, STEP, size, column, columns, n) as (depth, j):
                    b = self.operand(self.problem.b, self.problem.index_b(batch_at, depth, j))
            return [self.b.add(tile_ops.dot(a, b, carried[0]))]

        zero = self.b.constant(0, self.accumulator, (rows, columns))
        total = self.b.loop("k", 0, whole, STEP, lambda at, c: step(at, c, at + STEP), [zero])
        if modulo(k, STEP) != 0:
            total = self.b.loop("rest", whole, k, STEP, lambda at, c: step(at, c, k), total)
        with self.e.tile(row, rows, m, column, columns, n) as (i, j):
            self.epilogue(batch_at, i, j, total[0])
        body = self.b.finish((batch * tiles,), warps=warps)
        roles: list[tuple[str, Any]] = [("read", i) for i in range(len(self.reads))]
        roles += [("store", i) for i in range(len(self.stored))]
        return [(body, [roles[number] for number in self.b.numbers])]

    def operand(self, node: Node, index: Index) -> Node:
        """A tile of an operand, 0 outside, in a dtype that products are taken in."""
        b, e = self.b, self.e
        x = e.value(node, index)
        inside = e.inside()
        if inside is not None and not _masked_load(x, e.full):
            x = b.apply("where", inside, x, b.constant(0, x.dtype))
        return b.cast(b.broadcast(x, e.full), product_dtype(node.dtype, self.accumulator))

    def epilogue(self, batch: Size, row: Size, lane: Size, total: Node) -> None:
        """Evaluate and store what the Region wants of the tile."""
        _, m, _, n = self.problem.sizes
        linear = (batch * m + row) * n + lane
        rounded = self.e.settled(self.b.cast(total, wide(self.dot.dtype)), self.dot)
        for shape in {self.dot.shape: None, **{v.shape: None for v in self.stored}}:
            self.e.bind(self.dot, self.index_of(self.dot, shape, batch, row, lane, linear), rounded)
        for v in self.stored:
            at = self.index_of(v, v.shape, batch, row, lane, linear)
            x = self.e.value(v, at)
            self.e.store(self.outputs[v], x, offset_of(v, at))

    def index_of(
        self, node: Node, shape: Any, batch: Size, row: Size, lane: Size, linear: Size
    ) -> Index:
        """The index of an element: by axes where the shape is the dot's own."""
        p = self.problem
        if shape != self.dot.shape:
            return unravel(linear, node.shape)
        return (*unravel(batch, p.batch_shape), *unravel(row, p.m_shape), *unravel(lane, p.n_shape))


def tile_of(problem: Problem) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps that compute it."""
    _, m, _, n = problem.sizes
    rows, columns = (min(SIDE, max(LEAST, power_of_two(high(s)))) for s in (m, n))
    if invariant():
        rows = columns = SIDE
    return rows, columns, min(4, rows * columns // (LEAST * LEAST))


def tiled_copies(dot: Node) -> int:
    """Results of a tile that a thread has."""
    rows, columns, warps = tile_of(Problem(dot))
    return rows * columns // (32 * warps)


def product_dtype(dtype: DType, accumulator: DType) -> DType:
    """The dtype tiles are multiplied in: 8-bit floats are exact in bfloat16."""
    if dtype in (dtypes.bfloat16, dtypes.float16):
        return dtype
    if dtype.is_float and dtype.bits == 8:
        return dtypes.bfloat16
    return accumulator


def _masked_load(x: Node, shape: tuple[int, ...]) -> bool:
    """Whether a value is 0 outside because nothing was loaded there."""
    while x.op is tile_ops.cast:
        x = x.inputs[0]
    return x.op is tile_ops.load and x.shape == shape and x.attrs["masked"]


class TiledProducts(Family):
    """The plain tiled matmul, where no kernel of the library applies."""

    fallback = True

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], fuser: Fuser) -> bool:
        """Whether a value can be computed of the product on its way out."""
        return fuser.follows(node, region, leaves)

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """One Body."""
        return TiledDot(region, region.inputs, name).lower()
