"""Many designs of a chip at once: which are best by energy, time and area together.

A design is a table of parameters with some fields changed. Invariant: a Point of the front is
beaten by none in all three; designs that cannot be built or mapped are kept with the reason.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import UserError
from ..core.svg import dot, line, path, picture, short, ticks, words
from ..targets.npu.parameters import Parameters
from .estimate import MULTIPLIER, SRAM, areas, doubles, estimate
from .explore.accelerator import Accelerator
from .mapped import map_network
from .workload import Workload

Choice = dict[str, Any]
Report = Callable[[int, int, str], None]  # how many are done, of how many, and which comes


@dataclass(frozen=True)
class Point:
    """One design and what it makes of a network."""

    choice: Choice
    energy: float  # J
    seconds: float
    area: float  # mm2
    doubled: bool = False  # two weights a step

    @property
    def name(self) -> str:
        """What is particular about it."""
        return ", ".join(f"{key} {value}" for key, value in self.choice.items())


@dataclass(frozen=True)
class Explored:
    """All designs that were looked at."""

    points: tuple[Point, ...]
    refused: tuple[tuple[Choice, str], ...]

    def front(self) -> list[Point]:
        """Those that no other beats, the quickest first."""
        return front(self.points, ("energy", "seconds", "area"))


def front(points: Sequence[Point], by: Sequence[str]) -> list[Point]:
    """Points that no other is at least as good as in all, and better in one."""

    def beaten(one: Point, other: Point) -> bool:
        mine, theirs = ([getattr(p, field) for field in by] for p in (one, other))
        return all(t <= m for m, t in zip(mine, theirs)) and theirs != mine

    kept = [p for p in points if not any(beaten(p, other) for other in points)]
    return sorted(kept, key=lambda p: getattr(p, by[-1] if len(by) == 2 else "seconds"))


def choices(vary: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Every combination."""
    return [dict(zip(vary, values)) for values in itertools.product(*vary.values())]


def explore_npu(
    base: Parameters,
    work: Workload,
    vary: Mapping[str, Sequence[Any]],
    report: Report | None = None,
) -> Explored:
    """NPUs that differ in some fields, by the closed forms of `estimate`."""

    def evaluate(choice: Choice) -> Point:
        table = base.to_table()
        if "element" in choice and "weights" not in choice:
            table["weights"] = ""
        p = Parameters.of({**table, **choice})
        found = estimate(p, work)
        joules = 1e-12 * sum(found.energy().values())
        return Point(choice, joules, found.seconds, sum(areas(p).values()), doubles(p))

    return _explore(choices(vary), evaluate, report)


def explore_array(
    table: Mapping[str, Any],
    name: str,
    work: Workload,
    vary: Mapping[str, Sequence[Any]],
    report: Report | None = None,
    **searching: Any,
) -> Explored:
    """Arrays of a parameter file, by a search of Mappings.

    Fields are `dataflow`, those of the Accelerator, and those of a Level as `level.field`.
    Where a Level has no area, it is that of so many bytes of SRAM at 45 nm.
    """

    def evaluate(choice: Choice) -> Point:
        changed = copy.deepcopy(dict(table))
        flow = "any"
        for key, value in choice.items():
            level, dotted, field = key.partition(".")
            if key == "dataflow":
                flow = value
            elif dotted:
                _level(changed, level)[field] = value
            else:
                changed[key] = value
        found = map_network(work, _with_areas(changed, name), flow, **searching)
        return Point(choice, 1e-12 * found.energy, found.seconds, found.accelerator.area())

    return _explore(choices(vary), evaluate, report)


