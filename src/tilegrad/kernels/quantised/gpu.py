"""Quantised products on GPUs: which kernel a shape gets; see `shape` for the functions.

One token goes to `gpu_rows`. Where the Target's matrix units run beside the threads and weights lie
in strips (Q4_0, Q4_1, Q4_Z, Q8_0), up to 8 go to `gpu_warps` and up to 256 to `gpu_packed`; others
up to FEW_TOKENS to `gpu_rows` too, more of them to `gpu_matrix`. More than `many` unpack their
weights first. At the level `invariant` all go to `gpu_matrix` by one Plan. Invariant: what a Target
can run is decided by its facts alone, and the Plan by the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.config import invariant
from ...core.dtype import DType
from ...core.format import Format
from ...core.target import Target
from ...ir.symbol import ceil_divide, high, round_up
from ...tile.build import Body
from ...tile.callee import KernelCallee
from . import gpu_packed, gpu_warps
from .gpu_layout import ROWS, groups_of, in_strips, parts, units_of
from .gpu_layout import pack as pack
from .gpu_matrix import MatrixKernel, MatrixPlan
from .gpu_packed import PackedMatmul, PackedPlan
from .gpu_rows import RowsKernel, RowsPlan, shared_bytes
from .gpu_take import write_row
from .gpu_warps import WarpsKernel, WarpsPlan
from .layout import LAYOUTS
from .shape import NOTHING, Around, QuantisedShape
from .take import rows_body

Plan = RowsPlan | WarpsPlan | MatrixPlan | PackedPlan

KERNELS: dict[type[Plan], Any] = {
    PackedPlan: PackedMatmul,
    WarpsPlan: WarpsKernel,
    RowsPlan: RowsKernel,
    MatrixPlan: MatrixKernel,
}
CORES = 128  # that tiles are to suffice for
MANY = 32  # tokens from which weights that are not packed are unpacked before a product
FEW_TOKENS = 8  # tokens that byte products take faster than matrix units


def why_not(shape: QuantisedShape, target: Target) -> str:
    """Why no kernel takes this; '' where one does."""
    if not shape.columns or not shape.rows or high(shape.tokens) < 1:
        return "there is nothing to multiply"
    return shape.why_not(ROWS)


def is_heavy(shape: QuantisedShape) -> bool:
    """Whether codes take many registers to take apart."""
    return len(shape.layout.planes) > 1 or shape.layout.doubled


def rows_plan(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> RowsPlan:
    """The Plan for few tokens: enough bytes asked for at once, and registers for them."""
    groups, tokens, heavy = groups_of(shape), high(shape.tokens), is_heavy(shape)
    x = shape.layout
    tight = heavy or x.two_levels or units_of(x) > 1 or shape.dtype.bits > 16  # in registers
    if groups <= 32:
        few = tight and tokens > 1
        return RowsPlan(16, 2, 32, together=2, tokens=2) if few else RowsPlan(16, 2, 32)
    if tokens == 1:
        return token_plan(shape, target, around)
    if groups <= 128:
        return RowsPlan(16, 8, 64, together=2, stages=2, resident=1 if tight else 2)
    if tight:
        return RowsPlan(16, 8, 64, together=2, stages=1, resident=1)
    return RowsPlan(32, 16, 64, together=2, stages=2, resident=1)


def token_plan(shape: QuantisedShape, target: Target, around: Around) -> RowsPlan:
    """The Plan for one token. Many rows are shared out among as many programs as run at once, each
    of so few registers a thread that two of them share a core. Where rows are few, a thread of
    strips asks for half of its weights ahead, to the same end."""
    strips, short = in_strips(shape.layout), groups_of(shape) <= 128
    ahead = strips and not short and around.norm is None  # registers for two turns
    bytes_ = strips and units_of(shape.layout) > 1
    if programs := sharing(shape, target):
        warps = 8 if bytes_ else 16
        return RowsPlan(16, warps, 64, stages=1 + ahead, resident=2, programs=programs)
    if bytes_:
        return RowsPlan(16, 8, 64)
    if strips and shape.rows <= 32 * CORES:
        return RowsPlan(16, 16, 64, stages=1 if short else 2, resident=2 if short else 0)
    if strips:
        few = short and shape.rows <= 48 * CORES
        return RowsPlan(16, 8, 64, stages=1 if few else 2, resident=2 if few else 3)
    few = short or is_heavy(shape) or shape.dtype.bits > 16
    return RowsPlan(16, 8, 64, stages=2) if few else RowsPlan(8, 8, 256, resident=2)


def sharing(shape: QuantisedShape, target: Target) -> int:
    """Programs that blocks of 16 rows are shared out among: two of a core, each with as many; 0
    where cores would idle, and where a block a program is soon done."""
    most, blocks = 2 * target.cores, ceil_divide(shape.rows, ROWS)
    each = ceil_divide(blocks, most)
    many = each > 1 or groups_of(shape) > 128
    many = many and shape.dtype.bits <= 16  # wider x take the registers
    return ceil_divide(blocks, each) if many and 10 * blocks >= 9 * most * each else 0


def matrix_plan(shape: QuantisedShape, block: int = 0) -> MatrixPlan:
    """The Plan for more tokens, or blocks of groups: a warp for every 8 rows, and what is heavy on
    all cores."""
    most = high(shape.tokens)
    if not isinstance(shape.tokens, int):
        most = min(most, 64)  # steps are of all sizes
    if invariant():
        most = 64
    tokens = max(16, block) if block else next((t for t in (16, 32) if most <= t), 64)
    rows = round_up(shape.outputs, ROWS)
    sizes = [r for r in (64, 32, 16) if rows % r == 0 and (r <= 32 or tokens <= 32)]
    programs = ceil_divide(most, tokens)
    fill = [r for r in sizes if rows // r * programs >= CORES]
    heavy = is_heavy(shape)
    tall = (fill or sizes)[0] if heavy else sizes[0]
    return MatrixPlan(tokens, tall, 2 if heavy and tokens > 32 else 4, tall // 8, block)


def are_few(shape: QuantisedShape, target: Target) -> bool:
    """Whether byte products take this."""
    if invariant():
        return False
    room = target.memories["shared"].bytes
    needed = shared_bytes(shape, rows_plan(shape, target))
    return high(shape.tokens) <= FEW_TOKENS and needed <= room


def many(form: Format, rows: int, dtype: DType, target: Target) -> int:
    """Tokens from which weights of so many rows are unpacked before a product."""
    if form.name not in LAYOUTS:
        return MANY
    one = QuantisedShape(form, rows, form.block, 2, dtype)
    return MANY if gpu_packed.why_not(one, target) else gpu_packed.MOST_PACKED + 1


def plans_for(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> Sequence[Plan]:
    """Plans for a product with what is around it, the best first."""
    if not gpu_warps.why_not(shape, target, around):
        return gpu_warps.plans(shape, around, target)
    if not gpu_packed.why_not(shape, target, around):
        return gpu_packed.plans(shape, around, target)
    return [rows_plan(shape, target, around) if are_few(shape, target) else matrix_plan(shape)]


def body_of(
    shape: QuantisedShape, plan: Plan, name: str = "quantised_matmul", around: Around = NOTHING
) -> Body:
    """The kernel of a Plan; parameters in the order of `Around`."""
    return KERNELS[type(plan)](shape, plan, name, around).build()


def callee(shape: QuantisedShape, target: Target, around: Around = NOTHING) -> KernelCallee:
    """The product: x (tokens, columns) and the parts to (tokens, rows); with what is around it,
    arguments in the order of `Around`."""
    name = "quantised_matmul" if around == NOTHING else "quantised_around"
    body = body_of(shape, plans_for(shape, target, around)[0], name, around)
    return KernelCallee.named(name, [body], around.names(shape))


def grouped_callee(shape: QuantisedShape, target: Target, block: int) -> KernelCallee:
    """The product of groups: x, a list of blocks and the parts to (tokens, rows of a group)."""
    body = body_of(shape, matrix_plan(shape, block), "grouped_quantised")
    return KernelCallee.named("grouped_quantised", [body], ("out0",))


def why_not_around(shape: QuantisedShape, target: Target, around: Around) -> str:
    """Why a product is not computed with what is around it; '' where it is."""
    if not gpu_packed.why_not(shape, target):
        return gpu_packed.why_not(shape, target, around)
    if not are_few(shape, target):
        return f"more than {FEW_TOKENS} tokens, or too many columns"
    return around.why_not(shape, ROWS) or why_not(shape, target)


def take_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """Rows by number: ids (tokens,) and the parts to (tokens, columns)."""
    return KernelCallee.named(
        "quantised_take", [rows_body(shape, parts(shape), write_row)], ("out",)
    )


def unpack_callee(shape: QuantisedShape, target: Target) -> KernelCallee:
    """All rows: the parts to (rows, columns)."""
    return KernelCallee.named(
        "quantised_unpack", [rows_body(shape, parts(shape), write_row, numbered=False)], ("out",)
    )
