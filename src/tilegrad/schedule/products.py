"""Products of threads beside the library's: a plain tiled kernel, and what passes set apart.

`lower_tiled` takes any dtype, strides, batch and padding: the fallback where no library kernel
applies. Every dot is batch x (m, k) @ (k, n). A program computes one tile of (rows, columns)
results, loops over k in steps with `dot` on tiles that masked loads bring in, and hands the
finished tile to the epilogue.

The library's products read operands where they lie, as matrices whose rows are whole steps of 16
bytes. What movement makes of a stored value often is none: heads that are put side by side again
after attention, a part of a row that begins in the middle. Such a product would be left to the
tiled kernel, which is several times slower; where the copy takes less time than that loses, the
operand becomes a value of its own.

Every thread of a product's kernel holds many sums in registers and computes the epilogue of each
without a loop, since registers have no index: what costs one instruction for an element is emitted
hundreds of times. Divisions and roots that are rounded exactly branch, and hold all sums in
registers across each branch: the assembler needs minutes for thousands of them. The tiled kernel
computes an epilogue for all sums at once, so its values are held for all. So an epilogue is
counted, and one that is too long or holds too much becomes a kernel of its own that streams over
the stored product.

Invariant: Regions form no cycle, before and after; a product of few sums a thread keeps all; a
copied operand is as large as what it is a copy of, or nearly (windows stay unfolded); the order of
a sum over k of the tiled kernel depends on the shape alone.
"""

from __future__ import annotations

import math
from typing import Any

from ..core import dtype as dtypes
from ..core.config import invariant
from ..core.dtype import DType
from ..core.target import Target
from ..graph import ops
from ..ir.node import Node
from ..ir.symbol import high, loop_index, power_of_two
from ..kernels.matmul.shape import Choice, WidePlan
from ..kernels.matmul.threads_matmul import ThreadPlan
from ..tile import ops as tile_ops
from .access import Index, base_of
from .cost import instructions, registers
from .dot_wide import WideDot, laid
from .family import Bodies
from .fuse import Fuser
from .lowering import Lowering
from .problem import SIZE, A, B, Problem, matrix_of, problem_of
from .region import Region, bit
from .threads.tiles import ThreadSheet
from .values import is_part

MOST_INSTRUCTIONS = 24_000  # of all epilogues of a Body: about 2 s in the assembler
LONG = 40  # of one element: fewer are within the bound for any tile
MOST_REGISTERS = 224  # of what a thread of the tiled kernel holds of an epilogue at once
MATRIX_INSTRUCTIONS = 4  # of a matrix read or written beside the result


def leave_long_epilogues(lowering: Lowering) -> None:
    """The pass: what a product's kernel would be too long with follows it in a Kernel."""
    fuser, changed = lowering.fuser, False
    for region in list(fuser.regions):
        more = region.kind == "dot" and len(region.values) > 1
        if more and too_long(region, lowering.rounded):
            cut(region, fuser)
            changed = True
    if changed:
        fuser.mark_stored()


def too_long(region: Region, rounded: set[Node]) -> bool:
    """Whether the epilogue of a Region is more than its kernel should have."""
    if any(is_part(v) for v in region.values):
        return False  # sums of blocks need the product's kernel, and are chosen for few tokens
    reads = region.find_inputs()
    matrices = [n for n in (*reads, *region.stored[1:]) if n.size == region.total]
    count = instructions(region.stored, {*reads, region.anchor}, rounded)
    count += MATRIX_INSTRUCTIONS * len(matrices)
    if count <= LONG:
        return False
    choice = WideDot(region).choice
    held = 0 if choice else registers(region.stored, {*reads, region.anchor})
    times = copies(region, choice)
    return count * times > MOST_INSTRUCTIONS or held * times > MOST_REGISTERS


def copies(region: Region, choice: Choice[Any] | None) -> int:
    """How many times an epilogue's instructions are emitted: sums of a thread, in every role."""
    warps = 4
    if choice is None:
        rows, columns, warps = tile_of(problem_of(region.anchor))
    elif isinstance(choice.plan, (WidePlan, ThreadPlan)):
        rows, columns, _ = choice.plan.tile
        if isinstance(choice.plan, ThreadPlan):
            warps = math.prod(choice.plan.warps)
    else:
        return 1
    return rows * columns // (32 * warps)


