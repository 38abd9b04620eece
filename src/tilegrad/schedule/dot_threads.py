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
from ..tile import ops as tile_ops
from . import sheet as parameters
from .access import Index
from .evaluate import wide
from .family import Bodies
from .problem import Problem, power_of_two, problem_of
from .region import Region
from .threads.tiles import ThreadSheet

STEP = 32  # of k
SIDE = 64  # most rows and columns of a tile
LEAST_SIDE = 16


def lower_tiled(region: Region, target: Target, name: str) -> Bodies:
    """One Body, where no kernel of the library applies."""
    dot, problem = region.anchor, problem_of(region.anchor)
    accumulator = wide(dtypes.accumulator(dot.inputs[0].dtype))
    sheet = ThreadSheet(name, parameters.of_region(region))
    b, e, (_, _, k, n) = sheet.b, sheet.e, problem.sizes
    e.rounded = region.rounded
    rows, columns, warps = tile_of(problem)
    grid, batch, row, column = problem.blocks(e, rows, columns)
    m, total = problem.end, [b.constant(0, accumulator, (rows, columns))]

    def operand(node: Node, index: Index) -> Node:  # 0 outside, in a dtype products are taken in
        x, inside = e.value(node, index), e.inside()
        if inside is not None and not _masked_load(x, e.full):
            x = b.apply("where", inside, x, b.constant(0, x.dtype))
        return b.cast(b.broadcast(x, e.full), product_dtype(node.dtype, accumulator))

    for at, whole in b.steps("k", 0, k, STEP, total):
        size = at + STEP if whole else k
        with e.scope():
            with e.tile(row, rows, m, at, STEP, size) as (i, depth):
                left = operand(problem.a, problem.index_a(batch, i, depth))
            with e.tile(at, STEP, size, column, columns, n) as (depth, j):
                right = operand(problem.b, problem.index_b(batch, depth, j))
        total[0] = b.add(tile_ops.dot(left, right, total[0]))
    with e.tile(row, rows, m, column, columns, n) as (i, j):
        problem.write(sheet, region.stored, (batch, i, j), total[0])
    return [sheet.end((grid,), warps=warps)]


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
