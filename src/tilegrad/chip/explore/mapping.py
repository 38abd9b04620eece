"""Mappings: how the loops of a Problem are cut over Levels, in which order, and what is spatial.

At each Level some turns of each loop run one after the other (temporal, in an order) and some side
by side on the array below it (spatial: along columns or rows). A Level holds what its own turns
and all turns inside it touch. `Mappings` are many of one order, as arrays: what the counting
routine takes. Invariant: factors of a loop multiply to at least its size; a size that they exceed
is padded, and the padding is counted as work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as Table
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import UserError
from .accelerator import Accelerator
from .problem import Problem

Vector = np.ndarray  # (mappings,) float64, whole numbers


@dataclass(frozen=True)
class Cut:
    """What one Level does: turns in time in their order (outer first), and side by side."""

    temporal: tuple[tuple[str, int], ...] = ()
    columns: tuple[tuple[str, int], ...] = ()
    rows: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Mapping:
    """One Cut for each Level, from the outermost in."""

    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, *texts: str) -> Mapping:
        """From text, one for each Level: `Mapping.of("P8 Q2 M4", "P14 Q4 | Q14 | C3 S3", "R3")`.

        Parts between bars are turns in time, then columns, then rows.
        """
        return cls(tuple(_cut(text) for text in texts))

    def __str__(self) -> str:
        return " / ".join(_text(cut) for cut in self.cuts)

    def factors(self, loop: str) -> int:
        """How many turns a loop has in all."""
        return math.prod(
            factor
            for cut in self.cuts
            for part in (cut.temporal, cut.columns, cut.rows)
            for name, factor in part
            if name == loop
        )


def _cut(text: str) -> Cut:
    parts = [part.split() for part in text.split("|")]
    if len(parts) > 3:
        raise UserError("bad cut", op="Mapping", expected="time | columns | rows", got=text)
    made = []
    for part in parts + [[]] * (3 - len(parts)):
        for word in part:
            if not (word[0].isalpha() and word[1:].isdigit() and int(word[1:]) > 0):
                raise UserError("bad factor", op="Mapping", expected="as in P14", got=word)
        made.append(tuple((word[0], int(word[1:])) for word in part))
    return Cut(*made)


def _text(cut: Cut) -> str:
    parts = [
        " ".join(f"{loop}{factor}" for loop, factor in part)
        for part in (cut.temporal, cut.columns, cut.rows)
    ]
    while parts and not parts[-1]:
        parts.pop()
    return " | ".join(parts) or "-"


@dataclass
class Mappings:
    """Many Mappings of one order: `temporal[level][loop]`, `columns`, `rows` are Vectors.

    `orders[level]` names loops from outer to inner; a loop that a dict lacks has factor 1.
    """

    orders: tuple[tuple[str, ...], ...]
    temporal: tuple[dict[str, Vector], ...]
    columns: tuple[dict[str, Vector], ...]
    rows: tuple[dict[str, Vector], ...]
    size: int

    def spatial(self, level: int, loop: str) -> Vector | None:
        """Turns side by side below a Level, along both axes; None for 1."""
        across, down = self.columns[level].get(loop), self.rows[level].get(loop)
        if across is None or down is None:
            return across if down is None else down
        return across * down

    def extents(self, problem: Problem) -> list[dict[str, Vector]]:
        """For each Level, and for the multipliers, the turns of each loop that lie inside it."""
        ones = np.ones(self.size)
        found = [dict.fromkeys(problem.loops, ones)]
        for level in reversed(range(len(self.temporal))):
            inside = dict(found[0])
            for loop in problem.loops:
                for part in (self.temporal[level], self.columns[level], self.rows[level]):
                    if loop in part:
                        inside[loop] = inside[loop] * part[loop]
            found.insert(0, inside)
        return found

    def mapping(self, number: int) -> Mapping:
        """One of them."""

        def part(factors: Table[str, Vector], order: Sequence[str]) -> tuple[tuple[str, int], ...]:
            values = ((loop, int(factors[loop][number])) for loop in order if loop in factors)
            return tuple((loop, factor) for loop, factor in values if factor > 1)

        return Mapping(
            tuple(
                Cut(part(t, order), part(c, tuple(c)), part(r, tuple(r)))
                for t, c, r, order in zip(self.temporal, self.columns, self.rows, self.orders)
            )
        )


def mappings_of(
    problem: Problem, mappings: Sequence[Mapping], orders: Sequence[Sequence[str]] = ()
) -> Mappings:
    """Mappings that share an order, as arrays; without `orders` it is that of the first."""
    levels = len(mappings[0].cuts)
    named = orders or [[loop for loop, _ in cut.temporal] for cut in mappings[0].cuts]
    whole = []
    for level, given in enumerate(named):
        order = [*given, *(loop for loop in problem.loops if loop not in given)]
        for m in mappings:
            ranks = [order.index(loop) for loop, _ in m.cuts[level].temporal]
            if ranks != sorted(ranks):
                raise UserError(
                    "Mappings have one order", op="Mapping", expected=" ".join(order), got=str(m)
                )
        whole.append(tuple(order))

    def gathered(kind: str) -> tuple[dict[str, Vector], ...]:
        found = []
        for level in range(levels):
            parts = [dict(getattr(m.cuts[level], kind)) for m in mappings]
            loops = dict.fromkeys(loop for part in parts for loop in part)
            found.append({loop: np.array([float(p.get(loop, 1)) for p in parts]) for loop in loops})
        return tuple(found)

    return Mappings(
        tuple(whole), gathered("temporal"), gathered("columns"), gathered("rows"), len(mappings)
    )


def check(problem: Problem, accelerator: Accelerator, mapping: Mapping) -> None:
    """Raise unless a Mapping covers the Problem and fits: names the Level, its bound, what fits."""
    levels = accelerator.levels
    if len(mapping.cuts) != len(levels):
        raise UserError(
            "one cut for each Level is needed",
            op="Mapping",
            expected=f"{len(levels)}: {', '.join(level.name for level in levels)}",
            got=len(mapping.cuts),
        )
    for loop, size in problem.sizes.items():
        if mapping.factors(loop) < size:
            raise UserError(
                f"factors of loop {loop} do not cover it",
                op="Mapping",
                expected=f"a product of at least {size}",
                got=mapping.factors(loop),
                hint=f"{math.ceil(size / mapping.factors(loop))} times as many turns would fit",
            )
    for level, cut in zip(levels, mapping.cuts):
        for kind in ("columns", "rows"):
            used, bound = math.prod(f for _, f in getattr(cut, kind)), getattr(level, kind)
            if used > bound:
                raise UserError(
                    f"{kind} below {level.name} are too few",
                    op="Mapping",
                    expected=f"at most {bound}",
                    got=used,
                    hint=f"{kind} = {used} in the parameter file, or factors of at most {bound}",
                )
    _check_sizes(problem, accelerator, mapping)


def _check_sizes(problem: Problem, accelerator: Accelerator, mapping: Mapping) -> None:
    held = held_bytes(problem, accelerator, mappings_of(problem, [mapping]))
    for level, found in zip(accelerator.levels, held):
        if level.bytes is not None and found[0] > level.bytes:
            raise UserError(
                f"tiles do not fit in {level.name}",
                op="Mapping",
                expected=f"at most {level.bytes:g} bytes",
                got=f"{found[0]:g} bytes",
                hint=f"bytes = {found[0]:g} in the parameter file would fit, or smaller factors "
                f"at {level.name} and inside it",
            )


def held_bytes(problem: Problem, accelerator: Accelerator, many: Mappings) -> list[Vector]:
    """Bytes that each Level holds: the tiles it keeps, twice where the next one is held too."""
    found = []
    apart = set(accelerator.inside)
    for level, extents in zip(accelerator.levels, many.extents(problem)):
        total = np.zeros(many.size)
        if level.streams:
            extents = {**extents, **{loop: np.ones(many.size) for loop in level.streams}}
        for operand in problem.operands:
            if operand.name in level.keeps and operand.name in apart:
                apart.remove(operand.name)
            elif operand.name in level.keeps:
                total += box(operand.axes, extents) * (operand.bits / 8)
        found.append(total * (2 if level.double else 1))
    return found


def box(axes: Sequence[Sequence[tuple[str, int]]], extents: Table[str, Vector]) -> Vector:
    """Words of the box that loops of such extents touch."""
    total = np.ones(())
    for axis in axes:
        total = total * axis_length(axis, extents)
    return total


def axis_length(axis: Sequence[tuple[str, int]], extents: Table[str, Vector]) -> Vector:
    """How long the box is along one axis."""
    (loop, factor), *rest = axis
    length = extents[loop] if factor == 1 else 1 + factor * (extents[loop] - 1)
    for loop, factor in rest:
        length = length + factor * (extents[loop] - 1)
    return length


__all__ = ["Cut", "Mapping", "Mappings", "axis_length", "box", "check", "held_bytes", "mappings_of"]
