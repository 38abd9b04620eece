"""A netlist laid out flat: every cell of every copy of a module, with nets numbered over the whole.

A module is compiled once to arrays, and each copy of it is those arrays with its nets renumbered,
so hundreds of thousands of cells take a second. Constants are followed through the logic here.
Invariant: nets 0 and 1 are the constants, net 2 is nowhere; names are made only when asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from .liberty import Cell, Library, logic_of
from .netlist import Module, Netlist

Array = np.ndarray
ZERO, ONE, NONE = 0, 1, 2


@dataclass
class _Compiled:
    """A module: its own nets from 3 on, its cells, and the modules inside."""

    nets: int
    kinds: Array  # of each cell
    pins: Array  # nets at the pins of one cell after the other, NONE where there is nothing
    names: list[str]
    inside: list[tuple[str, str, Array, Array]]  # name, module, nets of its ports, ours at them
    ports: dict[str, list[int]]


class Flat:
    """The cells: `kind` of each; `pins` has their nets, those of a cell from its `start` on."""

    def __init__(self, netlist: Netlist, library: Library) -> None:
        self.library = library
        self.names = list(library.cells)
        self.number = {name: n for n, name in enumerate(self.names)}
        self.pin_names = [list(cell.pins) for cell in library.cells.values()]
        self.sizes = np.array([len(pins) for pins in self.pin_names])
        self._compiled: dict[str, _Compiled] = {}
        for module in netlist.below():
            self._compiled[module.name] = self._compile(module)
        self._bases: list[int] = []  # the first cell of each part
        self._parts: list[tuple[str, str]] = []  # its place in the whole, and its module
        self._kinds: list[Array] = []
        self._pins: list[Array] = []
        self._same: list[tuple[int, int]] = []
        self._seen: dict[Any, _Simplified] = {}
        self.nets, self.cells = 3, 0
        top = self._compiled[netlist.top]
        nets = self._fresh(top)
        self._lay("", netlist.top, nets)
        self.kind = np.concatenate(self._kinds)
        self.pins = np.concatenate(self._pins)
        root = self._merged()
        self.pins = root[self.pins]
        sizes = self.sizes[self.kind]
        self.start = np.cumsum(sizes) - sizes
        self.cell_of = np.repeat(np.arange(self.cells), sizes)  # of each pin
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        for name, (direction, _) in netlist.modules[netlist.top].ports.items():
            for place, bit in enumerate(top.ports[name]):
                put = self.inputs if direction == "input" else self.outputs
                put[f"{name}[{place}]" if len(top.ports[name]) > 1 else name] = int(root[nets[bit]])

    def _compile(self, module: Module) -> _Compiled:
        numbers: dict[Any, int] = {"0": ZERO, "1": ONE, "x": NONE, "z": NONE}

        def net(bit: Any) -> int:
            return numbers.setdefault(bit, len(numbers) - 1)

        ports = {name: [net(bit) for bit in bits] for name, (_, bits) in module.ports.items()}
        kinds, pins, names, inside = [], [], [], []
        for i in module.instances:
            if i.kind in self.number:
                kinds.append(self.number[i.kind])
                for pin in self.pin_names[kinds[-1]]:
                    pins.append(net(i.pins[pin][0]) if i.pins.get(pin) else NONE)
                names.append(i.name)
                continue
            theirs: list[int] = []
            ours: list[int] = []
            for port, bits in i.pins.items():
                theirs += self._compiled[i.kind].ports[port]
                ours += [net(bit) for bit in bits]
            inside.append((i.name, i.kind, np.array(theirs, int), np.array(ours, int)))
        cells = (np.array(kinds, int), np.array(pins, int))
        return _Compiled(len(numbers) - 1, *cells, names, inside, ports)

    def _fresh(self, module: _Compiled) -> Array:
        nets = np.arange(module.nets)
        nets[3:] += self.nets - 3
        self.nets += module.nets - 3
        return nets

    def _lay(self, place: str, name: str, nets: Array) -> None:
        """One copy of a module; `nets` has the whole's number of each of its own."""
        module = self._compiled[name]
        self._bases.append(self.cells)
        self._parts.append((place, name))
        self._kinds.append(module.kinds)
        self._pins.append(nets[module.pins])
        self.cells += len(module.kinds)
        for child, kind, theirs, ours in module.inside:
            inner = self._fresh(self._compiled[kind])
            bound: dict[int, int] = {}
            for own, outside in zip(theirs.tolist(), nets[ours].tolist()):
                if own < 3 or own in bound:  # a constant, or an input that is an output too
                    self._same.append((bound.get(own, own), outside))
                else:
                    bound[own] = outside
            inner[list(bound)] = list(bound.values())
            self._lay(f"{place}{child}/", kind, inner)

    def _merged(self) -> Array:
        """The number of each net after nets that are one were joined; constants win."""
        root = np.arange(self.nets)

        def find(net: int) -> int:
            while root[net] != net:
                net = int(root[net])
            return net

        for a, b in self._same:
            low, high = sorted((find(a), find(b)))
            if low != NONE and high != low:
                root[high] = low
        for net in {n for pair in self._same for n in pair}:
            root[net] = find(net)
        for _ in range(64):
            shorter = root[root]
            if (shorter == root).all():
                break
            root = shorter
        return root

    def at(self, cells: Array, place: int) -> Array:
        """The nets at one pin of cells of one kind."""
        return self.pins[self.start[cells] + place]

    def at_pins(self, cell: int) -> dict[str, int]:
        """The net at each pin of a cell."""
        names = self.pin_names[self.kind[cell]]
        return dict(zip(names, self.pins[self.start[cell] :][: len(names)].tolist()))

    def where(self, cell: int) -> tuple[str, str]:
        """The place of the part that a cell is in, and its module."""
        return self._parts[bisect_right(self._bases, cell) - 1]

    def name(self, cell: int) -> str:
        """The full name of a cell."""
        part = bisect_right(self._bases, cell) - 1
        place, module = self._parts[part]
        return place + self._compiled[module].names[cell - self._bases[part]]

    def constants(self) -> tuple[dict[int, int], dict[int, dict[tuple[int, int], set[Any]]]]:
        """Nets that are constant, and for cells beside them which edges still pass.

        The second is by cell and (pin in, pin out): the (edge in, edge out) that are left.
        """
        order = np.argsort(self.pins, kind="stable")
        starts = np.searchsorted(self.pins[order], np.arange(self.nets + 1))
        values = {ZERO: 0, ONE: 1}
        left: dict[int, dict[tuple[int, int], set[Any]]] = {}
        waiting = [ZERO, ONE]
        while waiting:
            net = waiting.pop()
            for cell in set(self.cell_of[order[starts[net] : starts[net + 1]]].tolist()):
                nets = list(self.at_pins(cell).values())
                found = self._simplified(int(self.kind[cell]), nets, values)
                left[cell] = found.passes
                for pin, value in found.made.items():
                    if nets[pin] > NONE and nets[pin] not in values:
                        values[nets[pin]] = value
                        waiting.append(nets[pin])
        return values, left

    def _simplified(self, kind: int, nets: list[int], values: dict[int, int]) -> _Simplified:
        cell = self.library.cells[self.names[kind]]
        pins = zip(cell.pins.values(), nets)
        known = {p.name: values[net] for p, net in pins if not p.output and net in values}
        key = (kind, *sorted(known.items()))
        if key not in self._seen:
            self._seen[key] = _simplify(cell, known)
        return self._seen[key]


