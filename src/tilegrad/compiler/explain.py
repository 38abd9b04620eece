"""`explain`: every stage of one compile as text, from the traced Graph to assembly.

The stages are those of `compile`: the same pipeline, the same lowering, the same emitter, run
anew and kept. Work that only a deep level needs (target text, assembly) is done when asked for.
Invariant: explaining a Graph runs nothing of it and leaves the caches of `compile` as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..core.dtype import DType
from ..core.errors import UserError
from ..core.target import Target
from ..ir.block import argument, pure_block
from ..ir.node import Node, located, topological
from ..ir.passes import Stage
from ..ir.requirement import Requirement
from ..ir.rewrite import replace
from ..ir.symbol import high
from ..ir.text import print_block
from ..runtime.buffer import HOST
from ..runtime.device import target_for
from ..runtime.language import language_of
from ..schedule.cost import work_of
from ..schedule.schedule import Launch, Schedule, show
from ..tile.build import Body
from ..tile.text import body_text
from .compile import cut, host
from .flatten import program_text
from .pipeline import schedule_graph
from .placement import Placement, placement_of

# What each level shows; `all` is every section in this order.
SECTIONS = (
    "summary",
    "graph",
    "passes",
    "final graph",
    "schedule",
    "kernels",
    "families",
    "placement",
    "tile",
    "llvm",
    "optimized",
    "ptx",
    "assembly",
)
LEVELS: dict[str, tuple[str, ...]] = {
    "summary": ("summary", "passes", "kernels"),
    "graph": ("summary", "graph", "passes", "final graph"),
    "schedule": ("summary", "schedule", "kernels", "families", "placement"),
    "tile": ("summary", "kernels", "tile"),
    "llvm": ("summary", "kernels", "llvm", "optimized"),
    "ptx": ("summary", "kernels", "ptx"),
    "assembly": ("summary", "kernels", "assembly"),
    "all": SECTIONS,
}


@dataclass
class PassReport:
    """One pass that changed the Graph: its name, Rules that fired with counts, Nodes after."""

    name: str
    fired: dict[str, int]
    nodes: int


@dataclass
class ProgramReport:
    """One Body and what became of it, with the numbers of the Kernels it serves."""

    body: Body
    target: Target
    kernels: list[int] = field(default_factory=list)
    listings: dict[str, str] = field(default_factory=dict)  # made so far

    @cached_property
    def name(self) -> str:
        """The function's name in LLVM and in a profile."""
        return program_text(self.body, self.target)[0]

    @cached_property
    def tile(self) -> str:
        """The Tile IR."""
        body = self.body
        notes = {k: v for k, v in body.notes.items() if k not in ("program", "scratch", "work")}
        return body_text(Body(body.name, body.block, body.grid, notes))

    @cached_property
    def text(self) -> str:
        """The target text that was emitted."""
        return program_text(self.body, self.target)[2]

    def listing(self, name: str) -> str:
        """The text as the target folder shows it under a name; empty where it has none such."""
        if name not in self.listings:
            made = language_of(self.target).listings.get(name)
            self.listings[name] = made(self.text, self.target) if made else ""
        return self.listings[name]

    @property
    def llvm(self) -> str:
        """The LLVM IR that was emitted; empty where programs are of another language."""
        return self.listing("llvm")

    @property
    def ptx(self) -> str:
        """The PTX that was emitted; empty where programs are of another language."""
        return self.listing("ptx")

    @property
    def optimized(self) -> str:
        """The LLVM IR after LLVM's passes."""
        return self.listing("optimized")

    @property
    def assembly(self) -> str:
        """The Target's assembly; for PTX what ptxas says of the machine code."""
        return self.listing("assembly")


@dataclass
class KernelReport:
    """One Kernel: its work at the Symbols' upper bounds, and the time no run can beat."""

    number: int
    name: str
    kind: str
    programs: list[ProgramReport]
    flops: int
    bytes: int
    dtype: DType
    peak_flops: float
    peak_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / max(1, self.bytes)

    @property
    def bound(self) -> str:
        """Which of the two limits it: 'compute' or 'memory'."""
        balance = self.peak_flops / max(1.0, self.peak_bytes)
        return "compute" if self.intensity > balance else "memory"

    @property
    def floor(self) -> float:
        """Seconds at the Target's peak rates."""
        return max(self.flops / max(1.0, self.peak_flops), self.bytes / max(1.0, self.peak_bytes))


