"""Lower `dot` for a Target whose programs are blocks of threads: a plain tiled matmul.

Every dot is batch x (m, k) @ (k, n). A program computes one tile of (rows, columns) results, loops
over k in steps with `dot` on tiles that masked loads bring in, and hands the finished tile to the
epilogue. It takes any dtype, strides, batch and padding: the fallback where no library kernel
applies. Invariant: the order of a sum over k depends on the shape alone.
"""

from __future__ import annotations

from ..core import dtype as dtypes
from ..core.config import invariant
from ..core.dtype import DType
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import Size
from ..tile import ops as tile_ops
from . import sheet as parameters
from .access import Index
from .evaluate import wide
from .family import Bodies, Family, Made, Offer
from .problem import Problem, power_of_two, problem_of
from .region import Region
from .threads.tiles import ThreadSheet

STEP = 32  # of k
SIDE = 64  # most rows and columns of a tile
LEAST_SIDE = 16


class TiledDot:
    """Lowers one dot Region."""

    def __init__(self, region: Region, name: str) -> None:
        self.dot, self.stored = region.values[0], region.stored
        self.problem = problem_of(self.dot)
        self.accumulator = wide(dtypes.accumulator(self.dot.inputs[0].dtype))
        self.sheet = ThreadSheet(name, parameters.of_region(region))
        self.b, self.e = self.sheet.b, self.sheet.e
        self.e.rounded = region.rounded

    def lower(self) -> Made:
        """The Body."""
        _, _, k, n = self.problem.sizes
        rows, columns, warps = tile_of(self.problem)
        grid, batch_at, row, column = self.problem.blocks(self.e, rows, columns)
        m = self.problem.end
        total = [self.b.constant(0, self.accumulator, (rows, columns))]

        def step(start: Size, size: Size) -> None:
            with self.e.scope():
                with self.e.tile(row, rows, m, start, STEP, size) as (i, depth):
                    a = self.operand(self.problem.a, self.problem.index_a(batch_at, i, depth))
                with self.e.tile(start, STEP, size, column, columns, n) as (depth, j):
                    b = self.operand(self.problem.b, self.problem.index_b(batch_at, depth, j))
            total[0] = self.b.add(tile_ops.dot(a, b, total[0]))

        for at, whole in self.b.steps("k", 0, k, STEP, total):
            step(at, at + STEP if whole else k)
        with self.e.tile(row, rows, m, column, columns, n) as (i, j):
            self.problem.write(self.sheet, self.stored, (batch_at, i, j), total[0])
        return self.sheet.end((grid,), warps=warps)

    def operand(self, node: Node, index: Index) -> Node:
        """A tile of an operand, 0 outside, in a dtype that products are taken in."""
        b, e = self.b, self.e
        x = e.value(node, index)
        inside = e.inside()
        if inside is not None and not _masked_load(x, e.full):
            x = b.apply("where", inside, x, b.constant(0, x.dtype))
        return b.cast(b.broadcast(x, e.full), product_dtype(node.dtype, self.accumulator))


def tile_of(problem: Problem) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps that compute it."""
    _, m, _, n = problem.most
    rows, columns = (min(SIDE, max(LEAST_SIDE, power_of_two(s))) for s in (m, n))
    if invariant():
        rows = columns = SIDE
    return rows, columns, min(4, rows * columns // (LEAST_SIDE * LEAST_SIDE))


def tiled_copies(dot: Node) -> int:
    """Results of a tile that a thread has."""
    rows, columns, warps = tile_of(problem_of(dot))
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

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """One Body."""
        return [TiledDot(region, name).lower()]
