"""From a parsed module to steps: every instruction is decoded once, by the family that knows it.

Invariant: a text with an instruction that no family knows is refused before anything runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from . import atomic, barrier, bulk, copy, matrix, memory, order, scalar, warp
from .errors import SimulationError, TextError, TrapError
from .machine import Step, Waiting
from .text import Instruction, Module, parse
from .values import PARAMETER_START, SHARED_START, Decoder, Run, reads_and_writes

FAMILIES = (
    scalar,
    memory,
    atomic,
    warp,
    barrier,
    order,
    matrix,
    bulk,
    copy,
)


def layout(module: Module, shared_bytes: int) -> tuple[dict[str, int], int]:
    """Addresses of parameters and shared variables, and the end of shared memory."""
    names = {p.name: PARAMETER_START + p.offset for p in module.parameters}
    at = SHARED_START
    for variable in module.shared:
        if not variable.dynamic:
            at = -(-at // variable.align) * variable.align
            names[variable.name] = at
            at += variable.bytes
    dynamic = [v for v in module.shared if v.dynamic]
    if dynamic:
        align = max(v.align for v in dynamic)
        at = -(-at // align) * align
        names |= {v.name: at for v in dynamic}
        at += shared_bytes
    elif shared_bytes:
        raise TextError(f"{shared_bytes} bytes of dynamic shared memory, but none declared")
    return names, at


def control(instruction: Instruction) -> tuple[str, Any] | None:
    """Branches and ends: the kind of step, and what it runs."""
    name = instruction.words[0]
    if name == "bra":
        return "branch", None
    if name in ("ret", "exit"):
        return "exit", None
    if name in ("trap", "brkpt"):

        def trap(warp: Any, mask: Any) -> None:
            raise TrapError("the program trapped")

        return "", trap
    if name == "nanosleep":
        return "", lambda warp, mask: Waiting(lambda: True, str)  # gives the turn away
    return None


@lru_cache(maxsize=64)
def decode(text: str, shared_bytes: int) -> tuple[Module, tuple[Step, ...]]:
    """The steps of a text, decoded once."""
    module = parse(text)
    names, _ = layout(module, shared_bytes)
    decoder = Decoder(module, names)
    steps = []
    for instruction in module.code:
        known = control(instruction)
        run = None
        try:
            if known is None:
                for family in FAMILIES:
                    run = family.decode(decoder, instruction)
                    if run is not None:
                        break
                else:
                    raise TextError("this form is not simulated")
        except SimulationError as error:
            raise type(error)(error.message, instruction) from None
        except (IndexError, KeyError, StopIteration) as error:
            raise TextError(f"this form is not simulated ({error!r})", instruction) from None
        kind, action = known or ("", cast(Run, run))
        reads, writes = reads_and_writes(instruction)
        steps.append(Step(instruction, action, reads, writes, kind))
    end = Instruction(len(steps), 0, "end of the entry", "", "ret", ())
    steps.append(Step(end, None, frozenset(), frozenset(), "exit"))  # type: ignore[arg-type]
    watched = matrix.watched(module)
    for step in steps:
        if step.instruction.words[:1] != ["wgmma"]:
            step.watched = (step.reads | step.writes) & watched
        step.plain = not (step.kind or step.watched or step.instruction.guard)
    return module, tuple(steps)
