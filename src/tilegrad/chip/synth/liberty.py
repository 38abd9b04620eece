"""Cell libraries in Liberty's text: cells, pins, delay tables, and the logic of outputs.

Times are in ns, capacitances in pF, energies in pJ, areas as the file has them (um2). Invariant: a
delay or power table is (load, input slew) and a constraint (clock slew, data slew), whatever the
order of the file.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import UserError

TOKEN = re.compile(r'/\*.*?\*/|\\\n|"((?:[^"\\]|\\.)*)"|([{}();:,])|([^\s{}();:,"]+)', re.DOTALL)
FIRST = ("total_output_net_capacitance", "related_pin_transition")  # of a normal table
EDGES = ("rise", "fall")


@dataclass
class Group:
    """A group of the file: `kind (names) { attributes and groups }`."""

    kind: str
    names: list[str]
    values: dict[str, Any] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def of(self, kind: str) -> list[Group]:
        """The groups of a kind inside this one."""
        return [g for g in self.groups if g.kind == kind]


@dataclass(frozen=True)
class Table:
    """Values over two axes; an axis of one place has no influence."""

    first: np.ndarray
    second: np.ndarray
    values: np.ndarray

    def at(self, first: float, second: float) -> float:
        """Linear between places, and on beyond the ends."""
        found = stacked([self]).at(np.zeros(1, int), np.array([first]), np.array([second]))
        return float(found[0])


@dataclass(frozen=True)
class Arc:
    """From an input to an output: by the edge of each, a delay, a slew and an energy."""

    source: str
    target: str
    pairs: tuple[tuple[int, int], ...]  # (edge in, edge out); 0 rises, 1 falls
    delay: tuple[Table | None, Table | None]
    slew: tuple[Table | None, Table | None]
    clocked: bool = False


@dataclass(frozen=True)
class Setup:
    """How long before the clock's edge an input must be there, by its own edge."""

    pin: str
    clock: str
    edge: int  # of the clock
    times: tuple[Table | None, Table | None]


@dataclass(frozen=True)
class Pin:
    """A pin of a cell."""

    name: str
    output: bool
    load: tuple[float, float]
    clock: bool = False
    function: str = ""
    energy: tuple[Table | None, Table | None] = (None, None)


@dataclass(frozen=True)
class Cell:
    """A cell of a library."""

    name: str
    area: float
    leakage: float  # nW
    pins: Mapping[str, Pin]
    arcs: tuple[Arc, ...]
    setups: tuple[Setup, ...]
    sequential: bool

    @property
    def buffer(self) -> bool:
        """Whether its output is its one input."""
        ins = [p for p in self.pins.values() if not p.output]
        outs = [p for p in self.pins.values() if p.output]
        if self.sequential or len(ins) != 1 or len(outs) != 1:
            return False
        return outs[0].function.strip("() ") == ins[0].name


@dataclass(frozen=True)
class Library:
    """The cells of one or more files."""

    name: str
    voltage: float
    cells: Mapping[str, Cell]

    def with_cells(self, other: Library) -> Library:
        """This library and the cells of another."""
        return Library(self.name, self.voltage, {**self.cells, **other.cells})

    def gate(self) -> Cell:
        """The smallest two-input NAND: what gate counts are counted in."""
        found = [c for c in self.cells.values() if _is_nand(c)]
        if not found:
            raise UserError("no two-input NAND", op="liberty", got=self.name)
        return min(found, key=lambda c: c.area)


def _is_nand(cell: Cell) -> bool:
    outs = [p for p in cell.pins.values() if p.output]
    ins = [p.name for p in cell.pins.values() if not p.output]
    if cell.sequential or len(outs) != 1 or len(ins) != 2 or not outs[0].function:
        return False
    logic = logic_of(outs[0].function)
    rows = (dict(zip(ins, bits)) for bits in product((0, 1), repeat=2))
    return all(logic(row) == 1 - (row[ins[0]] & row[ins[1]]) for row in rows)


# ---- reading ----------------------------------------------------------------------------------


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    for found in TOKEN.finditer(text):
        quoted, sign, word = found.groups()
        if quoted is not None:
            yield "word", quoted.replace("\\\n", " ")
        elif sign is not None:
            yield sign, sign
        elif word is not None and word != "\\":
            yield "word", word


def parse(text: str) -> Group:
    """The outermost group of a file."""
    tokens = list(_tokens(text))
    top = Group("", [])
    open_groups, at = [top], 0
    while at < len(tokens):
        kind, word = tokens[at]
        if kind == "}":
            open_groups.pop()
            at += 1
        elif kind == "word" and at + 1 < len(tokens) and tokens[at + 1][0] == ":":
            end = at + 2
            parts = []
            while end < len(tokens) and tokens[end][0] not in (";", "}"):
                parts.append(tokens[end][1])
                end += 1
            open_groups[-1].values[word] = " ".join(parts)
            at = end
        elif kind == "word" and at + 1 < len(tokens) and tokens[at + 1][0] == "(":
            end = next(i for i in range(at, len(tokens)) if tokens[i][0] == ")")
            names = [w for k, w in tokens[at + 2 : end] if k == "word"]
            at = end + 1
            if at < len(tokens) and tokens[at][0] == "{":
                made = Group(word, names)
                open_groups[-1].groups.append(made)
                open_groups.append(made)
                at += 1
            else:
                open_groups[-1].values[word] = names
        else:
            at += 1
    if len(top.groups) != 1 or top.groups[0].kind != "library" or len(open_groups) != 1:
        raise UserError("not a Liberty file", op="liberty", expected="library (...) { ... }")
    return top.groups[0]