def _level(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    levels = table.get("level", [])
    for level in levels:
        if level.get("name") == name:
            return level
    known = ", ".join(str(level.get("name")) for level in levels)
    raise UserError(f"no Level {name!r}", op="chip", expected=known, got=name)


def _with_areas(table: dict[str, Any], name: str) -> Accelerator:
    table.setdefault("mac_area", MULTIPLIER["int8"])
    for level in table.get("level", []):
        if level.get("bytes") is not None:
            level.setdefault("area", SRAM * level["bytes"])
    return Accelerator.of(table, name)


def _explore(
    wanted: Sequence[Choice], evaluate: Callable[[Choice], Point], report: Report | None
) -> Explored:
    points, refused = [], []
    for done, choice in enumerate(wanted):
        if report is not None:
            report(done, len(wanted), ", ".join(f"{k} {v}" for k, v in choice.items()))
        try:
            points.append(evaluate(choice))
        except UserError as error:
            refused.append((choice, _why(error)))
    if not points:
        raise UserError(
            "none of the designs can be built",
            op="chip",
            expected="fields within their bounds",
            got=f"{len(refused)} designs; the first: {refused[0][1]}",
        )
    if report is not None:
        report(len(wanted), len(wanted), "")
    return Explored(tuple(points), tuple(refused))


# ---- the picture --------------------------------------------------------------------------------

WIDTH, HEIGHT, COLOURS = 1140, 400, 6
UNITS = {"energy": (1e3, "mJ"), "seconds": (1e3, "ms"), "area": (1.0, "mm2")}
PANELS = (("energy", "seconds"), ("energy", "area"), ("seconds", "area"))  # up, across
STYLE = """
svg{font:12px system-ui,sans-serif;background:#fff}text{fill:#1b1f24}.soft{fill:#667079}
.head{font-size:16px;font-weight:600}.sub{font-size:13px;font-weight:600}.grid{stroke:#e3e6e9}
.front{fill:none;stroke:#98a2ad;stroke-width:1.5;stroke-dasharray:5 3}.out{fill-opacity:.28}
.d0{fill:#0d9488}.d1{fill:#c77700}.d2{fill:#6d5bd0}.d3{fill:#2f74c8}.d4{fill:#b8475f}
.d5{fill:#71808d}
@media(prefers-color-scheme:dark){svg{background:#15181c}text{fill:#e8eaed}.soft{fill:#98a2ad}
.grid{stroke:#2c3138}.d0{fill:#2dd4bf}.d1{fill:#f0a840}.d2{fill:#a99bff}.d3{fill:#74b2f7}
.d4{fill:#f08aa0}.d5{fill:#93a1ae}}
"""


def plotted(explored: Explored, title: str, colour: str = "dataflow") -> str:
    """Energy by time, energy by area, time by area; designs on a front are full, and joined."""
    values = list(dict.fromkeys(str(p.choice.get(colour, "")) for p in explored.points))
    kinds = {value: f"d{number % COLOURS}" for number, value in enumerate(values)}
    parts = [words(20, 28, title, "head")]
    x = 20.0
    for value, kind in kinds.items() if len(kinds) > 1 else ():
        parts += [dot(x + 5, 46, 5, kind), words(x + 14, 50, value, "soft")]
        x += 30 + 7 * len(value)
    third = WIDTH / len(PANELS)
    for number, (up, across) in enumerate(PANELS):
        place = (third * number + 54, third - 74)
        parts += _panel(explored.points, up, across, kinds, colour, *place)
    return picture(WIDTH, HEIGHT, title, STYLE, parts)


def _panel(
    points: Sequence[Point],
    up: str,
    across: str,
    kinds: Mapping[str, str],
    colour: str,
    left: float,
    width: float,
) -> Iterator[str]:
    """One field against another, logarithms both."""
    top, bottom = 88.0, HEIGHT - 46.0
    rights = [UNITS[across][0] * getattr(p, across) for p in points]
    heights = [UNITS[up][0] * getattr(p, up) for p in points]
    xs, ys = ticks(min(rights), max(rights)), ticks(min(heights), max(heights))

    def x(value: float) -> float:
        return left + width * math.log10(value / xs[0]) / math.log10(xs[-1] / xs[0])

    def y(value: float) -> float:
        return bottom - (bottom - top) * math.log10(value / ys[0]) / math.log10(ys[-1] / ys[0])

    yield words(left, top - 12, f"{UNITS[up][1]} of a run by {UNITS[across][1]}", "sub")
    for value in xs:
        yield line(x(value), top, x(value), bottom)
        yield words(x(value), bottom + 17, short(value), "soft", "middle")
    for value in ys:
        yield line(left, y(value), left + width, y(value))
        yield words(left - 6, y(value) + 4, short(value), "soft", "end")
    yield words(left + width / 2, bottom + 34, UNITS[across][1], "soft", "middle")
    best = front(points, (up, across))
    joined = [(UNITS[across][0] * getattr(p, across), UNITS[up][0] * getattr(p, up)) for p in best]
    yield f'<polyline class="front" points="{path([(x(a), y(b)) for a, b in joined])}"/>'
    for p, a, b in sorted(zip(points, rights, heights), key=lambda one: one[0] in best):
        kind = kinds[str(p.choice.get(colour, ""))]
        hint = f"{p.name}: {1e3 * p.seconds:.4g} ms, {1e3 * p.energy:.4g} mJ, {p.area:.4g} mm2"
        on = p in best
        yield dot(x(a), y(b), 5.5 if on else 4, kind if on else f"{kind} out", hint)


def _why(error: UserError) -> str:
    """An error in a line: what is wrong, its bound, and what would fit."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if not line.startswith("at "))


__all__ = ["Explored", "Point", "choices", "explore_array", "explore_npu", "front", "plotted"]
