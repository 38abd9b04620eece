"""Dots of one input with several weights as one Kernel, by the library's joint matmul.

Regions of dots that read the same left operand and do not need each other (q, k and v) become one
Region whose results stay apart; two of which one reads the other's products element by element
(gate and up) become one whose epilogue sees both. They join where the library's kernel takes each
of them and its model of time expects the joint launch to be faster than the launches apart; only
for Targets with asynchronous matrix units. Invariant: Regions still form no cycle, and values that
only a joint Region reads are not stored.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

from ..core.config import invariant
from ..core.target import Target
from ..graph import ops
from ..graph.blocks import scales_of
from ..ir.node import Node
from ..ir.symbol import Size, high
from ..kernels.matmul.matvec import choose as choose_matvec
from ..kernels.matmul.matvec import why_not as matvec_why_not
from ..kernels.matmul.plan import BLOCK, FITTED, ranked
from ..kernels.matmul.shape import Operands
from ..kernels.matmul.table import PLAIN
from ..kernels.matmul.wide_grouped import choose_grouped
from .access import base_of
from .dot_wide import FEW_TOKENS, KINDS, WideDot, accepts, laid
from .family import Bodies, Family, Offer, Offers
from .fuse import Fuser
from .lowering import Lowering
from .problem import breaks_of_groups
from .region import REDUCE, Cut, Region, bit
from .values import is_part

MOST_WEIGHTS = 4  # of one launch
APART = 4  # Regions that one dot may need and another not: else they are ready at other times
ORDERED = ("update", "control", "call")  # kinds of Regions that are not moved behind others


@dataclass(eq=False)
class Joint(Region):
    """Dot Regions as one: kind 'dots' where results stay apart, 'gated' where they meet."""

    parts: list[Region] = field(default_factory=list)

    @property
    def gated(self) -> bool:
        """Whether the epilogue sees the products of all parts at once."""
        return self.kind == "gated"


def join_dots(lowering: Lowering) -> None:
    """The pass: join what pays among the Regions."""
    _Joiner(lowering.fuser, lowering.target).run()


class _Joiner:
    """Finds and joins Regions."""

    def __init__(self, fuser: Fuser, target: Target) -> None:
        self.fuser, self.target = fuser, target
        self.wide = cache(laid)  # a Region as the library's kernel sees it

    def run(self) -> None:
        """Gated pairs first; then what is left of every input's dots."""
        inputs: dict[Node, list[Region]] = {}
        for region in self.fuser.regions:
            if region.kind == "dot":
                inputs.setdefault(self.input_of(region.anchor), []).append(region)
        joined = False
        for regions in inputs.values():
            wides = [(r, self.wide(r)) for r in regions if len(regions) > 1]
            takes = [r for r, w in wides if w.operands is not None and not w.block_sums]
            pairs = self.pairs(takes)
            rest = [r for r in takes if not any(r in pair for pair in pairs)]
            found = [("gated", pair) for pair in pairs] + [("dots", s) for s in self.sets(rest)]
            for kind, parts in found:
                if self.closed(parts):  # as Regions are after what was joined before
                    self.join(kind, parts)
                    joined = True
        if joined:
            self.fuser.mark_stored()

    def input_of(self, dot: Node) -> Node:
        """The stored value that a dot's left operand lies in."""
        return base_of(dot.inputs[0], self.fuser.values)

    # ---- what may join --------------------------------------------------------------------

    def pairs(self, regions: Sequence[Region]) -> list[list[Region]]:
        """Pairs of which the second reads products of the first."""
        found: list[list[Region]] = []
        for second in regions:
            for first in regions:
                pair = [first, second]
                taken = any(r in other for other in found for r in pair)
                if taken or second.reads.isdisjoint(first.values):
                    continue
                if self.may_gate(pair) and self.pays(pair, True):
                    found.append(pair)
        return found

    def may_gate(self, pair: Sequence[Region]) -> bool:
        """Whether the second reads the first at its own element only, and nothing between."""
        first, second = pair
        if first.anchor.shape != second.anchor.shape:
            return False
        if not self.closed(pair) or not self.in_time(pair):
            return False
        joint = replace(first, values=[*first.values, *second.values])
        return all(self.fuser.aligned(v, joint) for v in joint.values if v.op is not ops.dot)

    def sets(self, regions: Sequence[Region]) -> list[list[Region]]:
        """Sets of which none needs another."""
        found, left = [], list(regions)
        while left:
            some = [left.pop(0)]
            for region in list(left):
                more = [*some, region]
                own, _ = _together(more)
                if (
                    not any(r.needs & own for r in more)
                    and len(some) < MOST_WEIGHTS
                    and self.in_time(more)
                    and joint_operands([self.wide(r) for r in more], False)
                ):
                    some = more
                    left.remove(region)
            if len(some) > 1 and self.pays(some, False):
                found.append(some)
        return found

    def closed(self, regions: Sequence[Region]) -> bool:
        """Whether no other Region stands between some of these: joined, they would be a cycle."""
        own, every = _together(regions)
        return not any(every >> r.number & 1 and r.needs & own for r in self.fuser.regions)

    def in_time(self, regions: Sequence[Region]) -> bool:
        """Whether Regions are ready at about the same time, and no state is written between."""
        own, every = _together(regions)
        late = every & ~reduce(operator.and_, (r.needs | own for r in regions))
        if late.bit_count() > APART:
            return False
        between = [r for r in self.fuser.regions if late >> r.number & 1]
        return not any(r.kind in ORDERED for r in between)

    def pays(self, regions: Sequence[Region], gated: bool) -> bool:
        """Whether the model expects one launch to be faster than one for each."""
        parts = [self.wide(r) for r in regions]
        joint = joint_operands(parts, gated)
        if joint is None:
            return False
        apart = sum(self.seconds(p.operands) for p in parts if p.operands is not None)
        if gated:  # products of one are read again by the epilogue of the other
            apart += high(joint.m) * high(joint.n) * joint.result.size / self.target.peak_bytes()
        return self.seconds(joint) < apart

    def seconds(self, x: Operands) -> float:
        """What the model expects of a launch."""
        if x.block:
            return choose_grouped(x, self.target).seconds
        if not matvec_why_not(x, self.target):
            return choose_matvec(x, self.target).seconds
        found = ranked(x, self.target)
        return found[0].seconds if found else float("inf")

    # ---- joining --------------------------------------------------------------------------

    def join(self, kind: str, parts: list[Region]) -> None:
        """Put a joint Region in the place of its parts."""
        fuser, numbers = self.fuser, {p.number for p in parts}
        values = [v for p in parts for v in p.values]
        joint = Joint(kind, self.target, fuser.values, values, parts[0].total, parts=parts)
        joint.number = min(numbers)
        own, joint.needs = _together(parts)
        joint.after = set.union(*(p.after for p in parts)) - numbers
        joint.reads = set.union(*(p.reads for p in parts)) - set(values)
        at = fuser.regions.index(parts[0])
        fuser.regions[at] = joint
        for p in parts[1:]:
            fuser.regions.remove(p)
        for r in fuser.regions:
            if r.needs & own:
                r.needs = r.needs & ~own | bit(joint.number) | joint.needs
            if not numbers.isdisjoint(r.after):
                r.after = r.after - numbers | {joint.number}
        for v in values:
            fuser.region_of[v] = joint


