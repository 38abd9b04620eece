"""Families of an array beside the CPU: products, and what its vector unit does to sums of integers.

The array takes a product with the ops that follow it, or ops alone, where its vector unit has them;
everything else is the host's, in the same memory and the same Schedule. A Body of the array has an
ArrayWork in its notes; the Body itself computes the same values on the CPU, to the bit: of 16-bit
floats a tile of the unit's depth is summed from zero, k after k, and added to the tiles before it;
with sums in place the unit's depth is that of the whole product. Subnormal numbers are zero of
their sign: operands, products and sums. Invariant: what is refused is refused in words, and the
host takes it; values are those of the array's simulator, NaNs' bits apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.dtype import float16, float32
from ..core.target import MatrixUnit, Target
from ..graph import ops
from ..ir.node import Node, topological
from ..ir.symbol import Size, high, modulo
from ..runtime.language import language_of
from ..tile.array import ArrayWork
from .array_steps import ALONG, VECTOR, Reader, Refused, takes_product
from .array_work import work_of_region
from .dot import DotLowering, VectorProducts
from .family import Bodies, ByFunction, Family, Offer
from .loops import lower_loops
from .plan import Plan
from .region import Cut, Region, leaves_of


def refuses_value(node: Node, region: Region | None, leaves: Sequence[Node], cut: Cut) -> str:
    """Why the vector unit does not compute a value of a Region; '' if it does."""
    inside = list(region.values) if region is not None else []
    dot = inside[0] if inside and inside[0].op is ops.dot else None
    own = set(inside)
    outside = {x for x in leaves if x not in own}
    for v in inside:  # what values before it read
        outside |= {n for n in topological([v]) if n in cut.values and n not in own}
    try:
        Reader([*inside, node], outside, cut.target, dot).value(node)
    except Refused as why:
        return str(why)
    return ""


class ArrayFamily(Family):
    """What both Families of an array share."""

    def offers(self, region: Region, target: Target) -> Sequence[Offer] | str:
        """The array's own rate, where it has all that the Region needs."""
        try:
            works = work_of_region(region, target)
        except Refused as why:
            return f"the array {why}"
        seconds = language_of(target).seconds
        if seconds is None:
            return f"nobody counts the time of an array in {target.language}"
        made = [(seconds(work.at_most().to_text(), target), work) for work in works]
        offers = [Offer(s, work, "closed form") for s, work in made if not isinstance(s, str)]
        return offers or str(made[0][0])


class ArrayProducts(ArrayFamily, VectorProducts):
    """Products on the array, with what its vector unit does to sums."""

    def why_not(self, node: Node, target: Target) -> str:
        """By the dtypes of the multipliers."""
        return takes_product(node, target)

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], cut: Cut) -> bool:
        """Whether the vector unit can go on with the sums."""
        if takes_product(region.anchor, cut.target):
            return False
        if not cut.follows(node, region, leaves):
            return False
        return not refuses_value(node, region, leaves, cut)

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The host's Body, with the array's work beside it: floats in the array's order."""
        name, unit = f"array_{name}", target.array
        if unit is None or not unit.accumulator.is_float:
            return marked(super().lower(region, offer, target, name), offer.plan)
        lowering = ArrayDot(region, target, name)
        lowering.rate = offer.plan.rate
        return marked([lowering.lower()], offer.plan)


class ArrayLoops(ArrayFamily):
    """Elements through the vector unit of the array."""

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], cut: Cut) -> bool:
        """Whether all of it is the vector unit's."""
        if not cut.fits_loops(node, region, leaves) or refuses_first(region, cut):
            return False
        return not refuses_value(node, region, leaves, cut)

    def offers(self, region: Region, target: Target) -> Sequence[Offer] | str:
        """Where it takes all of it."""
        if region.kind != "loops" or region.order != "row":
            return "the array has no sums along an axis but rows"
        return super().offers(region, target)

    def lower(self, region: Region, offer: Offer, target: Target, name: str) -> Bodies:
        """The host's Body, with the array's work beside it."""
        return marked(lower_loops(region, target, f"array_{name}"), offer.plan)


