"""Which target folder serves which device: the one table that the compiler asks.

A device is named "cpu", "cuda" (the first GPU) or "cuda:1"; its Target says its `language`,
which picks the functions that emit, compile and bind. Invariant: a target folder, and what it
needs installed, is imported when a device of its kind is first used, never before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core.config import config
from ..core.errors import InternalError, UserError

if TYPE_CHECKING:
    from ..core.target import Target
    from ..runtime.executable import Recipe
    from ..tile.build import Body

DEVICES = re.compile(r"(cpu|cuda)(?::(\d+))?\Z")


@dataclass(frozen=True)
class Program:
    """A Body as target text, with what its launch must know."""

    text: str
    scratch: int = 0  # bytes a worker needs
    entry: str = ""  # the Entry of a GPU program, as text


@dataclass(frozen=True)
class Offer:
    """What a target folder does for the compiler."""

    emit: Callable[[Body, str, Target], Program]
    symbols: Callable[[Body], list[str]]  # of a Body, in the order its kernel takes them
    machine: Callable[[str], str]  # what object code for a device depends on besides its Target
    compile: Callable[[str, Target, str], bytes]  # text to object code; threads may call it
    load: Callable[[bytes], Any]  # object code, ready to be bound
    bind: Callable[[Recipe, Mapping[str, Any], str], Any]  # to an Executable on a device
    listings: Mapping[str, Callable[[str, Target], str]]  # what `explain` shows of a text, by name


def offer(target: Target) -> Offer:
    """The functions of the folder that serves a Target."""
    try:
        return OFFERS[target.language]()
    except KeyError:
        raise InternalError("dispatch", f"no target folder serves {target.language!r}") from None


def device_name(device: Any, op: str = "device") -> str:
    """The full name of a device: 'cpu' or 'cuda:0'; takes torch's devices too."""
    found = DEVICES.match(str(device))
    if found is None:
        raise UserError(
            "no such device",
            op=op,
            expected='"cpu", "cuda" or "cuda:<number>"',
            got=repr(device),
            hint="`tilegrad doctor` shows what this machine has",
        )
    return "cpu" if found[1] == "cpu" else f"cuda:{int(found[2] or 0)}"


def device(name: str) -> Any:
    """The opened GPU called `name`; allocate, upload, download, copy, synchronize."""
    if not name.startswith("cuda:"):
        raise InternalError("dispatch", f"{name} is not opened")
    from ..targets.ptx.driver import open_device

    return open_device(int(name[5:]))


def target_for(name: str) -> Target:
    """The Target of a device, with the Config's number of workers on the CPU."""
    if name != "cpu":
        return device(name).target  # type: ignore[no-any-return]
    from ..targets.llvm.target import host_target

    return host_target().with_cores(config().threads)


# ---- the CPU ---------------------------------------------------------------------------------


def _llvm() -> Offer:
    from ..targets.llvm.driver import assembly, compile_text, load, optimized
    from ..targets.llvm.step import Executable

    def emitted(body: Body, name: str, target: Target) -> Program:
        from ..targets.llvm.emit import emit  # not needed where object code is in the Store

        return Program(*emit(body, name, target))

    def symbols(body: Body) -> list[str]:
        from ..tile.build import body_symbols

        return [s.name for s in body_symbols(body)]

    def compiled(text: str, target: Target, machine: str) -> bytes:
        return compile_text(text, target)

    def bind(recipe: Recipe, modules: Mapping[str, Any], device: str) -> Any:
        return Executable(recipe, modules)

    listings = {"llvm": _as_it_is, "optimized": optimized, "assembly": assembly}
    return Offer(emitted, symbols, lambda device: "", compiled, load, bind, listings)


# ---- NVIDIA GPUs -----------------------------------------------------------------------------


def _ptx() -> Offer:
    from ..targets.ptx.emit import emit

    def emitted(body: Body, name: str, target: Target) -> Program:
        text, entry = emit(body, name, target)
        return Program(text, 0, entry.to_text())

    def bind(recipe: Recipe, code: Mapping[str, Any], name: str) -> Any:
        from ..targets.ptx.step import Executable

        return Executable(recipe, code, device(name))

    listings = {"ptx": _as_it_is, "assembly": reported}
    return Offer(
        emitted, lambda body: [], architecture, assembled, lambda data: data, bind, listings
    )


def architecture(name: str) -> str:
    """What PTX is assembled to for a GPU; a Target for older ones may be forced on it."""
    return device(name).arch  # type: ignore[no-any-return]


def assembled(text: str, target: Target, machine: str) -> bytes:
    """A cubin where ptxas is here, else the text, which the driver compiles when it is loaded."""
    from ..targets.ptx.assemble import assemble, find_ptxas

    return text.encode() if find_ptxas() is None else assemble(text, machine).cubin


def reported(text: str, target: Target) -> str:
    """What ptxas says of the machine code: registers, spills, warnings."""
    from ..targets.ptx.assemble import assemble, find_ptxas

    if find_ptxas() is None:
        return "// no ptxas here: the driver compiles the PTX"
    made = assemble(text, target.cpu)
    lines = [f"// {entry}: {report}" for entry, report in made.reports.items()]
    return "\n".join(lines + [f"// {warning}" for warning in made.warnings])


def _as_it_is(text: str, target: Target) -> str:
    return text


def renamed(program: Program, before: str, after: str) -> Program:
    """The same Program with its function called `after`."""
    return replace(
        program,
        text=program.text.replace(before, after),
        entry=program.entry.replace(before, after),
    )


OFFERS: dict[str, Callable[[], Offer]] = {"llvm": _llvm, "ptx": _ptx}
