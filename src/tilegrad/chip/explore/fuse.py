"""Layers that run together: a producer's results stay in a buffer until they have been read.

Rows (loop P) of the last layer's results are made in `parts`, one after the other. For each part
every layer, from the first to the last, makes the rows that the next one needs and does not have
yet, so nothing is computed twice; rows that slide on are kept. What lies between two layers is in
one Level (`at`) and never above it. Weights are brought for every part, or once where the layer's
number is in `resident`. Invariant: accesses are the sums of `count` over the pieces, equal to a
run of all parts; a chain that cannot run so, or does not fit, is an error that says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ...core.errors import UserError
from .accelerator import Accelerator
from .cost import Cost, cost_of
from .mapping import Mapping
from .problem import Problem
from .search import search

KINDS = ("reads", "fills", "updates", "drains")


@dataclass(frozen=True)
class Fusion:
    """How a chain runs: the Level that keeps what lies between, parts, whose weights stay."""

    at: str
    parts: int = 1
    resident: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Piece:
    """The rows of one layer that some parts make: equal pieces are one, with their number."""

    layer: int
    problem: Problem
    times: int
    inside: tuple[str, ...]  # Operands that are in the Level `at` and not above it


@dataclass
class Fused:
    """A chain on an Accelerator: each Piece with its Mapping and Cost."""

    chain: tuple[Problem, ...]
    accelerator: Accelerator
    fusion: Fusion
    made: list[tuple[Piece, Mapping, Cost]]
    loaded: dict[int, float] = field(default_factory=dict)  # layer: words of weights brought once

    @property
    def energy(self) -> float:
        """pJ of the whole chain."""
        found = sum(piece.times * float(cost.energy[0]) for piece, _, cost in self.made)
        return found + sum(self._load(layer)[0] for layer in self.loaded)

    @property
    def cycles(self) -> float:
        """Cycles, part after part and layer after layer."""
        found = sum(piece.times * float(cost.cycles[0]) for piece, _, cost in self.made)
        return found + sum(self._load(layer)[1] for layer in self.loaded)

    def words(self, level: str, layer: int, operand: str) -> dict[str, float]:
        """Reads, fills, updates and drains of a Level for an Operand of a layer."""
        total = dict.fromkeys(KINDS, 0.0)
        for piece, _, cost in self.made:
            number = cost.counts.levels.index(level)
            access = cost.counts.table.get((number, operand))
            if piece.layer == layer and access is not None:
                for kind in KINDS:
                    total[kind] += piece.times * float(getattr(access, kind)[0])
        if operand == "weights" and layer in self.loaded:
            above = self._weight_levels()
            if level in above[:-1]:
                total["reads"] += self.loaded[layer]
            if level in above[1:]:
                total["fills"] += self.loaded[layer]
        return total

    def _weight_levels(self) -> list[str]:
        """Levels that weights come through, down to `at`."""
        found = [level.name for level in self.accelerator.levels if "weights" in level.keeps]
        return found[: found.index(self.fusion.at) + 1]

    def _load(self, layer: int) -> tuple[float, float]:
        """(pJ, cycles) of bringing a layer's weights once."""
        levels = {level.name: level for level in self.accelerator.levels}
        bits = self.chain[layer].operand("weights").bits
        energy, slowest = 0.0, 0.0
        names = self._weight_levels()
        for upper, lower in pairwise(names):
            above, below = levels[upper], levels[lower]
            words = self.loaded[layer] * bits
            wires = above.read + above.network
            energy += words * (wires / above.word_bits + below.write / below.word_bits)
            if above.read_bandwidth is not None:
                slowest = max(slowest, words / above.word_bits / above.read_bandwidth)
        return energy, slowest


# ---- pieces -------------------------------------------------------------------------------------