@dataclass(frozen=True)
class _Simplified:
    """What a kind of cell does with some inputs fixed: constant outputs, and edges that pass."""

    made: dict[int, int]  # by output pin
    passes: dict[tuple[int, int], set[Any]]


def _simplify(cell: Cell, known: dict[str, int]) -> _Simplified:
    names = list(cell.pins)
    inputs = [p.name for p in cell.pins.values() if not p.output]
    free = [p for p in inputs if p not in known]
    rows = [dict(zip(free, bits)) | known for bits in product((0, 1), repeat=len(free))]
    made: dict[int, int] = {}
    passes: dict[tuple[int, int], set[Any]] = {}
    for pin in cell.pins.values():
        if not pin.output or not pin.function or cell.sequential:
            continue
        logic = logic_of(pin.function)
        found = {logic(row) for row in rows}
        if len(found) == 1:
            made[names.index(pin.name)] = found.pop()
        for source in inputs:
            edges = set()
            for row in rows if source in free else ():
                low, high = logic({**row, source: 0}), logic({**row, source: 1})
                if low != high:
                    edges |= {(0, 0), (1, 1)} if high else {(0, 1), (1, 0)}
            passes[names.index(source), names.index(pin.name)] = edges
    return _Simplified(made, passes)


__all__ = ["NONE", "Flat"]
