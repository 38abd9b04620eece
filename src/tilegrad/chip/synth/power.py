"""Power of a mapped netlist: an estimate from one activity for all nets.

Each net toggles `activity` times a cycle (a clock twice); a toggle charges the load at the net and
costs what the library's tables say of the cell that drives it. Wires and the clock's tree are left
out, and memories have no figure. Invariant: it is called an estimate wherever it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .flat import Flat
from .liberty import Cell, Table, stacked
from .timing import CLOCK, Timing


@dataclass(frozen=True)
class Power:
    """mW at a clock in MHz: charging loads, inside cells, leaking."""

    switching: float
    internal: float
    leakage: float
    megahertz: float
    activity: float

    @property
    def total(self) -> float:
        """mW of all of it."""
        return self.switching + self.internal + self.leakage


def estimate(flat: Flat, timing: Timing, megahertz: float, activity: float = 0.1) -> Power:
    """The power at a clock, with each net's toggles a cycle."""
    toggles = np.full(flat.nets, activity)
    toggles[:3] = 0.0
    toggles[list(flat.constants()[0])] = 0.0
    toggles[flat.inputs[CLOCK]] = 2.0
    switching = (toggles * timing.loads.mean(1)).sum() * flat.library.voltage**2 / 2
    internal = sum(_inside(flat, timing, kind, toggles) for kind in range(len(flat.names)))
    leak = np.array([c.leakage for c in flat.library.cells.values()])[flat.kind].sum()
    # pJ a cycle and MHz are uW
    scale = megahertz * 1e-3
    return Power(
        float(switching) * scale, float(internal) * scale, float(leak) * 1e-6, megahertz, activity
    )


def _inside(flat: Flat, timing: Timing, kind: int, toggles: np.ndarray) -> float:
    """pJ a cycle inside all cells of a kind."""
    cell = flat.library.cells[flat.names[kind]]
    cells = np.flatnonzero(flat.kind == kind)
    total = 0.0
    for place, pin in enumerate(cell.pins.values() if len(cells) else ()):
        tables = [t for t in pin.energy if t is not None]
        if not tables:
            continue
        here = flat.at(cells, place)
        source = flat.at(cells, _source(cell, pin.name)) if pin.output else here
        slew = timing.slews[source].max(1)
        each = _mean(tables, timing.loads[here].mean(1), slew)
        total += float((each * toggles[here]).sum())
    return total


def _mean(tables: list[Table], loads: np.ndarray, slews: np.ndarray) -> np.ndarray:
    """The mean of the energies of a rising and a falling edge."""
    stack = stacked(tables)
    made = [stack.at(np.full(len(loads), n), loads, slews) for n in range(len(tables))]
    return np.mean(made, 0)


def _source(cell: Cell, target: str) -> int:
    """The pin from which an output gets its slew: of its first arc."""
    names = list(cell.pins)
    return next((names.index(a.source) for a in cell.arcs if a.target == target), 0)


__all__ = ["Power", "estimate"]
