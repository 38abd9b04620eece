"""The NPU's Language: LLVM IR of every Body, and before those of the array its work as a comment.

The CPU beside the array runs the LLVM IR: of what the array has not, and of what it has, since the
values are the same to the bit. Instruction words follow from the work and the parameters, and are
made where they are shown, counted or simulated. Invariant: a text tells all there is to know.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import UserError
from ...core.target import Target
from ...runtime.language import LANGUAGES, Language, ProgramText
from ...tile.array import ArrayWork
from ...tile.build import Body
from .kernel import ArrayKernel, account_of, kernel_of
from .target import parameters_of

MARK = "; npu "
LLVM = LANGUAGES.get("llvm")  # of the CPU beside the array


def emit(body: Body, name: str, target: Target) -> ProgramText:
    """LLVM IR, and the work of the array."""
    made = LLVM.emit(body, name, target)
    work = body.notes.get("array", "")
    if not work:
        return made
    return ProgramText(f"{MARK}{work}\n{made.text}", made.scratch, work)


def at_most(work: str, target: Target) -> ArrayKernel:
    """The Kernel of a work, Symbols at their bounds."""
    return kernel_of(target.chip, ArrayWork.of_text(work).at_most().to_text())


def words(text: str, target: Target) -> str:
    """What `explain` shows of the array's instructions."""
    first, _, _ = text.partition("\n")
    if not first.startswith(MARK):
        return ""
    return at_most(first.removeprefix(MARK), target).listing()


def costs(body: Body, target: Target) -> Mapping[str, float]:
    """Cycles, multiplications, bytes that the host packs, seconds and energy of a launch, Symbols
    at their bounds, by closed forms."""
    work = body.notes.get("array", "")
    if not work:
        return {}
    found = account_of(parameters_of(target.chip), {at_most(work, target): 1})
    return {
        "cycles": found.counters.cycles,
        "macs": found.macs,
        "packed": found.packed_bytes,
        "seconds": found.seconds,
        "energy": found.energy,
        "utilisation": found.utilisation,
    }


def rate_note(body: Body, target: Target) -> str:
    """How many weights a step of a launch takes, and why not two; '' where a chip has one rate."""
    work = body.notes.get("array", "")
    return at_most(work, target).rate_note if work else ""


def seconds(work: str, target: Target) -> float | str:
    """About how long a work takes, or why a chip's memories cannot hold it. What the host packs is
    read and written once more in the chip's DRAM."""
    try:
        kernel = kernel_of(target.chip, work)
        next(iter(kernel.product.shares()))
    except UserError as error:
        return str(error).splitlines()[0]
    packing = 2 * kernel.packed_bytes / (kernel.p.dram_bandwidth * 1e9)
    return kernel.work.batch * kernel.product.about() / (kernel.p.clock * 1e6) + packing


LANGUAGE = Language(
    emit,
    LLVM.symbols,
    LLVM.compile,
    {"npu": words, **LLVM.listings},
    costs=costs,
    rate_note=rate_note,
    seconds=seconds,
)