def check_chain(chain: Sequence[Problem]) -> None:
    """Raise unless each layer's inputs are the results of the one before."""
    for problem in chain:
        if "P" not in problem.sizes or "C" not in problem.sizes:
            raise UserError("a layer without rows", op="fuse", expected="loops C and P",
                            got=", ".join(problem.sizes))  # fmt: skip
    for number, (first, second) in enumerate(pairwise(chain)):
        made = {"features": first.sizes["M"] * first.sizes.get("G", 1), "batch": first.sizes["N"]}
        taken = {
            "features": second.sizes["C"] * second.sizes.get("G", 1),
            "batch": second.sizes["N"],
        }
        for name in made:
            if made[name] != taken[name]:
                raise UserError(
                    f"layer {number + 1} does not take what layer {number} makes",
                    op="fuse",
                    expected=f"{name} {made[name]}",
                    got=taken[name],
                )
        for loop, inside in (("P", "R"), ("Q", "S")):
            reach, size = reach_of(second, loop, inside)(second.sizes[loop]), first.sizes[loop]
            step, spread = steps_of(second, loop, inside)
            pad = step + spread * (second.sizes[inside] - 1)  # what padding can add
            if not size - step < reach <= size + pad:
                raise UserError(
                    f"layer {number + 1} does not take what layer {number} makes",
                    op="fuse",
                    expected=f"about {size} along {loop}",
                    got=reach,
                )


def steps_of(problem: Problem, loop: str, inside: str) -> tuple[int, int]:
    """Stride and dilation along a loop of places."""
    if "stride" in problem.facts:
        return problem.facts["stride"], problem.facts["dilation"]
    for axis in problem.operand("inputs").axes:
        factors = dict(axis)
        if loop in factors:
            return factors[loop], factors.get(inside, 1)
    return 1, 1


def reach_of(problem: Problem, loop: str, inside: str) -> Any:
    """How many inputs so many results of a layer reach along a loop."""
    step, spread = steps_of(problem, loop, inside)
    return lambda results: step * (results - 1) + spread * (problem.sizes[inside] - 1) + 1


def rows_by_part(chain: Sequence[Problem], parts: int) -> list[list[tuple[int, int]]]:
    """Of each layer, for each part: the rows [from, to) that it makes in it."""
    rows = chain[-1].sizes["P"]
    if not 1 <= parts <= rows:
        raise UserError("bad parts", op="fuse", expected=f"1 to {rows} rows", got=parts)
    found: list[list[tuple[int, int]]] = [[] for _ in chain]
    done = [0] * len(chain)
    for part in range(parts):
        ends = [0] * len(chain)
        ends[-1] = rows * (part + 1) // parts
        for layer in range(len(chain) - 1, 0, -1):
            ends[layer - 1] = _needed(chain[layer - 1], chain[layer], ends[layer])
        for layer, end in enumerate(ends):
            found[layer].append((done[layer], max(done[layer], end)))
            done[layer] = max(done[layer], end)
    return found


def _needed(first: Problem, second: Problem, results: int) -> int:
    """Up to which row of the first the results of the second reach; padding is not made."""
    reach = reach_of(second, "P", "R")
    made = first.sizes["P"]
    before = max(reach(second.sizes["P"]) - made, 0) // 2  # rows of padding above
    if results == second.sizes["P"]:
        return made
    return min(max(reach(results) - before, 0), made)


def pieces(chain: Sequence[Problem], fusion: Fusion) -> list[Piece]:
    """What is run, equal pieces once."""
    found = []
    for layer, parts in enumerate(rows_by_part(chain, fusion.parts)):
        inside: tuple[str, ...] = ("inputs",) if layer else ()
        if layer < len(chain) - 1:
            inside += ("outputs",)
        if layer in fusion.resident:
            inside += ("weights",)
        for rows, times in Counter(end - start for start, end in parts).items():
            if rows:
                problem = replace(chain[layer], sizes={**chain[layer].sizes, "P": rows}, count=1)
                found.append(Piece(layer, problem, times, inside))
    return found


def kept_bytes(chain: Sequence[Problem], fusion: Fusion) -> float:
    """Bytes of `at` that are taken: rows between layers, and weights that stay."""
    parts = rows_by_part(chain, fusion.parts)
    total = 0.0
    for layer in range(len(chain) - 1):
        first, second = chain[layer], chain[layer + 1]
        step, _ = steps_of(second, "P", "R")
        reach = reach_of(second, "P", "R")
        before = max(reach(second.sizes["P"]) - first.sizes["P"], 0) // 2
        most = 0
        for (_, made), (start, _) in zip(parts[layer], parts[layer + 1]):
            most = max(most, made - max(step * start - before, 0))
        result = first.result
        row = first.words(result) // first.sizes["P"]
        total += most * row * result.bits / 8
    for layer in fusion.resident:
        weights = chain[layer].operand("weights")
        total += chain[layer].words(weights) * weights.bits / 8
    return total