class Explanation:
    """Every stage of one compile; `str` of it is the text down to its level."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[Node],
        stages: list[Stage],
        schedule: Schedule,
        target: Target,
        level: str,
        labels: Sequence[str] = (),
        requirements: Sequence[Requirement] = (),
    ) -> None:
        self.requirements = list(requirements)
        self.name, self.inputs, self.target, self.level = name, tuple(inputs), target, level
        self.stages, self.schedule_ir = stages, schedule
        self.labels = [labels[i] if i < len(labels) else f"in{i}" for i in range(len(inputs))]
        self.programs: list[ProgramReport] = []
        self.kernels = self._kernels()

    def __str__(self) -> str:
        parts = []
        shown = LEVELS[self.level]
        if self.level == "all":  # a language of another package too
            shown = tuple(dict.fromkeys((*shown, *language_of(self.target).listings)))
        for section in shown:
            text = self.section(section).rstrip()
            if text:
                parts.append(f"== {section} ==\n{text}")
        return "\n\n".join(parts) + "\n"

    __repr__ = __str__

    def section(self, name: str) -> str:
        """The text of one section, whatever the level."""
        known = dict.fromkeys((*SECTIONS, *language_of(self.target).listings))
        if name not in known:
            raise UserError("no such section", op="explain", expected=", ".join(known), got=name)
        if name not in SECTIONS[: SECTIONS.index("tile")]:
            mark = {"tile": "#", "assembly": "//", "ptx": "//"}.get(name, ";")
            shown = [(p, p.tile if name == "tile" else p.listing(name)) for p in self.programs]
            return "\n".join(
                f"{mark} {p.name} serves kernel {', '.join(map(str, p.kernels))}\n{text.strip()}\n"
                for p, text in shown
                if text
            )
        texts = {
            "summary": self._summary,
            "graph": lambda: self.graph,
            "passes": self._passes_text,
            "final graph": lambda: self.final_graph,
            "schedule": lambda: self.schedule,
            "kernels": self._kernel_table,
            "families": self._families_text,
            "placement": lambda: str(self.placement) if self.target.array else "",
        }
        return texts[name]()

    # ---- the Graph ------------------------------------------------------------------------

    @cached_property
    def graph(self) -> str:
        """The Graph as it was traced, with the user's lines."""
        return self._graph_text(self.stages[0].results)

    @cached_property
    def final_graph(self) -> str:
        """The Graph after the last pass over it; empty if no pass changed it."""
        last = [s for s in self.stages if s.results][-1]
        return self._graph_text(last.results) if self.passes else ""

    @cached_property
    def passes(self) -> list[PassReport]:
        """Every pass that changed the Graph."""
        return [
            PassReport(s.name, s.fired, len(topological(s.results)))
            for s in self.stages
            if s.changed and s.results
        ]

    def _graph_text(self, results: Sequence[Node]) -> str:
        named = [argument(label, n.type) for label, n in zip(self.labels, self.inputs)]
        outputs = replace(results, dict(zip(self.inputs, named)))
        return print_block(
            pure_block(self.name, tuple(named), tuple(outputs)), "graph", locations=True
        )

    def _passes_text(self) -> str:
        lines = [f"traced: {len(topological(self.stages[0].results))} nodes"]
        for done in self.passes:
            fired = ", ".join(f"{rule} x{count}" for rule, count in done.fired.items())
            lines.append(f"{done.name}: {fired or 'no rules'} -> {done.nodes} nodes")
        for stage in self.stages:
            if stage.changed and not stage.results:  # over Regions, Bodies or Kernels
                counts = ", ".join(f"{count:+d} {what}" for what, count in stage.fired.items())
                lines.append(f"{stage.name}: {counts}")
        for note in dict.fromkeys(n for s in self.stages for n in s.notes):
            lines.append(note)
        ran = [s for s in self.stages[1:] if not s.skipped]
        for text, names in (
            ("unchanged by", [s.name for s in ran if not s.changed]),
            *(
                (reason, [s.name for s in self.stages if s.skipped == reason])
                for reason in dict.fromkeys(s.skipped for s in self.stages if s.skipped)
            ),
        ):
            if names:
                lines.append(f"{text}: {', '.join(names)}")
        return "\n".join(lines)

    # ---- the Schedule and its Kernels -----------------------------------------------------

    @cached_property
    def schedule(self) -> str:
        """The Schedule: Slots with their lives and places, then Kernels in order."""
        return f"{show(self.schedule_ir)}\n{self._memory_line()}"

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs."""
        return sum(self.schedule_ir.slots[i].bytes for i in self.schedule_ir.inputs)

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs that are not inputs overwritten in place."""
        owners = {self.schedule_ir.storage(o) for o in self.schedule_ir.outputs}
        return sum(self.schedule_ir.slots[o].bytes for o in owners - set(self.schedule_ir.inputs))

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once: inputs, outputs and the arena."""
        return self.input_bytes + self.output_bytes + self.schedule_ir.arena_bytes

    def _kernels(self) -> list[KernelReport]:
        found: dict[tuple[str, int], ProgramReport] = {}
        reports = []
        for number, kernel in enumerate(self.schedule_ir.kernels):
            mine = []
            target = target_for(kernel.device) if kernel.device else self.target
            for step in kernel.steps:
                if not isinstance(step, Launch):
                    continue
                program = found.get((kernel.device, id(step.body)))
                if program is None:
                    program = ProgramReport(step.body, target)
                    found[kernel.device, id(step.body)] = program
                    self.programs.append(program)
                if number not in program.kernels:
                    program.kernels.append(number)
                mine.append(program)
            flops, dtype = work_of(*kernel.region)
            reports.append(
                KernelReport(
                    number,
                    kernel.name,
                    kernel.kind,
                    mine,
                    high(flops),
                    high(kernel.bytes),
                    dtype,
                    target.peak_flops(dtype),
                    target.peak_bytes(),
                )
            )
        return reports

    def _summary(self) -> str:
        launched = [k for k in self.kernels if k.programs]  # others are jumps and copies
        floor = sum(k.floor for k in self.kernels)
        flops, moved = sum(k.flops for k in self.kernels), sum(k.bytes for k in self.kernels)
        return "\n".join(
            [
                f"{self.name} for {self.target.name} ({self.target.cpu}, "
                f"{self.target.cores} {self._units})",
                f"{counted(launched, 'kernel')} served by {counted(self.programs, 'program')}",
                f"work: {scaled(flops)}FLOP, {scaled(moved)}B moved, floor {seconds(floor)}",
                self._memory_line(),
                *(f"requires {r}" for r in self.requirements),
            ]
        )

    @property
    def _units(self) -> str:
        return "multiprocessors" if self.target.has_threads else "workers"

    def _memory_line(self) -> str:
        return (
            f"memory: peak {self.peak_bytes} bytes = inputs {self.input_bytes} + outputs "
            f"{self.output_bytes} + arena {self.schedule_ir.arena_bytes}"
        )

    @cached_property
    def placement(self) -> Placement:
        """What runs on the array beside the CPU, what on the host and why, and what it costs."""
        return placement_of(self.schedule_ir, self.target)

    def _families_text(self) -> str:
        """Who offered what for each Region, who refused and why, and why the winner won."""
        lines = []
        for number, kernel in enumerate(self.schedule_ir.kernels):
            verdict = kernel.notes.get("verdict")
            if verdict is None:
                continue
            lines.append(f"[{number}] {kernel.name}: {verdict.winner}, {verdict.why}")
            for name, made in verdict.offered:
                lines.append(f"      {name} offers {seconds(made.seconds)} ({made.model})")
            lines += [f"      {name} refuses: {why}" for name, why in verdict.refused]
        return "\n".join(lines)

    def _kernel_table(self) -> str:
        rows = [("kernel", "launches", "FLOP", "bytes", "FLOP/byte", "bound by", "floor")]
        for k in (k for k in self.kernels if k.programs):
            rows.append(
                (
                    f"[{k.number}] {k.name}",
                    str(len(k.programs)),
                    scaled(k.flops),
                    scaled(k.bytes),
                    f"{k.intensity:.2f}",
                    k.bound,
                    seconds(k.floor),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths))
            )
            for row in rows
        ]
        if any(k.kind == "control" for k in self.kernels):
            lines.append("a kernel inside a loop counts the work of one step")
        return "\n".join(lines)


def explain_graph(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    *,
    name: str = "main",
    donate: Sequence[int] = (),
    labels: Sequence[str] = (),
    level: str = "all",
    target: Target | None = None,
    requirements: Sequence[Requirement] = (),
    without: Sequence[str] = (),
    device: str = HOST,
    homes: Sequence[str] = (),
) -> Explanation:
    """Every stage of compiling a Graph for `target` (this machine by default); passes named in
    `without` are left out."""
    if level not in LEVELS:
        raise UserError("no such level", op="explain", expected=", ".join(LEVELS), got=level)
    target = host() if target is None else target
    texts, there = SECTIONS[SECTIONS.index("llvm") :], language_of(target).listings
    if level in texts and not any(name in there for name in LEVELS[level]):
        raise UserError(
            f"{target.name} has no text of this level",
            op="explain",
            expected=", ".join(name for name in LEVELS if name in there or name not in texts),
            got=level,
            hint="name another target: h200, avx512, ...",
        )
    with located(outputs[0].location if outputs else None):
        inputs, outputs = cut(inputs, outputs)
        given = (target, donate, None, without, device, homes)
        schedule, stages = schedule_graph(inputs, outputs, *given)
    return Explanation(name, inputs, stages, schedule, target, level, labels, requirements)


def counted(things: Sequence[Any], word: str) -> str:
    """How many, with the word in the right number: 2 kernels."""
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def scaled(value: float) -> str:
    """A count with three digits and a prefix: 12.3 M."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.0f} " if not prefix else f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"


def seconds(value: float) -> str:
    """A time with three digits and a unit: 12.3 us."""
    for scale, unit in ((1e9, "ns"), (1e6, "us"), (1e3, "ms")):
        if value * scale < 1000:
            return f"{value * scale:.3g} {unit}"
    return f"{value:.3g} s"
