"""Families of an array beside the CPU: products, and what its vector unit does to sums of integers.

The array takes a product with the ops that follow it, or ops alone, where its vector unit has them;
everything else is the host's, in the same memory and the same Schedule. A Body of the array has an
ArrayWork in its notes; the Body itself computes the same values on the CPU, to the bit. Invariant:
what is refused is refused in words, and the host takes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph import ops
from ..ir.node import Node, topological
from ..runtime.language import language_of
from ..tile.array import ArrayWork
from .array_dot import ArrayDot
from .array_steps import ALONG, VECTOR, Reader, Refused, takes_product
from .array_work import work_of_region
from .cut import Cut
from .dot import VectorProducts
from .family import Bodies, ByFunction, Family, Offer
from .loops import lower_loops
from .region import Region, leaves_of


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