def _together(regions: Sequence[Region]) -> tuple[int, int]:
    """Some Regions, and all that one of them needs but for themselves."""
    own = reduce(operator.or_, (bit(r.number) for r in regions))
    return own, reduce(operator.or_, (r.needs for r in regions)) & ~own


def joint_operands(parts: Sequence[WideDot], gated: bool) -> Operands | None:
    """The joint problem, or None where there is none."""
    every = [p.operands for p in parts if p.operands is not None]
    if len(every) < len(parts):
        return None
    first, results = every[0], {o.result for o in every}
    if first.sparse or (not gated if first.block else first.batch != 1):
        return None
    if first.scaled and first.block * len(parts) > BLOCK:
        return None  # registers do not hold their sums twice
    more = {  # ends, their list, scales of the tokens
        (*p.dot.inputs[2:3], *ops.group_lists(p.dot), *scales_of(p.dot)[:1]) for p in parts
    }
    if any(p.left != parts[0].left for p in parts) or len(more) > 1:
        return None
    if any(replace(o, n=first.n, result=first.result) != first for o in every):
        return None
    weights = tuple(high(o.n) for o in every)
    if gated:  # the last sees the products of all
        results = {v.dtype for v in parts[-1].stored}
        fits = len(set(weights)) == 1 and len(results) == 1
        return replace(first, result=results.pop(), weights=weights, gated=True) if fits else None
    return replace(first, n=sum(weights), weights=weights) if len(results) == 1 else None


