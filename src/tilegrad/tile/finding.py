"""Findings: what the checks before launch say about a Body, in words a person can act on.

Invariant: a Finding names its rule, both of the kernel's own lines where two ops are at odds, and
is equal to every other one that says the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.errors import Location
from ..ir.node import Node
from ..ir.types import Memory

HINTS = {  # of rules, where one fits all that break them
    "deadlock": "count who arrives, with how many bytes, and look at the parity",
    "race": "order the two: arrive on a barrier after the one, wait for it before the other",
    "phase": "wait for the barrier's phase before it is used again, in this role or one before it",
    "arrivals": "the count of a barrier is who arrives in one phase",
    "bytes": "expect exactly the bytes that the copies land",
    "fence": "fence('async') after the stores, then a barrier, then the asynchronous op",
    "matrix_fence": "matrix_fence between the last touch of the registers and the matrix op",
    "unfinished": "wait for all groups before the role ends, for barriers before the program does",
    "uninitialised": "write it first on every path",
    "unwritten": "a grid and stores that reach all of it, or tile.result(..., fill=0)",
    "dependent": "grid_dependency_wait before it, where every program comes by: in this role, "
    "before a branch or loop, or in one this role waits for",
    "bank_conflict": "a swizzled layout whose span is a row, or rows of another length",
    "shared_bytes": "fewer stages or smaller tiles",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ('error') or slow or unproved ('warning')."""

    severity: str
    rule: str
    message: str
    hint: str = ""
    line: str = ""
    other: str = ""
    location: Location | None = field(default=None, compare=False)

    def __str__(self) -> str:
        text = f"{self.severity}: {self.rule}: {self.message}"
        if self.line:
            text += f"\n    at {self.line}"
        if self.other and self.other != self.line:
            text += f"\n    and {self.other}"
        return text + (f"\n    hint: {self.hint}" if self.hint else "")


def line_of(node: Node | None) -> str:
    """The kernel's own line of a Node, with the op that stands there."""
    if node is None:
        return ""
    where: Location | None = node.location
    return f"{where if where is not None else 'an unknown line'} ({node.op.name})"


def finding(
    rule: str,
    message: str,
    node: Node | None = None,
    other: Node | None = None,
    hint: str = "",
    severity: str = "error",
) -> Finding:
    """A Finding located at Nodes; without a hint of its own it has that of its rule."""
    where, hint = None if node is None else node.location, hint or HINTS.get(rule, "")
    return Finding(severity, rule, message, hint, line_of(node), line_of(other), where)


def place_name(node: Node) -> str:
    """A place or a parameter in words: its name, or Scope, shape and dtype."""
    if "name" in node.attrs:
        return str(node.attrs["name"])
    type_ = node.type
    assert isinstance(type_, Memory)
    shape = "x".join(str(s) for s in type_.shape)
    return f"the {type_.scope} place {shape} {type_.dtype.name}"
