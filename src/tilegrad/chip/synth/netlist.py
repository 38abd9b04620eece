"""A mapped netlist: modules of cells and other modules, as Yosys writes it in JSON.

Modules get their plain names back, memories become cells of one kind for each size with a pin for
each bit, and nets with too much load get trees of buffers. Invariant: every cell is a module of the
netlist, a memory, or a cell of the library.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from .liberty import Library

MEMORY = "npu_sram"
Bits = list[Any]  # numbers of nets, or "0", "1", "x"


@dataclass
class Instance:
    """A cell or a module within a module, with the nets at its pins."""

    name: str
    kind: str
    pins: dict[str, Bits]


@dataclass
class Module:
    """A module: ports with their nets, and what is inside."""

    name: str
    ports: dict[str, tuple[str, Bits]]
    instances: list[Instance]
    nets: dict[str, Any] = field(default_factory=dict)


@dataclass
class Netlist:
    """Modules by name; `top` is the outermost."""

    top: str
    modules: dict[str, Module]

    @staticmethod
    def load(path: Path) -> Netlist:
        """Reads what `write_json` of Yosys has written."""
        table = json.loads(path.read_text(encoding="utf-8"))["modules"]
        kept = {n: m for n, m in table.items() if not _is_set(m["attributes"].get("blackbox"))}
        names = _plain_names(kept)
        modules = {}
        for old, one in kept.items():
            ports = {n: (p["direction"], p["bits"]) for n, p in one["ports"].items()}
            made = [_instance(n, c, names) for n, c in one["cells"].items()]
            modules[names[old]] = Module(names[old], ports, made, one["netnames"])
        used = {i.kind for m in modules.values() for i in m.instances}
        tops = [n for n in modules if n not in used]
        if len(tops) != 1:
            raise UserError("no single top", op="netlist", expected="one", got=", ".join(tops))
        return Netlist(tops[0], modules)

    def to_table(self, library: Library) -> dict[str, Any]:
        """What `read_json` of Yosys takes."""
        made = {}
        for m in self.modules.values():
            ports = {n: {"direction": d, "bits": b} for n, (d, b) in m.ports.items()}
            cells = {
                i.name: {
                    "hide_name": 0,
                    "type": i.kind,
                    "parameters": {},
                    "attributes": {},
                    "port_directions": self.directions(i, library),
                    "connections": i.pins,
                }
                for i in m.instances
            }
            attributes = {"top": "1"} if m.name == self.top else {}
            made[m.name] = {
                "attributes": attributes,
                "ports": ports,
                "cells": cells,
                "netnames": m.nets,
            }
        return {"modules": made}

    def directions(self, one: Instance, library: Library) -> dict[str, str]:
        """The direction of each pin."""
        if one.kind in self.modules:
            return {n: d for n, (d, _) in self.modules[one.kind].ports.items()}
        pins = library.cells[one.kind].pins
        return {n: "output" if pins[n].output else "input" for n in one.pins}

    def below(self) -> list[Module]:
        """Modules with those inside before those around them."""
        made: dict[str, Module] = {}

        def visit(name: str) -> None:
            for kind in {i.kind for i in self.modules[name].instances}:
                if kind in self.modules and kind not in made:
                    visit(kind)
            made[name] = self.modules[name]

        visit(self.top)
        return list(made.values())

    def counts(self) -> dict[str, int]:
        """How often each module is in the whole."""
        found = Counter({self.top: 1})
        for module in reversed(self.below()):
            for i in module.instances:
                if i.kind in self.modules:
                    found[i.kind] += found[module.name]
        return dict(found)

    def memories(self) -> dict[str, int]:
        """How often each kind of memory is in the whole."""
        times, found = self.counts(), Counter[str]()
        for name, module in self.modules.items():
            for i in module.instances:
                if i.kind.startswith(MEMORY):
                    found[i.kind] += times[name]
        return dict(found)


def _is_set(value: Any) -> bool:
    return value is not None and "1" in str(value)


def _plain_names(table: dict[str, Any]) -> dict[str, str]:
    """`$paramod$...\\npu_skew` is npu_skew, or npu_skew_2 where there are several."""
    made: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for name in table:
        found = re.search(r"\\(\w+)", name)
        plain = found[1] if name.startswith("$") and found else name
        seen[plain] += 1
        made[name] = plain if seen[plain] == 1 else f"{plain}_{seen[plain]}"
    return made


def _instance(name: str, cell: dict[str, Any], names: dict[str, str]) -> Instance:
    kind, pins = cell["type"], cell["connections"]
    if kind == MEMORY or names.get(kind) == MEMORY:
        rows, width = (int(cell["parameters"][n], 2) for n in ("ROWS", "WIDTH"))
        kind = f"{MEMORY}_{rows}x{width}"
        pins = {f"{pin}_{i}": [bit] for pin, bits in pins.items() for i, bit in enumerate(bits)}
    return Instance(re.sub(r"^\$.*\$(\d+)$", r"g\1", name), names.get(kind, kind), pins)


# ---- buffers ------------------------------------------------------------------------------------

Driven = tuple[Instance, str, int, float]


def add_buffers(netlist: Netlist, library: Library, loads: float = 16.0) -> int:
    """Trees of buffers where a net drives more than so many inverters; how many were added.

    A tree is built within each module, from the inside out, so a module's input is at most that
    load for the net outside. Clocks are left alone: they need a tree of their own.
    """
    buffer, limit = choose_buffer(library, loads)
    out = next(p.name for p in library.cells[buffer].pins.values() if p.output)
    source = next(p.name for p in library.cells[buffer].pins.values() if not p.output)
    weight = max(library.cells[buffer].pins[source].load)
    port_load: dict[tuple[str, str, int], float] = {}
    clocks: set[tuple[str, str, int]] = set()
    added = {}
    for module in netlist.below():
        driven, clock_nets = _driven(netlist, module, library, port_load, clocks)
        number = 1 + max((b for b in _nets(module) if isinstance(b, int)), default=0)
        made: list[Instance] = []
        for net, found in list(driven.items()):
            while net not in clock_nets and sum(s[3] for s in found) > limit and len(found) > 1:
                above: list[Driven] = []
                for group in _groups(found, limit):
                    name = f"buffer_{len(made)}"
                    one = Instance(name, buffer, {source: [net], out: [number]})
                    for instance, pin, place, _ in group:
                        instance.pins[pin][place] = number
                    above.append((one, source, 0, weight))
                    made.append(one)
                    number += 1
                found = driven[net] = above
        module.instances += made
        added[module.name] = len(made)
        for port, (direction, bits) in module.ports.items():
            for place, bit in enumerate(bits):
                if direction == "input":
                    port_load[module.name, port, place] = sum(s[3] for s in driven.get(bit, []))
                    if bit in clock_nets:
                        clocks.add((module.name, port, place))
    times = netlist.counts()
    return sum(n * times[name] for name, n in added.items())


def choose_buffer(library: Library, loads: float) -> tuple[str, float]:
    """The buffer that drives the limit fastest, and the limit in pF."""
    buffers = [c for c in library.cells.values() if c.buffer]
    inverters = [c for c in library.cells.values() if _inverts(c)]
    if not buffers or not inverters:
        raise UserError("no buffer or no inverter", op="liberty", got=library.name)
    limit = loads * min(max(p.load) for c in inverters for p in c.pins.values() if not p.output)

    def slow(cell: Any) -> float:
        own = max(max(p.load) for p in cell.pins.values() if not p.output)
        tables = [t for a in cell.arcs for t in a.delay if t is not None]
        return max(t.at(limit, 0.1) for t in tables) * (1 + own / limit)

    return min(buffers, key=slow).name, limit


def _inverts(cell: Any) -> bool:
    outs = [p for p in cell.pins.values() if p.output]
    ins = [p for p in cell.pins.values() if not p.output]
    single = len(outs) == 1 and len(ins) == 1 and not cell.sequential
    return single and outs[0].function.strip("() ") in (f"!{ins[0].name}", f"{ins[0].name}'")


def _nets(module: Module) -> Iterator[Any]:
    for _, bits in module.ports.values():
        yield from bits
    for i in module.instances:
        for bits in i.pins.values():
            yield from bits
    for one in module.nets.values():
        yield from one["bits"]


def _driven(
    netlist: Netlist,
    module: Module,
    library: Library,
    port_load: dict[tuple[str, str, int], float],
    clocks: set[tuple[str, str, int]],
) -> tuple[dict[int, list[Driven]], set[int]]:
    """What each net of a module drives inside it, and the nets that are clocks."""
    driven: dict[int, list[Driven]] = {}
    clock_nets = set()
    for i in module.instances:
        inside = i.kind in netlist.modules
        if not inside and i.kind not in library.cells:
            raise UserError(
                "a cell that the library does not have", op="netlist", got=f"{i.kind} {i.name}"
            )
        for pin, bits in i.pins.items():
            for place, bit in enumerate(bits):
                if not isinstance(bit, int):
                    continue
                if inside:
                    if netlist.modules[i.kind].ports[pin][0] != "input":
                        continue
                    load = port_load[i.kind, pin, place]
                    clock = (i.kind, pin, place) in clocks
                else:
                    what = library.cells[i.kind].pins[pin]
                    if what.output:
                        continue
                    load, clock = max(what.load), what.clock
                if clock:
                    clock_nets.add(bit)
                driven.setdefault(bit, []).append((i, pin, place, load))
    return driven, clock_nets


def _groups(driven: list[Driven], limit: float) -> Iterator[list[Driven]]:
    """Neighbours together, each group within the limit."""
    group: list[Driven] = []
    total = 0.0
    for one in driven:
        if group and total + one[3] > limit:
            yield group
            group, total = [], 0.0
        group.append(one)
        total += one[3]
    if group:
        yield group


__all__ = ["Instance", "Module", "Netlist", "add_buffers"]