def _numbers(given: list[str]) -> np.ndarray:
    return np.array([float(x) for part in given for x in part.replace(",", " ").split()])


class _Reader:
    """Turns groups into cells, with the units and templates of the file."""

    def __init__(self, top: Group) -> None:
        self.top = top
        kinds = ("lu_table_template", "power_lut_template")
        self.templates = {t.names[0]: t for kind in kinds for t in top.of(kind)}
        self.time = _unit(str(top.values.get("time_unit", "1ns")), {"ns": 1.0, "ps": 1e-3})
        count, unit = top.values.get("capacitive_load_unit", ["1", "pf"])
        self.load = float(count) * {"pf": 1.0, "ff": 1e-3}[unit.lower()]
        self.leak = _unit(
            str(top.values.get("leakage_power_unit", "1nW")),
            {"mW": 1e6, "uW": 1e3, "nW": 1.0, "pW": 1e-3},
        )

    def table(self, group: Group, name: str, scale: float, units: tuple[float, float]) -> Any:
        """A table with its axes in the normal order, or None where there is none."""
        found = group.of(name)
        if not found:
            return None
        one = found[0]
        template = self.templates.get(one.names[0] if one.names else "")
        head = template.values if template is not None else {}
        axes = []
        for number in (1, 2):
            given = one.values.get(f"index_{number}", head.get(f"index_{number}"))
            if given is not None and (template is None or f"variable_{number}" in head):
                axes.append((str(head.get(f"variable_{number}", "")), _numbers(given)))
        values = _numbers(one.values["values"]).reshape([len(a) for _, a in axes] or [1, 1])
        one_place = np.zeros(1)
        if len(axes) == 1:
            load = axes[0][0] in FIRST
            values = values[:, None] if load else values[None, :]
            grid = (axes[0][1], one_place) if load else (one_place, axes[0][1])
        elif len(axes) == 2:
            swapped = axes[1][0] in FIRST and axes[0][0] not in FIRST
            values = values.T if swapped else values
            grid = (axes[1][1], axes[0][1]) if swapped else (axes[0][1], axes[1][1])
        else:
            grid = (one_place, one_place)
        return Table(grid[0] * units[0], grid[1] * units[1], values * scale)

    def pair(self, group: Group, names: tuple[str, str], scale: float, units: Any) -> Any:
        return tuple(self.table(group, name, scale, units) for name in names)

    def cell(self, group: Group) -> Cell:
        pins, arcs, setups = {}, [], []
        for one in group.of("pin"):
            for name in one.names:
                pins[name] = self.pin(name, one)
                for timing in one.of("timing"):
                    kind = str(timing.values.get("timing_type", "combinational"))
                    for source in str(timing.values.get("related_pin", "")).split():
                        if kind.startswith("setup_"):
                            setups.append(self.setup(name, source, kind, timing))
                        elif kind in ("combinational", "rising_edge", "falling_edge"):
                            arcs.append(self.arc(source, name, kind, timing))
        sequential = bool(group.of("ff") or group.of("latch"))
        sequential = sequential or any(a.clocked for a in arcs)
        area = float(group.values.get("area", 0.0))
        leakage = float(group.values.get("cell_leakage_power", 0.0)) * self.leak
        return Cell(group.names[0], area, leakage, pins, tuple(arcs), tuple(setups), sequential)

    def pin(self, name: str, group: Group) -> Pin:
        values = group.values
        load = float(values.get("capacitance", 0.0))
        loads = tuple(float(values.get(f"{e}_capacitance", load)) * self.load for e in EDGES)
        energy = (None, None)
        for power in group.of("internal_power"):
            if "rise_power" in {g.kind for g in power.groups}:
                axes = (self.load, self.time)
                energy = self.pair(power, ("rise_power", "fall_power"), self.load, axes)
                break
        return Pin(
            name,
            values.get("direction") == "output",
            loads,  # type: ignore[arg-type]
            values.get("clock") == "true",
            str(values.get("function", "")),
            energy,
        )

    def arc(self, source: str, target: str, kind: str, group: Group) -> Arc:
        sense = group.values.get("timing_sense", "non_unate")
        pairs = {
            "positive_unate": ((0, 0), (1, 1)),
            "negative_unate": ((0, 1), (1, 0)),
        }.get(str(sense), ((0, 0), (0, 1), (1, 0), (1, 1)))
        if kind != "combinational":
            edge = EDGES.index("rise" if kind == "rising_edge" else "fall")
            pairs = ((edge, 0), (edge, 1))
        axes = (self.load, self.time)
        delay = self.pair(group, ("cell_rise", "cell_fall"), self.time, axes)
        slew = self.pair(group, ("rise_transition", "fall_transition"), self.time, axes)
        return Arc(source, target, pairs, delay, slew, kind != "combinational")

    def setup(self, pin: str, clock: str, kind: str, group: Group) -> Setup:
        axes = (self.time, self.time)
        names = ("rise_constraint", "fall_constraint")
        return Setup(
            pin, clock, int(kind.endswith("falling")), self.pair(group, names, self.time, axes)
        )


