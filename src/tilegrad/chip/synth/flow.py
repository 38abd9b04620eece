"""The whole of `tilegrad chip synth`: from parameters to a folder with netlist and pictures.

Invariant: every number of a result is exact of its netlist and library, or is in a field that says
what was assumed; tools that are missing are named. `synthesise` is long: it is the list of stages,
and of what each gives.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ...core.errors import UserError
from ...targets.npu.parameters import Parameters
from . import opensta, tools
from .flat import Flat
from .liberty import Library, load, read
from .memories import Memory, library_text
from .netlist import Netlist, add_buffers
from .pictures import Layout, place_and_route, schematic
from .power import Power, estimate
from .timing import Path as TimingPath
from .timing import Timer, Timing
from .yosys import PARTS, Report, finish, map_cells

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """A kind of block: how often it is there, its own cells, and their area in um2 (one copy)."""

    name: str
    count: int
    cells: int
    area: float
    whole: float  # with the blocks inside it
    period: float | None  # ns that paths ending in it need


@dataclass(frozen=True)
class Synthesis:
    """What was found of a chip."""

    parameters: Parameters
    part: str
    library: str
    yosys: str
    blocks: tuple[Block, ...]
    cells: int
    area: float  # um2, without memories
    yosys_area: float
    gates: float  # two-input NANDs of the same area
    buffers: int
    kinds: dict[str, int]
    memories: dict[str, int]
    memory_area: float  # um2, assumed
    memory: Memory
    path: TimingPath
    opensta: opensta.Checked | None
    power: Power
    layout: Layout | None
    pictures: tuple[str, ...]
    missing: dict[str, tuple[str, str]]
    failed: dict[str, str]  # stages that need a tool and did not end well, with what it said
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def megahertz(self) -> float:
        """The highest clock, without wires."""
        return 1e3 / self.path.period

    @property
    def meets(self) -> bool:
        """Whether the clock of the parameters is met."""
        return self.megahertz >= self.parameters.clock


class _Clock:
    """Seconds of each stage, and its progress."""

    def __init__(self, report: Report | None) -> None:
        self.report, self.start = report, time.monotonic()
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def done(self, name: str) -> None:
        now = time.monotonic()
        if self.report is not None:
            self.report(name, 1, 1)
        self.seconds[name] = now - self.start
        self.start = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self.report is not None:
            self.report(name, 0, 1)
        yield
        self.done(name)

    def optional(self, name: str, tool: str, make: Callable[[], T]) -> T | None:
        """A stage of a tool that may be missing, or fail: the others keep what they found."""
        if tools.find(tool) is None:
            return None
        with self.stage(name):
            try:
                return make()
            except UserError as error:
                self.failed[name] = str(error)
                return None


def synthesise(
    p: Parameters,
    out: Path,
    part: str = "chip",
    liberty: Path | None = None,
    *,
    memory: Memory | None = None,
    activity: float = 0.1,
    layout: bool = False,
    report: Report | None = None,
) -> Synthesis:
    """Maps a part of a chip to cells, times it, and writes what was made into a folder."""
    if part not in PARTS:
        raise UserError("unknown part", op="chip synth", expected=", ".join(PARTS), got=repr(part))
    path, clock = tools.cell_library(liberty).resolve(), _Clock(report)
    tools.needed("yosys")
    out.mkdir(parents=True, exist_ok=True)
    memory = memory if memory is not None else Memory()
    netlist = map_cells(p, part, path, out, report)
    clock.done("map")
    with clock.stage("buffers"):
        cells, libraries = _cells(netlist, path, memory, out)
        buffers = add_buffers(netlist, cells)
        yosys_area, version = finish(netlist, cells, path, out)
    with clock.stage("timing"):
        flat = Flat(netlist, cells)
        timing = Timer(flat).run()
        power = estimate(flat, timing, 1e3 / timing.path.period, activity)
    mhz = power.megahertz
    checked = clock.optional(
        "OpenSTA", "sta", lambda: opensta.check(netlist.top, libraries, out, mhz, activity)
    )
    drawn = clock.optional("schematic", "dot", lambda: schematic(p, out).name)
    made = None
    if layout:
        made = clock.optional("layout", "qflow", lambda: place_and_route(p, out, report=report))
    pictures = [drawn] if drawn else []
    pictures += [f for f in (made.files if made else ()) if f.endswith(".png")]
    blocks = _blocks(netlist, cells, timing)
    area, memories = sum(b.count * b.area for b in blocks), netlist.memories()
    kinds = Counter(flat.names[k] for k in flat.kind.tolist() if flat.names[k] not in memories)
    return Synthesis(
        parameters=p,
        part=part,
        library=cells.name,
        yosys=version,
        blocks=blocks,
        cells=sum(kinds.values()),
        area=area,
        yosys_area=yosys_area,
        gates=area / cells.gate().area,
        buffers=buffers,
        kinds=dict(sorted(kinds.items())),
        memories=memories,
        memory_area=sum(n * cells.cells[kind].area for kind, n in memories.items()),
        memory=memory,
        path=timing.path,
        opensta=checked,
        power=power,
        layout=made,
        pictures=tuple(pictures),
        missing=tools.missing(),
        failed=clock.failed,
        seconds=clock.seconds,
    )


def _cells(netlist: Netlist, path: Path, memory: Memory, out: Path) -> tuple[Library, list[Path]]:
    """The library with a cell for each memory, and the files it comes from."""
    cells, libraries = load(path), [path]
    if netlist.memories():
        text = library_text(netlist, memory)
        libraries.append((out / "memories.lib").resolve())
        libraries[1].write_text(text, encoding="utf-8")
        cells = cells.with_cells(read(text))
    return cells, libraries


def areas(netlist: Netlist, library: Library) -> dict[str, tuple[float, float]]:
    """um2 of each module: of its own cells, and with the modules inside; memories are left out."""
    made: dict[str, tuple[float, float]] = {}
    memories = netlist.memories()
    for module in netlist.below():
        own = whole = 0.0
        for i in module.instances:
            if i.kind in netlist.modules:
                whole += made[i.kind][1]
            elif i.kind not in memories:
                own += library.cells[i.kind].area
        made[module.name] = (own, own + whole)
    return made


def _blocks(netlist: Netlist, library: Library, timing: Timing) -> tuple[Block, ...]:
    counts, memories, area = netlist.counts(), netlist.memories(), areas(netlist, library)
    made = []
    for module in reversed(netlist.below()):
        kinds = [i.kind for i in module.instances]
        cells = sum(kind in library.cells and kind not in memories for kind in kinds)
        own, whole = area[module.name]
        period = timing.blocks.get(module.name)
        made.append(Block(module.name, counts[module.name], cells, own, whole, period))
    return tuple(sorted(made, key=lambda b: -b.count * b.whole))


__all__ = ["Block", "Synthesis", "synthesise"]
