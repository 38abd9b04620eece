"""A static timer: the slowest path of a mapped netlist, by the delay tables of its library.

Every net has an arrival and a slew for its rising and its falling edge; a cell's delay follows from
the slew at its input and the load at its output. Clocks are ideal, wires have no load, constants
are followed through the logic. Invariant: it is what OpenSTA computes without wires, and the tests
hold both equal; nothing here knows of placement, so no number here is a sign-off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...core.errors import UserError
from .flat import NONE, Flat
from .liberty import Stack, Table, stacked

Array = np.ndarray
EDGES = ("rise", "fall")
CLOCK = "clk"


@dataclass(frozen=True)
class Step:
    """A cell on a path: when the edge leaves it."""

    cell: str
    kind: str
    edge: str
    arrival: float  # ns
    delay: float


@dataclass(frozen=True)
class Path:
    """A path from a register, a memory or an input to another, or to an output."""

    start: str
    end: str
    steps: tuple[Step, ...]
    arrival: float  # ns
    setup: float

    @property
    def period(self) -> float:
        """The shortest clock period that it lets pass, in ns."""
        return self.arrival + self.setup


@dataclass(frozen=True)
class Timing:
    """The slowest path, and the period that paths ending in each kind of block need."""

    path: Path
    blocks: dict[str, float]
    loads: Array  # pF at each net, for rising and falling edges
    slews: Array  # ns at each net, likewise

    @property
    def megahertz(self) -> float:
        """The highest clock, without wires."""
        return 1e3 / self.path.period


class _Tables:
    """Rows of arcs and setups for each kind of cell, over one stack of tables."""

    def __init__(self, flat: Flat) -> None:
        self.flat, self.tables = flat, list[Table]()
        self.arcs = [self._arcs(n) for n in flat.names]
        self.setups = [self._setups(n) for n in flat.names]
        self.stack: Stack = stacked(self.tables)

    def _table(self, table: Table) -> int:
        self.tables.append(table)
        return len(self.tables) - 1

    def _arcs(self, name: str) -> Array:
        """(pin in, pin out, edge in, edge out, delay table, slew table)."""
        pins = self.flat.pin_names[self.flat.number[name]]
        rows = []
        for arc in self.flat.library.cells[name].arcs:
            tables = {}
            for edge in (0, 1):
                delay, slew = arc.delay[edge], arc.slew[edge]
                if delay is not None and slew is not None:
                    tables[edge] = (self._table(delay), self._table(slew))
            for a, b in arc.pairs:
                if b in tables:
                    rows.append((pins.index(arc.source), pins.index(arc.target), a, b, *tables[b]))
        return np.array(rows, int).reshape(-1, 6)

    def _setups(self, name: str) -> Array:
        """(data pin, clock pin, edge of data, table)."""
        pins = self.flat.pin_names[self.flat.number[name]]
        rows = []
        for one in self.flat.library.cells[name].setups:
            for edge, table in enumerate(one.times):
                if table is not None:
                    row = (pins.index(one.pin), pins.index(one.clock), edge, self._table(table))
                    rows.append(row)
        return np.array(rows, int).reshape(-1, 4)


class Timer:
    """Edges of the timing graph; a node is a net and an edge: 2 * net + (0 rises, 1 falls)."""

    def __init__(self, flat: Flat) -> None:
        self.flat, self.tables = flat, _Tables(flat)
        self.loads = self._loads()
        rows: list[Array] = []
        ends: list[Array] = []
        for kind in range(len(flat.names)):
            cells = np.flatnonzero(flat.kind == kind)
            for wanted, put in ((self.tables.arcs[kind], rows), (self.tables.setups[kind], ends)):
                for row in wanted if len(cells) else ():
                    a, b = flat.at(cells, row[0]), flat.at(cells, row[1])
                    same = [np.full(len(cells), x) for x in row]
                    put.append(np.stack([a, b, cells, *same], 1))
        edges = _joined(rows, 9)
        self.edges = edges[(edges[:, 0] != NONE) & (edges[:, 1] != NONE)]
        self.ends = _joined(ends, 7)
        self._without_constants()
        self.source = 2 * self.edges[:, 0] + self.edges[:, 5]
        self.target = 2 * self.edges[:, 1] + self.edges[:, 6]

    def _loads(self) -> Array:
        """pF at each net, for edges that rise and that fall."""
        flat = self.flat
        pins = [pin for cell in flat.library.cells.values() for pin in cell.pins.values()]
        weight = np.array([(0.0, 0.0) if pin.output else pin.load for pin in pins])
        first = np.cumsum(flat.sizes) - flat.sizes
        of_pin = (
            first[flat.kind[flat.cell_of]] + np.arange(len(flat.pins)) - flat.start[flat.cell_of]
        )
        found = [np.bincount(flat.pins, weight[of_pin, e], flat.nets) for e in (0, 1)]
        return np.stack(found, 1)

    def _without_constants(self) -> None:
        """Leaves out edges that constants stop."""
        values, passes = self.flat.constants()
        still = np.array(sorted(values), int)
        keep = ~(np.isin(self.edges[:, 0], still) | np.isin(self.edges[:, 1], still))
        for n in np.flatnonzero(keep & np.isin(self.edges[:, 2], np.array(sorted(passes), int))):
            row = self.edges[n]
            left = passes[int(row[2])].get((int(row[3]), int(row[4])))
            keep[n] = left is None or (int(row[5]), int(row[6])) in left
        self.edges = self.edges[keep]
        self.ends = self.ends[~np.isin(self.ends[:, 0], still)]

    def run(self, report: Callable[[float, float], None] | None = None) -> Timing:
        """Arrivals of all nets, wave by wave from registers, memories and inputs."""
        nodes = 2 * self.flat.nets
        arrival, slew = np.full(nodes, -np.inf), np.zeros(nodes)
        for net in self.flat.inputs.values():
            arrival[[2 * net, 2 * net + 1]] = 0.0
        loads = self.loads.ravel()
        order = np.argsort(self.source, kind="stable")
        starts = np.searchsorted(self.source[order], np.arange(nodes + 1))
        waits = np.bincount(self.target, minlength=nodes)
        ready, done = np.flatnonzero((waits == 0) & (np.diff(starts) > 0)), 0
        while len(ready):
            found = order[_ranges(starts[ready], starts[ready + 1])]
            a, b = self.source[found], self.target[found]
            delay = self.tables.stack.at(self.edges[found, 7], loads[b], slew[a])
            np.maximum.at(arrival, b, arrival[a] + delay)
            np.maximum.at(slew, b, self.tables.stack.at(self.edges[found, 8], loads[b], slew[a]))
            np.subtract.at(waits, b, 1)
            ready, done = np.unique(b[waits[b] == 0]), done + len(found)
            if report is not None:
                report(done, len(self.edges))
        if done < len(self.edges):
            left = self.edges[np.flatnonzero(waits[self.target] > 0)[0], 2]
            raise UserError("logic in a loop", op="timing", got=self.flat.name(int(left)))
        return self._ended(arrival, slew)

    def _ended(self, arrival: Array, slew: Array) -> Timing:
        node = 2 * self.ends[:, 0] + self.ends[:, 5]
        setup = self.tables.stack.at(self.ends[:, 6], np.zeros(len(node)), slew[node])
        needs = arrival[node] + setup
        cells = self.ends[:, 2]
        best: tuple[float, int, float, str] = (-np.inf, 0, 0.0, "")
        blocks: dict[str, float] = {}
        for at in np.argsort(-needs, kind="stable").tolist():
            part = self.flat.where(int(cells[at]))[1]
            if part not in blocks and np.isfinite(needs[at]):
                blocks[part] = float(needs[at])
                name = self.flat.name(int(cells[at]))
                best = max(best, (float(needs[at]), int(node[at]), float(setup[at]), name))
        for name, net in self.flat.outputs.items():
            for edge in (0, 1):
                best = max(best, (float(arrival[2 * net + edge]), 2 * net + edge, 0.0, name))
        if not np.isfinite(best[0]):
            raise UserError("no path to time", op="timing", expected="registers or outputs")
        path = self._path(best, arrival, slew)
        return Timing(path, blocks, self.loads, slew.reshape(-1, 2))

    def _path(self, best: tuple[float, int, float, str], arrival: Array, slew: Array) -> Path:
        """Back from an end, by the edge that was last at each net."""
        order = np.argsort(self.target, kind="stable")
        starts = np.searchsorted(self.target[order], np.arange(2 * self.flat.nets + 1))
        loads, node, steps = self.loads.ravel(), best[1], []
        while starts[node] < starts[node + 1]:
            found = order[starts[node] : starts[node + 1]]
            a = self.source[found]
            full = np.full(len(found), loads[node])
            delay = self.tables.stack.at(self.edges[found, 7], full, slew[a])
            at = int(np.argmax(arrival[a] + delay))
            cell = int(self.edges[found[at], 2])
            kind = self.flat.names[self.flat.kind[cell]]
            name, edge = self.flat.name(cell), EDGES[node & 1]
            steps.append(Step(name, kind, edge, float(arrival[node]), float(delay[at])))
            node = int(a[at])
        steps.reverse()
        inputs = {net: name for name, net in self.flat.inputs.items()}
        start = inputs.get(node // 2, "")
        if start == CLOCK or not start:
            start = steps[0].cell if steps else start
        return Path(start, best[3], tuple(steps), float(arrival[best[1]]), best[2])


def _joined(rows: list[Array], width: int) -> Array:
    return np.concatenate(rows) if rows else np.zeros((0, width), int)


def _ranges(starts: Array, ends: Array) -> Array:
    """All numbers of several ranges, one after the other."""
    sizes = ends - starts
    first = np.repeat(starts - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    return first + np.arange(sizes.sum())


__all__ = ["Path", "Step", "Timer", "Timing"]
