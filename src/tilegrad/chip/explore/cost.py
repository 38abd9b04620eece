"""Energy, cycles and area of Mappings, from their accesses.

Energy is words times the energy of an access, scaled by the bits of an Operand, plus
multiplications, networks and leakage of the instances used. Cycles are the most of what the
multipliers and each Level's bandwidth need, plus filling the first tiles and draining the last.
Invariant: a Cost's parts add up to its energy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .accelerator import Accelerator, Level
from .count import EXACT, Access, Conventions, Counts, count
from .mapping import Mapping, Mappings, Vector, box, check, mappings_of
from .problem import Problem


@dataclass
class Cost:
    """What Mappings cost; Vectors, one entry each."""

    parts: dict[str, Vector]  # pJ: `mac`, each Level by name, `network`, `leak`
    bounds: dict[str, Vector]  # cycles: `compute`, each Level by name
    edges: Vector  # cycles to fill the first tiles and drain the last
    counts: Counts

    @property
    def energy(self) -> Vector:
        """pJ."""
        return sum(self.parts.values(), np.zeros(()))

    @property
    def cycles(self) -> Vector:
        """Cycles from the first word in to the last word out."""
        found = self.edges
        most = self.bounds["compute"]
        for bound in self.bounds.values():
            most = np.maximum(most, bound)
        return found + most

    def bound_by(self, number: int = 0) -> str:
        """What takes the most cycles."""
        return max(self.bounds, key=lambda name: float(self.bounds[name][number]))


def cost(
    problem: Problem, accelerator: Accelerator, many: Mappings, conventions: Conventions = EXACT
) -> Cost:
    """The Cost of each of some Mappings."""
    counts = count(problem, accelerator, many, conventions)
    parts = {"mac": np.full(many.size, problem.density * problem.macs * accelerator.mac)}
    bounds = {"compute": counts.cycles / accelerator.macs_a_cycle}
    network, leak = np.zeros(many.size), np.zeros(many.size)
    for number, level in enumerate(accelerator.levels):
        energy, reads, writes = np.zeros(many.size), np.zeros(many.size), np.zeros(many.size)
        for operand in problem.operands:
            if operand.name not in level.keeps:
                continue
            access = counts.table[(number, operand.name)]
            read, written = _words(access, conventions)
            scale = operand.bits / level.word_bits
            energy = energy + scale * (level.read * read + level.write * written)
            reads, writes = reads + scale * read, writes + scale * written
            wires = _wires(accelerator, number, operand.name)
            if wires:
                network = network + scale * wires * access.moved
        parts[level.name] = energy
        bound = _bandwidth(level, reads, writes)
        if bound is not None:
            bounds[level.name] = bound / counts.instances[number]
        leak = leak + level.leak * counts.instances[number] * counts.cycles
    parts["network"] = network
    parts["leak"] = leak + accelerator.mac_leak * counts.instances[-1] * counts.cycles
    return Cost(parts, bounds, _edges(problem, accelerator, many), counts)


def _wires(accelerator: Accelerator, number: int, operand: str) -> float:
    """pJ of a word on its way to the next Level that keeps it, past those that do not."""
    total = 0.0
    for i, level in enumerate(accelerator.levels[number:]):
        if i and operand in level.keeps:
            break
        total += level.network
    return total


def _words(access: Access, conventions: Conventions) -> tuple[Vector, Vector]:
    """Words read and written."""
    read = access.reads + access.drains if conventions.drains else access.reads
    return read, access.updates + access.fills if conventions.fills else access.updates


def _bandwidth(level: Level, reads: Vector, writes: Vector) -> Vector | None:
    """Cycles of one Level's ports, all instances together; None: without bound."""
    found = None
    if level.read_bandwidth is not None:
        found = reads / level.read_bandwidth
    if level.write_bandwidth is not None:
        written = writes / level.write_bandwidth
        found = written if found is None else np.maximum(found, written)
    return found


def _edges(problem: Problem, accelerator: Accelerator, many: Mappings) -> Vector:
    """Cycles before the first tiles are there, and until the last results are out."""
    total = np.zeros(many.size)
    extents = many.extents(problem)
    for operand in problem.operands:
        keeping = [i for i, v in enumerate(accelerator.levels) if operand.name in v.keeps]
        for above, below in pairwise(keeping):
            level = accelerator.levels[above]
            result = operand is problem.result
            bandwidth = level.write_bandwidth if result else level.read_bandwidth
            if bandwidth is None:
                continue
            words = box(operand.axes, extents[below])
            for number in range(above, below):
                for loop in operand.loops:
                    side = many.spatial(number, loop)
                    words = words if side is None else words * side
            total = total + words * (operand.bits / level.word_bits / bandwidth)
    return total


def cost_of(
    problem: Problem,
    accelerator: Accelerator,
    mapping: Mapping,
    conventions: Conventions = EXACT,
) -> Cost:
    """The Cost of one Mapping, which must fit."""
    check(problem, accelerator, mapping)
    return cost(problem, accelerator, mappings_of(problem, [mapping]), conventions)


__all__ = ["Cost", "cost", "cost_of"]
