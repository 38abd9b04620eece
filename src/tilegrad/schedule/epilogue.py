"""What is computed of a product on its way out, and what of it is too much for its kernel.

Every thread of a product's kernel holds many sums in registers and computes the epilogue of each
without a loop, since registers have no index: what costs one instruction for an element is emitted
hundreds of times. Divisions and roots that are rounded exactly branch, and hold all sums in
registers across each branch: the assembler needs minutes for thousands of them. So an epilogue is
counted, and one that is too long becomes a kernel of its own that streams over the stored product.

Invariant: Regions form no cycle, before and after; a product of few sums a thread keeps all.
"""

from __future__ import annotations

from ..core.target import Target
from ..ir.node import Node
from ..ir.types import product
from ..kernels.matmul.shape import WidePlan
from ..kernels.matmul.threads_matmul import ThreadPlan
from .block_sums import is_part
from .dot_threads import tiled_copies
from .dot_wide import WideDot
from .fuse import Fuser
from .instructions import instructions
from .lowering import Lowering
from .region import Region, bit, leaves_of

MOST_INSTRUCTIONS = 24_000  # of all epilogues of a Body: about 2 s in the assembler
LONG = 40  # of one element: fewer are within the bound for any tile
MATRIX_INSTRUCTIONS = 4  # of a matrix read or written beside the result


def leave_long_epilogues(lowering: Lowering) -> None:
    """The pass: what a product's kernel would be too long with follows it in a Kernel."""
    fuser, target, rounded = lowering.fuser, lowering.target, lowering.rounded
    changed = False
    for region in list(fuser.regions):
        more = region.kind == "dot" and len(region.values) > 1
        if more and too_long(region, fuser, target, rounded):
            cut(region, fuser)
            changed = True
    if changed:
        fuser.mark_stored()


def too_long(region: Region, fuser: Fuser, target: Target, rounded: set[Node]) -> bool:
    """Whether the epilogue of a Region is more than its kernel should have."""
    if any(is_part(v) for v in region.values):
        return False  # sums of blocks need the product's kernel, and are chosen for few tokens
    reads = region.reads_among(fuser.values)
    matrices = [n for n in (*reads, *region.stored[1:]) if product(n.shape) == region.total]
    count = instructions(region.stored, {*reads, region.values[0]}, rounded)
    count += MATRIX_INSTRUCTIONS * len(matrices)
    if count <= LONG:
        return False
    return count * copies(region, reads, target) > MOST_INSTRUCTIONS


def copies(region: Region, reads: list[Node], target: Target) -> int:
    """How many times an epilogue's instructions are emitted: sums of a thread, in every role."""
    made = WideDot(region, reads, target)
    plan = None if made.choice is None else made.choice.plan
    if isinstance(plan, WidePlan):
        return plan.tile[0] * plan.tile[1] // 128
    if isinstance(plan, ThreadPlan):
        return plan.tile[0] * plan.tile[1] // (32 * plan.warps[0] * plan.warps[1])
    return tiled_copies(region.values[0]) if plan is None else 1


def cut(region: Region, fuser: Fuser) -> None:
    """Leave the product alone in its Region; a Region of loops computes the rest after it."""
    dot, rest = region.values[0], region.values[1:]
    after = Region("loops", rest, region.total, number=len(fuser.regions))
    region.values = [dot]
    for value in rest:
        fuser.region_of[value] = after
    for one in (region, after):
        leaves = {leaf for v in one.values for leaf in leaves_of(v, fuser.values)}
        one.reads, one.needs, one.after = leaves - set(one.values), 0, set()
        for other in (fuser.region_of.get(leaf) for leaf in one.reads):
            if other is not None:
                one.needs |= bit(other.number) | other.needs
                one.after.add(other.number)
    for other in fuser.regions:
        if other.needs >> region.number & 1:
            other.needs |= bit(after.number) | after.needs
        if region.number in other.after:
            other.after.add(after.number)
    fuser.regions.append(after)
