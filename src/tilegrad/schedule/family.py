"""Family: a way to compute Regions, with Plans and what they cost; and how one is selected.

A Family is asked whether a value may join one of its Regions (`grow`), what it offers for a Region
on a Target (`offers`: Plans with seconds, or in words why it has none), and for the Bodies of what
was selected (`lower`). It says where other Plans are better as a Symbol grows (`breaks`). The table
of Families is `families.py`; a package from outside adds its own there. Invariant: the offer with
the least seconds is taken; a fallback's only where no other Family offers; at a tie the one that
stands first in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.errors import InternalError
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import Size, high
from ..tile.build import Body
from .cost import bytes_moved
from .region import Cut, Region

ROOFLINE = "roofline"
Roles = Sequence[tuple[str, Any]]


class Made(NamedTuple):
    """What a lowering gives for one launch: a Body, and what each parameter of it stands for:
    ('read', i) of the Region's inputs, ('store', i) of what it stores, ('state', i) of what it
    writes in place, or ('scratch', (type, name))."""

    body: Body
    roles: Roles


Bodies = list[Made]  # in the order they run


@dataclass(frozen=True)
class Offer:
    """A Plan for a Region (of an op that becomes calls: what writes these), the seconds it is
    expected to take, and how these are known."""

    seconds: float
    plan: Any = None
    model: str = ROOFLINE


Offers = Sequence[Offer] | str  # Plans with their seconds, or why there is none


class Family:
    """A way to compute Regions; what it does not take it refuses in words."""

    name = ""
    fallback = False  # whether it is taken only where no other Family offers

    def grow(self, region: Region, node: Node, cut: Cut) -> bool:
        """Whether a value may join a Region of this Family: one of loops at its own elements, one
        of a product on the product's way out."""
        return cut.fits_loops(node, region) or cut.follows(node, region)

    def why_not(self, node: Node, target: Target) -> str:
        """Why no Region that starts with a Node is taken, before Regions are cut; '' if one may."""
        return ""

    def breaks(self, node: Node, target: Target) -> Sequence[tuple[Size, int]]:
        """(size, first): values of a symbolic size of a Node from which on other Plans are better;
        `jit` compiles each range of a Symbol when it is first met."""
        return ()

    def offers(self, region: Region) -> Offers:
        """Plans for a Region with their seconds, or why there is none."""
        return [Offer(roofline(region))]

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """The Bodies of a Region by an offer of this Family."""
        raise InternalError("schedule.family", f"{self.name} lowers nothing: {region.values}")

    def verdict(self, region: Region, verdict: Verdict) -> Verdict:
        """What `explain` tells of a Region that this Family won."""
        return verdict


Answers = Sequence[tuple[Family, Offers]]  # of Families that were asked


class ByFunction(Family):
    """A Family that lowers all Regions of its kinds by one function."""

    def __init__(self, function: Callable[[Region], Bodies]) -> None:
        self.function = function

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """What the function gives."""
        return self.function(region)


@dataclass(frozen=True)
class Verdict:
    """Who offered what for a Region, who refused and why, and why the winner won."""

    winner: str
    offered: tuple[tuple[str, Offer], ...]
    refused: tuple[tuple[str, str], ...]
    why: str


def roofline(region: Region) -> float:
    """Seconds at the Target's peak rates."""
    (flops, dtype), target = region.work, region.target
    moved = bytes_moved([*region.inputs, *region.stored])
    peaks = target.peak_flops(dtype), target.peak_bytes()
    return max(high(flops) / max(1.0, peaks[0]), high(moved) / max(1.0, peaks[1]))


def select(families: Sequence[Family], region: Region) -> tuple[Family, Offer, Verdict]:
    """The Family and the offer that a Region is lowered by."""
    answers = [(family, family.offers(region)) for family in families]
    why = refusals(answers)
    if why:
        raise InternalError("schedule.family", f"nothing computes {region.values}: {why}")
    family, offer, verdict = judged(answers)
    return family, offer, family.verdict(region, verdict)


def refusals(answers: Answers) -> str:
    """Why no Family offers anything; '' where one does."""
    if any(not isinstance(found, str) for _, found in answers):
        return ""
    return "; ".join(f"{f.name}: {why}" for f, why in answers) or "no Family has its op"


def judged(answers: Answers) -> tuple[Family, Offer, Verdict]:
    """The best of what Families answered, of which one at least offers."""
    refused = [(family.name, found) for family, found in answers if isinstance(found, str)]
    offered = [(f, offer) for f, found in answers if not isinstance(found, str) for offer in found]
    regular = [one for one in offered if not one[0].fallback]
    family, offer = min(regular or offered, key=lambda one: one[1].seconds)
    others = [one for one in offered if one[1] is not offer]
    why = (
        "the only offer"
        if not others
        else "the least seconds"
        if len(regular) > 1 or not regular
        else "the others are for what nothing else takes"
    )
    named = tuple((f.name, o) for f, o in offered)
    return family, offer, Verdict(family.name, named, tuple(refused), why)
