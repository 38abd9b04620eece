"""Chiplets: how many dies of a wafer work, what links between them carry, what a package costs.

Yield is negative binomial: defects come in clusters. Links are those of UCIe (Das Sharma, Hot
Interconnects 2025, Nature Electronics 2024). Invariant: no die is larger than a reticle; prices
and densities of defects are given by the caller, or are assumptions of a field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.errors import UserError

RETICLE = (26.0, 33.0)  # mm
WAFER = 300.0  # mm


@dataclass(frozen=True)
class LinkKind:
    """A kind of UCIe link: per module lanes, and its figures at a rate."""

    lanes: int
    gigabits: tuple[float, float]  # of a lane, from and to
    shoreline: float  # GB/s/mm at the highest rate
    energy: tuple[float, float]  # pJ/bit up to 16 Gb/s, and above
    latency: float = 2.0  # ns, there and back


LINKS = {
    "ucie-s": LinkKind(16, (4.0, 32.0), 224.0, (0.5, 0.6)),
    "ucie-a": LinkKind(64, (4.0, 32.0), 1317.0, (0.25, 0.3)),
}
USEFUL = 236 / 256  # bytes of a flit that are not header and check: an assumption


@dataclass(frozen=True)
class Link:
    """Some modules of a kind of UCIe link between two dies."""

    kind: str = "ucie-a"
    rate: float = 32.0  # Gb/s of a lane
    modules: int = 1

    def __post_init__(self) -> None:
        if self.kind not in LINKS:
            raise UserError("unknown link", op="chip", expected=", ".join(LINKS), got=self.kind)
        low, high = LINKS[self.kind].gigabits
        if not low <= self.rate <= high:
            raise _bad(
                "rate", f"{low:g} to {high:g} Gb/s", self.rate, min(max(self.rate, low), high)
            )
        if self.modules < 1:
            raise _bad("modules", "at least 1", self.modules, 1)

    @property
    def bandwidth(self) -> float:
        """Bytes/s one way, without headers."""
        return LINKS[self.kind].lanes * self.modules * self.rate * 1e9 / 8 * USEFUL

    @property
    def edge(self) -> float:
        """mm of the die's edge: both ways of all modules."""
        kind = LINKS[self.kind]
        bandwidth = 2 * kind.lanes * self.modules * self.rate / 8
        return bandwidth / (kind.shoreline * self.rate / kind.gigabits[1])

    @property
    def picojoules_per_bit(self) -> float:
        """pJ/bit."""
        return LINKS[self.kind].energy[0 if self.rate <= 16 else 1]

    def seconds(self, size: float) -> float:
        """Seconds for a message of some bytes, one way."""
        return LINKS[self.kind].latency / 2 * 1e-9 + size / self.bandwidth


@dataclass(frozen=True)
class Die:
    """A die; costs in dollars, assumptions unless given."""

    name: str
    area: float  # mm2
    count: int = 1  # in the package
    defects: float = 0.001  # of a mm2: 0.1 of a cm2
    clusters: float = 3.0  # the negative binomial's parameter
    wafer: float = 17_000.0  # dollars of a wafer

    def __post_init__(self) -> None:
        most = RETICLE[0] * RETICLE[1]
        if not 0 < self.area <= most:
            dies = math.ceil(self.area / most) if self.area > 0 else 1
            hint = f"{dies} dies of {self.area / dies:.0f} mm2 would fit" if dies > 1 else None
            raise UserError(
                f"bad area of die {self.name}",
                op="chip",
                expected=f"above 0 to {most:g} mm2 (a reticle: {RETICLE[0]:g} x {RETICLE[1]:g} mm)",
                got=self.area,
                hint=hint,
            )
        for field, low in (("count", 1), ("defects", 0.0), ("clusters", 1e-3), ("wafer", 0.0)):
            if getattr(self, field) < low:
                raise _bad(field, f"at least {low:g}", getattr(self, field), low)

    @property
    def good(self) -> float:
        """The share of dies that work."""
        return (1 + self.defects * self.area / self.clusters) ** -self.clusters

    @property
    def per_wafer(self) -> int:
        """Dies of a wafer, good or not."""
        whole = math.pi * (WAFER / 2) ** 2 / self.area
        return max(1, int(whole - math.pi * WAFER / math.sqrt(2 * self.area)))

    @property
    def cost(self) -> float:
        """Dollars of a die that works."""
        return self.wafer / self.per_wafer / self.good


@dataclass(frozen=True)
class Package:
    """Dies that were tested, on a substrate or an interposer."""

    dies: tuple[Die, ...]
    bond: float = 0.99  # share of dies that survive being placed
    substrate: float = 0.05  # dollars a mm2: an assumption; an interposer is more
    test: float = 5.0  # dollars a die

    @property
    def area(self) -> float:
        """mm2 of all dies."""
        return sum(die.count * die.area for die in self.dies)

    @property
    def cost(self) -> float:
        """Dollars of a package that works: what is lost when a bond fails is paid by the rest."""
        count = sum(die.count for die in self.dies)
        silicon = sum(die.count * (die.cost + self.test) for die in self.dies)
        placed = self.bond**count if count > 1 else 1.0
        return (silicon + self.substrate * 1.2 * self.area) / placed


def split(die: Die, parts: int, link: Link) -> Package:
    """The same circuits on several dies, each with a link on two of its sides."""
    if parts < 1:
        raise _bad("parts", "at least 1", parts, 1)
    side = math.sqrt(die.area / parts)
    extra = 0.0 if parts == 1 else 2 * min(link.edge, side) * 1.0  # a link is about 1 mm deep
    part = Die(
        f"{die.name}/{parts}",
        die.area / parts + extra,
        die.count * parts,
        die.defects,
        die.clusters,
        die.wafer,
    )
    return Package((part,))


def _bad(field: str, expected: str, got: object, fit: float) -> UserError:
    return UserError(
        f"bad {field}", op="chip", expected=expected, got=got, hint=f"{field} = {fit:g} would fit"
    )


__all__ = ["LINKS", "Die", "Link", "Package", "split"]