def refuses_first(region: Region, cut: Cut) -> str:
    """Why the vector unit does not compute the value that a Region of loops began with."""
    first = region.values[0]
    return refuses_value(first, None, leaves_of(first, cut.values), cut)


class HostProducts(VectorProducts):
    """Products that the array has not, on the CPU beside it."""

    fallback = True

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], cut: Cut) -> bool:
        """As without an array, unless the product is the array's."""
        if not takes_product(region.anchor, cut.target):
            return False
        return super().grow(region, node, leaves, cut)


class HostLoops(ByFunction):
    """Loops that the array has not, on the CPU beside it."""

    fallback = True

    def __init__(self) -> None:
        super().__init__(lower_loops)

    def grow(self, region: Region, node: Node, leaves: Sequence[Node], cut: Cut) -> bool:
        """As without an array; what the array takes is left to it."""
        if not super().grow(region, node, leaves, cut):
            return False
        if node.op in VECTOR or node.op in ALONG or node.op in (ops.cast, ops.fixed):
            if not refuses_value(node, None, leaves, cut):
                return False
        return bool(refuses_first(region, cut))


def marked(bodies: Bodies, work: ArrayWork) -> Bodies:
    """Bodies with the work of the array in their notes."""
    for body, _ in bodies:
        body.notes["array"] = work.to_text()
    return bodies


# ---- products in the array's order ---------------------------------------------------------------

TINY, HALF_TINY = 2.0**-126, 2.0**-14  # the smallest normal fp32, fp16


class ArrayDot(DotLowering):
    """Lowers one product in the order of the array at a rate."""

    rate = ""

    @property
    def unit(self) -> MatrixUnit:
        """The array as it multiplies at this rate."""
        return next(u for u in self.target.array_rates if u.name == self.rate or not self.rate)

    def choose(self) -> Plan:
        """The host's, with blocks of k that are tiles of the array."""
        depth = min(self.unit.k, high(self.problem.sizes[2]))
        return replace(super().choose(), block_k=depth, unroll=1)

    def flushed(self, x: Node, least: float = TINY) -> Node:
        """x without subnormal numbers."""
        b = self.b
        small = b.apply("less", b.apply("absolute", x), b.constant(least, float32, ()))
        return b.apply("where", small, b.apply("multiply", x, b.constant(0, float32, ())), x)

    def multiplied(self, left: Node, line: Node, sums: Node) -> Node:
        """A product, then a sum, each rounded."""
        half = float16 in [x.dtype for x in self.region.values[0].inputs]
        given = [self.flushed(x, HALF_TINY if half else TINY) for x in (left, line)]
        product = self.flushed(self.b.apply("multiply", *given))
        return self.flushed(self.b.apply("add", sums, product))

    def with_earlier(self, acc: Node, at: Size, rows: list[Size], start: Size) -> Node:
        """The tiles before it and this one; rows of the array that have no k add zeros."""
        b, k = self.b, self.problem.sizes[2]
        unit = self.unit
        whole = unit.k if unit.k <= 2 * unit.m else 2 if self.rate else 1  # of k, without zeros
        if modulo(k, whole) != 0:
            zero = b.apply("add", acc, b.constant(0, float32, ()))
            acc = b.branch(b.less(k, at + unit.k), lambda: [zero], lambda: [acc])[0]
        return self.flushed(super().with_earlier(acc, at, rows, start))

    def epilogue(self, row: Size, lane: Size, acc: Node) -> None:
        """Sums as they are stored: fp16 has no subnormal numbers either."""
        half = self.region.values[0].dtype is float16
        super().epilogue(row, lane, self.flushed(acc, HALF_TINY) if half else acc)