class JointDot(WideDot):
    """Lowers one joint Region."""

    def __init__(self, region: Joint) -> None:
        for part in region.parts:
            part.inputs = region.inputs
        self.gated = region.gated
        super().__init__(region, [WideDot(part) for part in region.parts])
        self.written = [self] if self.gated else self.parts

    def _operands(self) -> Operands | None:
        joint = joint_operands(self.parts, self.gated)
        if joint is None or not all(accepts(v, self.dot) for v in self.stored if self.gated):
            return None
        self.left, self.right = self.parts[0].left, self.parts[0].right
        return replace(joint, result=self.stored[0].dtype)

    def _epilogue_class(self) -> str:
        """What is done to the products on their way out, as PlanTables tell it apart."""
        if len(self.stored) > (1 if self.gated else len(self.parts)):
            return "several"
        operands = {self.left.node, *(p.right.node for p in self.parts)}
        return "reads" if set(self.reads) - operands else PLAIN

    def matmul(self, x: Operands) -> Any:
        """The joint kernel over this Region's parameters."""
        results = [w.result for w in self.written]
        return KINDS[bool(x.block), x.scaled][1](
            x,
            self.plan,
            self.b,
            self.tokens(),
            [part.weights() for part in self.parts],
            results,
            [w.epilogue for w in self.written],
            self.prologue if self.wholes else None,
        )


def takes_parts(part: Node, region: Region, cut: Cut) -> bool:
    """Whether the library's kernel of a product can leave the sums of its blocks behind."""
    if not is_part(part):
        return False
    source = part.inputs[0].inputs[0]
    if source.shape != region.anchor.shape:
        return False
    if not cut.aligned(source, region):
        return False
    stored = [v for v in region.values if not is_part(v)]
    like = replace(region, values=[*region.values, part], stored=[*stored, part])
    found = laid(like)
    return found.asynchronous and found.choice is not None


class LibraryProducts(Family):
    """Products by kernels of the library: on matrix units, alone or several in one launch."""

    def grow(self, region: Region, node: Node, cut: Cut) -> bool:
        """Whether a value can be computed of the product on its way out: sums over blocks of
        columns that the kernel has whole too."""
        if region.kind == "dot" and node.op in REDUCE:
            leaves_sums = region.anchor.op is ops.dot and bool(cut.target.asynchronous_units)
            return leaves_sums and takes_parts(node, region, cut)
        return super().grow(region, node, cut)

    def breaks(self, node: Node, target: Target) -> Sequence[tuple[Size, int]]:
        """Few rows are one tile, a longer one or two, and weights are all that is read: (the rows,
        the first number that is more), where there may be far more than few. Half of a tile is a
        range of its own, since rows that are not there take their time to be filled with zeros."""
        if node.op is not ops.dot:
            return () if invariant() else breaks_of_groups(node, 4, 16)
        rows = node.shape[-2] if len(node.shape) > 1 else 1
        few = invariant() or not target.asynchronous_units or high(rows) <= 4 * FEW_TOKENS
        mosts = (FEW_TOKENS // 2, FEW_TOKENS, FITTED, 2 * FEW_TOKENS)
        return () if few else [(rows, most + 1) for most in mosts]

    def offers(self, region: Region) -> Offers:
        """The Plan that its model of time, or a table of measured ones, puts first."""
        dot = JointDot(region) if isinstance(region, Joint) else WideDot(region)
        if dot.operands is None:
            return "the operands are no plain matrices in a dtype of its matrix units"
        if dot.choice is None:
            return "no Plan fits"
        return [Offer(dot.choice.seconds, dot, "model of the kernel")]

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """The Body."""
        return [offer.plan.lower()]