def _unit(text: str, known: dict[str, float]) -> float:
    found = re.match(r"([\d.]*)\s*(\w+)", text)
    if found is None or found[2] not in known:
        raise UserError("unknown unit", op="liberty", expected=", ".join(known), got=text)
    return float(found[1] or 1) * known[found[2]]


def read(text: str) -> Library:
    """The library of a file's text."""
    top = parse(text)
    reader = _Reader(top)
    cells = {c.names[0]: reader.cell(c) for c in top.of("cell")}
    return Library(top.names[0], float(top.values.get("nom_voltage", 1.0)), cells)


def load(path: Path) -> Library:
    """The library of a file."""
    try:
        return read(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UserError(
            "cannot read the library", op="liberty", expected="a .lib file", got=str(error)
        ) from None


# ---- logic and tables ---------------------------------------------------------------------------


Logic = Callable[[Mapping[str, int]], int]


def logic_of(text: str) -> Logic:
    """A function of pins by name: `!`, `'`, `^`, and, or, as Liberty writes them."""
    return _Logic(re.findall(r"[\w\[\]]+|[!'^*&+|()]", text)).disjunction()


class _Logic:
    """Reads an expression from left to right; the tightest first: not, exclusive or, and, or."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    def next_is(self, signs: str) -> bool:
        """Whether one of these signs comes next; it is taken."""
        found = self.at < len(self.tokens) and self.tokens[self.at] in signs
        self.at += found
        return found

    def one(self) -> Logic:
        if self.next_is("!"):
            return _not(self.one())
        if self.next_is("("):
            made = self.disjunction()
            self.next_is(")")
        else:
            made = _pin(self.tokens[self.at])
            self.at += 1
        while self.next_is("'"):
            made = _not(made)
        return made

    def other(self) -> Logic:
        made = self.one()
        while self.next_is("^"):
            made = _joined(operator.xor, made, self.one())
        return made

    def conjunction(self) -> Logic:
        made = self.other()
        while self.at < len(self.tokens) and self.tokens[self.at] not in "+|)":
            self.next_is("*&")
            made = _joined(operator.and_, made, self.other())
        return made

    def disjunction(self) -> Logic:
        made = self.conjunction()
        while self.next_is("+|"):
            made = _joined(operator.or_, made, self.conjunction())
        return made


def _pin(word: str) -> Logic:
    return (lambda row: int(word)) if word in ("0", "1") else (lambda row: row[word])


def _not(a: Logic) -> Logic:
    return lambda row: 1 - a(row)


def _joined(op: Callable[[int, int], int], a: Logic, b: Logic) -> Logic:
    return lambda row: op(a(row), b(row))


@dataclass(frozen=True)
class Stack:
    """Many tables, looked up at once."""

    first: np.ndarray  # (tables, places), padded with infinity
    second: np.ndarray
    values: np.ndarray  # (tables, places, places)
    sizes: np.ndarray  # (tables, 2)

    def at(self, which: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The value of table `which[i]` at each place; linear on beyond the ends."""
        i, u = _place(self.first[which], self.sizes[which, 0], first)
        j, v = _place(self.second[which], self.sizes[which, 1], second)
        i1 = np.minimum(i + 1, self.sizes[which, 0] - 1)
        j1 = np.minimum(j + 1, self.sizes[which, 1] - 1)
        low = self.values[which, i, j] * (1 - v) + self.values[which, i, j1] * v
        high = self.values[which, i1, j] * (1 - v) + self.values[which, i1, j1] * v
        return low * (1 - u) + high * u


def _place(axes: np.ndarray, sizes: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(len(at))
    i = np.clip((axes <= at[:, None]).sum(1) - 1, 0, np.maximum(sizes - 2, 0))
    low, high = axes[rows, i], axes[rows, np.minimum(i + 1, sizes - 1)]
    width = np.where(high > low, high - low, 1.0)
    return i, np.where(high > low, (at - low) / width, 0.0)


def stacked(tables: list[Table]) -> Stack:
    """Tables side by side."""
    most = max((max(t.values.shape) for t in tables), default=1)
    first = np.full((len(tables), most), np.inf)
    second, values = first.copy(), np.zeros((len(tables), most, most))
    for n, t in enumerate(tables):
        rows, columns = t.values.shape
        first[n, :rows], second[n, :columns] = t.first, t.second
        values[n, :rows, :columns] = t.values
    return Stack(first, second, values, np.array([t.values.shape for t in tables]).reshape(-1, 2))


__all__ = ["Arc", "Cell", "Library", "Pin", "Setup", "Table", "load", "logic_of", "read", "stacked"]
