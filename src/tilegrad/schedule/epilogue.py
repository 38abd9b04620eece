"""What is computed of a product on its way out, and what of it is too much for its kernel.

Every thread of a product's kernel holds many sums in registers and computes the epilogue of each
without a loop, since registers have no index: what costs one instruction for an element is emitted
hundreds of times. Divisions and roots that are rounded exactly branch, and hold all sums in
registers across each branch: the assembler needs minutes for thousands of them. So an epilogue is
counted, and one that is too long becomes a kernel of its own that streams over the stored product.

Invariant: groups form no cycle, before and after; a product of few sums a thread keeps all.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, Op, topological
from ..ir.types import product
from ..kernels.matmul.threads import ThreadPlan
from ..kernels.matmul.wide import WidePlan
from .access import MOVEMENT
from .dot_gpu import tiled_copies
from .dot_wide import WideDot
from .fuse import Fuser, Group, leaves_of
from .handed import is_part
from .order import bit

MOST = 24_000  # instructions of all epilogues of a Body: about 2 s in the assembler
LONG = 40  # of one element: fewer are within the bound for any tile
EXACT = 96  # what an exactly rounded division or root weighs, in instructions that do not branch
BESIDE = 4  # a matrix read or written beside the result
# (instructions, divisions and roots) of one float32 element, of ops that take more than one
INSTRUCTIONS: dict[Op, tuple[int, int]] = {
    ops.exp: (6, 0), ops.log: (30, 0), ops.expm1: (22, 0), ops.log1p: (38, 0), ops.sin: (41, 0),
    ops.cos: (40, 0), ops.tan: (82, 1), ops.asin: (52, 5), ops.acos: (52, 5), ops.atan: (23, 1),
    ops.tanh: (16, 0), ops.sigmoid: (10, 1), ops.erf: (24, 0), ops.erf_inverse: (74, 3),
    ops.power: (116, 2), ops.atan2: (48, 4), ops.sign: (5, 0), ops.divide: (1, 1),
    ops.reciprocal: (1, 1), ops.square_root: (1, 1), ops.remainder: (24, 1),
    ops.floor_divide_: (3, 1),
}  # fmt: skip


def instructions(stored: Iterable[Node], known: set[Node], rounded: set[Node]) -> int:
    """About how many instructions compute one element of values, from those that are known."""
    total = 0
    for node in topological(list(stored), known.__contains__):
        if node in known or node.op in MOVEMENT or not node.inputs or product(node.shape) == 1:
            continue
        plain, exact = INSTRUCTIONS.get(node.op, (1, 0))
        quick = node in rounded or node.dtype.bits <= 16 or node.dtype.is_integer
        total += plain + EXACT * (0 if quick else exact)
    return total


def leave_long_epilogues(fuser: Fuser, target: Target, rounded: set[Node]) -> None:
    """Cut what a product's kernel would be too long with out of its group, to follow it."""
    changed = False
    for group in list(fuser.groups):
        more = group.kind == "dot" and len(group.values) > 1
        if more and too_long(group, fuser, target, rounded):
            cut(group, fuser)
            changed = True
    if changed:
        fuser.mark_stored()


def too_long(group: Group, fuser: Fuser, target: Target, rounded: set[Node]) -> bool:
    """Whether the epilogue of a group is more than its kernel should have."""
    if any(is_part(v) for v in group.values):
        return False  # sums of blocks need the product's kernel, and are chosen for few tokens
    inside, values = set(group.values), fuser.values
    order = topological(group.stored, lambda n: n in values and n not in inside)
    reads = [n for n in order if n in values and n not in inside]
    beside = [n for n in (*reads, *group.stored[1:]) if product(n.shape) == group.total]
    count = instructions(group.stored, {*reads, group.values[0]}, rounded) + BESIDE * len(beside)
    if count <= LONG:
        return False
    return count * copies(group, reads, target) > MOST


def copies(group: Group, reads: list[Node], target: Target) -> int:
    """How many times an epilogue's instructions are emitted: sums of a thread, in every role."""
    made = WideDot(group, reads, target, set())
    plan = None if made.choice is None else made.choice.plan
    if isinstance(plan, WidePlan):
        return plan.tile[0] * plan.tile[1] // 128
    if isinstance(plan, ThreadPlan):
        return plan.tile[0] * plan.tile[1] // (32 * plan.warps[0] * plan.warps[1])
    return tiled_copies(group.values[0]) if plan is None else 1


def cut(group: Group, fuser: Fuser) -> None:
    """Leave the product alone in its group; what was computed of it follows as a group of loops."""
    dot, rest = group.values[0], group.values[1:]
    after = Group("loops", rest, group.total, number=len(fuser.groups))
    group.values = [dot]
    for value in rest:
        fuser.group_of[value] = after
    for one in (group, after):
        leaves = {leaf for v in one.values for leaf in leaves_of(v, fuser.values)}
        one.reads, one.needs, one.after = leaves - set(one.values), 0, set()
        for other in (fuser.group_of.get(leaf) for leaf in one.reads):
            if other is not None:
                one.needs |= bit(other.number) | other.needs
                one.after.add(other.number)
    for other in fuser.groups:
        if other.needs >> group.number & 1:
            other.needs |= bit(after.number) | after.needs
        if group.number in other.after:
            other.after.add(after.number)
    fuser.groups.append(after)


__all__ = ["INSTRUCTIONS", "leave_long_epilogues"]