def cut(region: Region, fuser: Fuser) -> None:
    """Leave the product alone in its Region; a Region of loops computes the rest after it."""
    values, number = region.values, len(fuser.regions)
    after = Region("loops", fuser.target, fuser.values, [], region.total, number=number)
    region.values, region.reads, region.needs, region.after = [], set(), 0, set()
    for one, value in zip([region, *[after] * len(values)], values):
        fuser.join(value, one)
    for other in fuser.regions:
        if other.needs >> region.number & 1:
            other.needs |= bit(after.number) | after.needs
        if region.number in other.after:
            other.after.add(after.number)
    fuser.regions.append(after)


# ---- operands ------------------------------------------------------------------------------------

SLOWER = 4.0  # the tiled kernel beside the library's, at least
LAUNCH = 3e-6  # seconds
GROWS = 1.25  # times the elements it is made of, at most


def lay_out(lowering: Lowering) -> None:
    """The pass: operands of large products that lie as no matrix become values."""
    values, target = lowering.fuser.values, lowering.target
    for dot in lowering.order():
        if dot.op is ops.dot and dot not in lowering.arguments:
            moved = [
                x
                for side, x in enumerate(dot.inputs)
                if x not in values and _pays(side, dot, values, target)
            ]
            if moved and _takes(dot, values | set(moved), target):
                values.update(moved)


def _pays(side: int, dot: Node, values: set[Node], target: Target) -> bool:
    """Whether an operand that lies as no matrix is copied in less time than it would cost."""
    p, x = Problem(dot), dot.inputs[side]
    at = [loop_index(name, p.sizes[i]) for name, i in zip("bok", (0, SIZE[side], 2))]
    if matrix_of(x, p.index(side, *at), at, values) is not None:
        return False
    source = base_of(x, values)
    elements = high(x.size)
    if source not in values or elements > GROWS * high(source.size):
        return False
    products = math.prod(high(size) for size in p.sizes)
    best = 2.0 * products / target.peak_flops(dot.inputs[0].dtype)
    copy = 2.0 * elements * x.dtype.size / target.peak_bytes() + LAUNCH
    return (SLOWER - 1) * best > copy


def _takes(dot: Node, values: set[Node], target: Target) -> bool:
    """Whether the library takes a product of such operands."""
    like = Region("dot", target, values, [dot], dot.size, stored=[dot])
    return laid(like).choice is not None


# ---- the tiled kernel ----------------------------------------------------------------------------

STEP = 32  # of k
SIDE = 64  # most rows and columns of a tile
LEAST_SIDE = 16


def lower_tiled(region: Region) -> Bodies:
    """One Body, where no kernel of the library applies."""
    dot, problem = region.anchor, problem_of(region.anchor)
    accumulator = dtypes.accumulator(dot.inputs[0].dtype).wide
    sheet = ThreadSheet.of(region)
    b, e, (_, _, k, n) = sheet.b, sheet.e, problem.sizes
    e.rounded = region.rounded
    rows, columns, warps = tile_of(problem)
    grid, batch, row, column = problem.blocks(e, rows, columns)
    m, total = problem.end, [b.constant(0, accumulator, (rows, columns))]

    def operand(node: Node, index: Index) -> Node:  # 0 outside, in a dtype products are taken in
        x, inside = e.value(node, index), e.inside()
        if inside is not None and not _masked_load(x, e.full):
            x = b.where(inside, x, 0)
        return b.cast(b.broadcast(x, e.full), product_dtype(node.dtype, accumulator))

    for at, whole in b.steps("k", 0, k, STEP, total):
        size = at + STEP if whole else k
        with e.scope():
            with e.tile(row, rows, m, at, STEP, size) as (i, depth):
                left = operand(problem.a, problem.index(A, batch, i, depth))
            with e.tile(at, STEP, size, column, columns, n) as (depth, j):
                right = operand(problem.b, problem.index(B, batch, j, depth))
        total[0] = b.add(tile_ops.dot(left, right, total[0]))
    with e.tile(row, rows, m, column, columns, n) as (i, j):
        problem.write(sheet, region.stored, (batch, i, j), total[0])
    return [sheet.end(grid, warps=warps)]


def tile_of(problem: Problem) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps that compute it."""
    _, m, _, n = problem.most
    rows, columns = (min(SIDE, max(LEAST_SIDE, power_of_two(s))) for s in (m, n))
    if invariant():
        rows = columns = SIDE
    return rows, columns, min(4, rows * columns // (LEAST_SIDE * LEAST_SIDE))


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
