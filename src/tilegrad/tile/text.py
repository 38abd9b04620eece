"""Bodies as text: a first line with grid and notes, then the Block in the text of every IR.

    tilegrad-body 1 (N, 4) (("launch", "persistent"),) where N in 1..64
    tilegrad-ir 1 tile
    name(%a: global<N,8>float32 constant) {
      ...

A note that has no text, or a long one (what a later stage left there), is left out. Invariant:
body_text(parse_body(text)) == text for every text that body_text wrote.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import InternalError, UserError
from ..ir.literal import Names, read_symbolic, write, write_symbolic
from ..ir.text import parse_block, print_block
from . import placed  # noqa: F401  (defines the ops of the placed level)
from .build import Body

HEAD = "tilegrad-body 1 "


def body_text(body: Body) -> str:
    """The text of a Body."""
    notes = tuple(note for note in sorted(body.notes.items()) if _has_text(note[1]))
    line = write_symbolic(lambda names: f"{write(body.grid, names)} {write(notes, names)}")
    return f"{HEAD}{line}\n{print_block(body.block, 'tile')}"


def _has_text(value: Any) -> bool:
    try:
        return len(write(value, Names())) <= 100
    except InternalError:
        return False


def parse_body(text: str) -> Body:
    """The Body that a text describes; a mistake in it is a UserError with its line."""
    lines = text.lstrip().split("\n", 1)
    if not lines[0].startswith(HEAD) or len(lines) < 2:
        raise UserError("cannot read a Body", expected=f"a first line {HEAD!r}...", got=lines[0])
    reader = read_symbolic(lines[0][len(HEAD) :], "the first line of a Body")
    grid, notes = reader.value(), reader.value()
    if reader.kind != "end":
        raise reader.fail("the end of the line")
    if not isinstance(grid, tuple) or not isinstance(notes, tuple):
        raise UserError("cannot read a Body", expected="(grid) (notes)", got=lines[0])
    block = parse_block(lines[1])
    return Body(block.name, block, grid, dict(notes))