def machine_for(accelerator: Accelerator, piece: Piece, at: str, taken: float) -> Accelerator:
    """The Accelerator as a Piece sees it: some Operands begin at `at`, and part of it is taken."""
    names = [level.name for level in accelerator.levels]
    if at not in names[1:]:
        raise UserError(
            "bad Level to keep results in", op="fuse", expected=", ".join(names[1:]), got=at
        )
    levels = []
    for number, level in enumerate(accelerator.levels):
        if number < names.index(at):
            keeps = tuple(name for name in level.keeps if name not in piece.inside)
            skips = tuple(name for name in level.skips if name not in piece.inside)
            level = replace(level, keeps=keeps, skips=skips)
        elif level.name == at:
            missing = set(piece.inside) - set(level.keeps)
            if missing:
                raise UserError(
                    f"{at} does not keep {', '.join(sorted(missing))}",
                    op="fuse",
                    expected=f"keeps with {', '.join(sorted(missing))}",
                    got=", ".join(level.keeps),
                )
            if level.bytes is not None:
                if taken >= level.bytes:
                    raise UserError(
                        f"what lies between layers does not fit in {at}",
                        op="fuse",
                        expected=f"at most {level.bytes:g} bytes",
                        got=f"{taken:g} bytes",
                        hint="more parts, or fewer weights that stay",
                    )
                level = replace(level, bytes=level.bytes - taken)
            level = replace(level, skips=())
        levels.append(level)
    return replace(accelerator, levels=tuple(levels), inside=piece.inside)


# ---- costs --------------------------------------------------------------------------------------


def fuse(
    chain: Sequence[Problem], accelerator: Accelerator, fusion: Fusion, mappings: Any
) -> Fused:
    """A chain by given Mappings: `mappings(piece)` gives the one of a Piece."""
    return _fused(
        chain, accelerator, fusion, lambda piece, machine: _given(piece, machine, mappings)
    )


def _given(piece: Piece, machine: Accelerator, mappings: Any) -> tuple[Mapping, Cost]:
    mapping = mappings(piece)
    return mapping, cost_of(piece.problem, machine, mapping)


def search_fused(
    chain: Sequence[Problem],
    accelerator: Accelerator,
    fusion: Fusion,
    dataflow: str = "any",
    **searching: Any,
) -> Fused:
    """A chain by the best Mapping found for each Piece."""

    def find(piece: Piece, machine: Accelerator) -> tuple[Mapping, Cost]:
        found = search(piece.problem, machine, dataflow, **searching)
        return found.mapping, found.cost

    return _fused(chain, accelerator, fusion, find)


def best_fusion(
    chain: Sequence[Problem],
    accelerator: Accelerator,
    at: str,
    dataflow: str = "any",
    **searching: Any,
) -> Fused:
    """The least energy of all powers of four of parts, with weights that stay or do not."""
    rows = chain[-1].sizes["P"]
    counts = sorted({min(1 << n, rows) for n in range(0, math.ceil(math.log2(rows)) + 2, 2)})
    found, refused = [], []
    for parts in counts:
        for resident in (frozenset(range(len(chain))), frozenset[int]()):
            fusion = Fusion(at, parts, resident)
            try:
                found.append(search_fused(chain, accelerator, fusion, dataflow, **searching))
            except UserError as error:
                refused.append(error)
    if not found:
        raise refused[-1]
    return min(found, key=lambda one: one.energy)


def _fused(chain: Sequence[Problem], accelerator: Accelerator, fusion: Fusion, find: Any) -> Fused:
    check_chain(chain)
    taken = kept_bytes(chain, fusion)
    made = []
    for piece in pieces(chain, fusion):
        machine = machine_for(accelerator, piece, fusion.at, taken)
        mapping, cost = find(piece, machine)
        made.append((piece, mapping, cost))
    loaded = {
        layer: float(chain[layer].words(chain[layer].operand("weights")))
        for layer in sorted(fusion.resident)
    }
    return Fused(tuple(chain), accelerator, fusion, made, loaded)


__all__ = [
    "Fused",
    "Fusion",
    "Piece",
    "best_fusion",
    "check_chain",
    "fuse",
    "kept_bytes",
    "pieces",
    "rows_by_part",
    "search_fused",
]
