"""What the simulator finds wrong with a PTX program, one class for each kind of fault.

Invariant: an error that leaves the simulator names the PTX line, its text, the `file:line` note
above it if there is one, and the warp that ran it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .text import Instruction


class SimulationError(Exception):
    """A fault of a simulated program; `instruction` is where, `who` is the warp or the engine."""

    def __init__(self, message: str, instruction: Instruction | None = None, who: str = "") -> None:
        self.message, self.instruction, self.who = message, instruction, who
        place = ""
        if instruction is not None:
            note = f" [{instruction.note}]" if instruction.note else ""
            text = instruction.text
            if len(text) > 160:
                text = f"{text[:90]} ... {text[-60:]}"
            place = f"PTX line {instruction.line}: `{text}`{note}: "
        super().__init__(f"{place}{f'{who}: ' if who else ''}{message}")


class TextError(SimulationError):
    """The text is not PTX as we emit it, or uses a form the simulator does not know."""


class OutOfBoundsError(SimulationError):
    """An access outside of the memory it points into."""


class MisalignedError(SimulationError):
    """An access whose address is not a multiple of what its form needs."""


class UninitialisedError(SimulationError):
    """A read of a register or of shared memory that nothing has written."""


class RaceError(SimulationError):
    """Two accesses, one a write, that nothing orders."""


class ProxyFenceError(SimulationError):
    """Plain stores seen by the asynchronous proxy without fence.proxy.async by the writer."""


class PendingError(SimulationError):
    """Something asynchronous is used, overwritten or left behind before its wait."""


class MatrixFenceError(SimulationError):
    """Registers touched since the last wgmma.fence are used by wgmma."""


class SparsityError(SimulationError):
    """Two kept elements of a sparse operand are said to lie at one place."""


class WarpgroupError(SimulationError):
    """An instruction of a whole warpgroup that not all of its four warps run alike."""


class DivergenceError(SimulationError):
    """An instruction for all lanes of a warp that not all of them run."""


class DeadlockError(SimulationError):
    """No warp can go on."""


class BarrierError(SimulationError):
    """A barrier is used wrongly: too many arrivals, too many bytes, not initialised."""


class ExitedPeerError(SimulationError):
    """A CTA of the cluster is touched after its exit, or may be."""


class RegisterPoolError(SimulationError):
    """setmaxnreg with a value the warpgroup or the register file cannot take."""


class DependencyError(SimulationError):
    """A dependent launch writes global memory or ends before griddepcontrol.wait."""


class TrapError(SimulationError):
    """The program ran `trap`."""


class LimitError(SimulationError):
    """More instructions than the limit: most likely a loop that does not end."""
