"""PTX as a Language: Bodies to text and Entries, text to machine code.

Invariant: no GPU and no driver is needed; without ptxas the text itself is the object code, which
the driver compiles when it is loaded.
"""

from __future__ import annotations

from ...core.target import Target
from ...runtime.language import Language, ProgramText, as_it_is
from ...tile.build import Body
from .assemble import assemble, find_ptxas
from .emit import emit


def emitted(body: Body, name: str, target: Target) -> ProgramText:
    """A Body as PTX, with the Entry of its launch."""
    text, entry = emit(body, name, target)
    return ProgramText(text, 0, entry.to_text())


def assembled(text: str, target: Target, arch: str) -> bytes:
    """A cubin where ptxas is here, else the text; a Target may be forced on a newer GPU."""
    return text.encode() if find_ptxas() is None else assemble(text, arch).cubin


def reported(text: str, target: Target) -> str:
    """What ptxas says of the machine code: registers, spills, warnings."""
    if find_ptxas() is None:
        return "// no ptxas here: the driver compiles the PTX"
    made = assemble(text, target.cpu)
    lines = [f"// {entry}: {report}" for entry, report in made.reports.items()]
    return "\n".join(lines + [f"// {warning}" for warning in made.warnings])


LANGUAGE = Language(
    emitted,
    lambda body: [],  # an Entry names those of its launch
    assembled,
    {"ptx": as_it_is, "assembly": reported},
)
