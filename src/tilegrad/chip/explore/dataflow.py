"""Dataflows as sets of constraints: which loops may turn where. No dataflow is a code path.

The Levels above and at the array (the last one with others side by side below it) are outside it,
those below are inside. Invariant: a Dataflow only narrows the space of Mappings; what it allows is
costed by the same routine as everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...core.errors import UserError
from .accelerator import NAMES, Accelerator, Level
from .problem import Problem

ALL = "NGMCPQRS"


@dataclass(frozen=True)
class Dataflow:
    """Loops that may turn at each place; `whole` must turn there and nowhere outside it."""

    name: str
    meaning: str
    columns: str = ALL  # side by side
    rows: str = ALL
    inside: str = ALL  # in time, below the array
    outermost: str = ALL  # in time, at the outermost Level
    whole: str = ""  # turn in full below the array
    spread: str = ""  # side by side as far as the array goes, the first of them first
    keeps: tuple[str, ...] = NAMES  # Operands that the Levels below the array keep
    stationary: tuple[str, ...] = ()  # at the array's Level: Operands whose loops are outside

    def restrict(self, accelerator: Accelerator) -> Accelerator:
        """The same Accelerator, whose Levels below the array keep what the dataflow keeps.

        A Level that keeps nothing then goes, and its bytes join the Level of the array: dataflows
        are compared with the same storage in all.
        """
        at = array_level(accelerator)
        levels: list[Level] = list(accelerator.levels[: at + 1])
        spare = 0.0
        for level in accelerator.levels[at + 1 :]:
            kept = tuple(name for name in level.keeps if name in self.keeps)
            if kept:
                skips = tuple(name for name in level.skips if name in kept)
                levels.append(replace(level, keeps=kept, skips=skips))
            else:
                spare += level.bytes or 0.0
        if spare and levels[at].bytes is not None:
            grown = levels[at].bytes + spare * levels[at].fanout  # type: ignore[operator]
            levels[at] = replace(levels[at], bytes=grown)
        return replace(accelerator, levels=tuple(levels))


def array_level(accelerator: Accelerator) -> int:
    """The number of the last Level that has others side by side below it."""
    spread = [i for i, level in enumerate(accelerator.levels) if level.fanout > 1]
    return spread[-1] if spread else len(accelerator.levels) - 1


DATAFLOWS = {
    flow.name: flow
    for flow in (
        Dataflow("any", "nothing is asked"),
        Dataflow(
            "ws",
            "weight stationary: a weight stays in its multiplier while inputs and sums pass",
            columns="GMRS",
            rows="CRS",
            inside="MCRS",
            keeps=("weights",),
            stationary=("weights",),
        ),
        Dataflow(
            "os",
            "output stationary: a sum stays until it is done",
            columns="GNMPQ",
            rows="NMPQ",
            inside="MPQ",
            keeps=("outputs",),
            stationary=("outputs",),
        ),
        Dataflow(
            "is",
            "input stationary: an input stays while all filters pass",
            columns="GNPQC",
            rows="CPQ",
            inside="NCPQ",
            keeps=("inputs",),
            stationary=("inputs",),
        ),
        Dataflow(
            "rs",
            "row stationary: a row of a filter stays, a row of inputs slides by it",
            columns="GPMN",
            rows="RPCM",
            inside="SCM",
            outermost="GNMCP",
            whole="S",
            spread="RP",
            stationary=("weights",),
        ),
        Dataflow(
            "nvdla",
            "channels down, filters across; a picture's few channels with a row of the window",
            columns="M",
            rows="CS",
        ),
        Dataflow(
            "nlr",
            "no local reuse: multipliers keep nothing, all of the storage is one buffer",
            columns="GM",
            rows="C",
            keeps=(),
        ),
    )
}


def dataflow(name: str) -> Dataflow:
    """A Dataflow by name."""
    if name not in DATAFLOWS:
        raise UserError(
            "unknown dataflow", op="chip", expected=", ".join(DATAFLOWS), got=repr(name)
        )
    return DATAFLOWS[name]


def order_for(problem: Problem, stays: str) -> tuple[str, ...]:
    """Loops from outer to inner, such that an Operand stays in place as long as it can.

    Its own loops are outside; of the rest those that slide a window come last.
    """
    own = problem.operand(stays).loops
    sliding = {axis[0][0] for o in problem.operands for axis in o.axes if len(axis) > 1}
    rest = [loop for loop in problem.loops if loop not in own]
    return (
        *(loop for loop in problem.loops if loop in own),
        *sorted(rest, key=lambda loop: (loop in sliding, problem.loops.index(loop))),
    )


__all__ = ["DATAFLOWS", "Dataflow", "array_level", "dataflow", "order_for"]
