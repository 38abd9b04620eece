"""Is a Body well formed at its level? Run after every pass that makes or changes one.

On top of what `ir.verify` knows of every IR: index counts and masks, Scopes that exist in the
Target, marks of the parameters (nothing stores to a constant; at the portable level a result is not
read before it is written), sizes of places against target.memories, and which ops a level has. The
proofs of races, deadlock, dependent launch, bank conflicts and register pressure stand in `prove`.
Invariant: a check reads and never changes.

Findings are what the checks before launch say about a Body, in words a person can act on: a Finding
names its rule, both of the kernel's own lines where two ops are at odds, and is equal to every
other one that says the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod

from ..core.errors import InternalError, Location
from ..core.target import Target
from ..ir.block import Block, argument_op
from ..ir.node import Node
from ..ir.types import Memory, Tile
from ..ir.verify import Rule, verify
from . import ops, placed
from .build import Body
from .row import TileOp, is_place, memory_of, read_by, touches_of, written_by

LEVELS = ("portable", "placed")
USES = ("constant", "state", "value", "result")
PLACED_OPS = frozenset(
    op.name for op in ops.tile.ops.values() if isinstance(op, TileOp) and op.placed
)


def verify_body(
    body: Body, level: str = "portable", target: Target | None = None, where: str = "tile.check"
) -> None:
    """Check a Body at a level; `where` names the pass that made it."""
    if level not in LEVELS:
        raise InternalError(where, f"there is no level {level!r}, only {LEVELS}")
    rules: list[Rule] = [memory_rule, control_rule, partial(machine_rule, level, target)]
    if level == "portable":
        rules.append(result_rule())
    verify(body.block, ops.tile, rules, where=where)
    for fault in faults(body, target):
        raise InternalError(where, f"{body.name}: {fault}")


def walk(block: Block, enclosing: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Every Node of a Block and the Blocks within, in order, with the Nodes around it."""
    for node in block.nodes:
        yield node, enclosing
        for inner in node.blocks:
            yield from walk(inner, (*enclosing, node))


def written_parameters(body: Body) -> set[Node]:
    """Parameters that the Body writes: only these can be raced for."""
    return {m for n in body.block.all_nodes() for m in written_by(n) if not is_place(m)}


# ---- rules of Nodes (for ir.verify), and of the whole Body --------------------------------------


def memory_rule(node: Node, enclosing: tuple[Node, ...]) -> str | None:
    """Indices are scalars, axes exist, masks are bool and fit."""
    for touch in touches_of(node):
        rank, shape = len(touch.memory.shape), touch.shape
        if len(touch.axes) != len(shape) or any(not 0 <= a < rank for a in touch.axes):
            return f"axes {touch.axes} for a tile {shape} of a Memory of rank {rank}"
        if touch.index and len(touch.index) != rank:
            return f"{len(touch.index)} indices for {touch.memory.type}"
        for index in touch.index:
            if isinstance(index, Node) and index.type != ops.INDEX:
                return f"an index is {index.type}, not a scalar of int64"
        if touch.offsets is not None:
            shape = touch.offsets.shape
            if touch.offsets.dtype is not ops.INDEX.dtype:
                return f"offsets are {touch.offsets.type}, not int64"
        mask = None if touch.mask is None else touch.mask.type
        if mask not in (None, Tile(shape, ops.bool_), Tile((), ops.bool_)):
            return f"mask is {mask}, tile is {shape}"
    return None


def control_rule(node: Node, enclosing: tuple[Node, ...]) -> str | None:
    """Loop bounds are scalars, steps positive, Blocks take what they get; roles are not nested."""
    if node.op.name == "loop":
        block = node.blocks[0]
        wanted = (ops.INDEX, *[i.type for i in node.inputs[2:]])
        if tuple(a.type for a in block.arguments) != wanted:
            return f"the Block takes {[a.type for a in block.arguments]}, not {wanted}"
        if node.attrs["step"] < 1 or node.attrs["unroll"] < 1:
            return f"step {node.attrs['step']}, unroll {node.attrs['unroll']}"
        if any(i.type != ops.INDEX for i in node.inputs[:2]):
            return f"bounds are {[i.type for i in node.inputs[:2]]}, not scalars of int64"
    if node.op.name == "branch":
        if node.inputs[0].type != Tile((), ops.bool_):
            return f"the condition is {node.inputs[0].type}"
        first, second = (tuple(r.type for r in b.results) for b in node.blocks)
        if first != second:
            return f"one Block gives {first}, the other {second}"
    if node.op.name == "role" and any(e.op.name == "role" for e in enclosing):
        return "a role stands inside of a role"
    return None


def machine_rule(
    level: str, target: Target | None, node: Node, enclosing: tuple[Node, ...]
) -> str | None:
    """The ops of the level, Scopes, units, and constants that nobody writes."""
    name, unit = node.op.name, node.attrs.get("unit")
    if level == "portable" and name in PLACED_OPS:
        return f"{name} belongs to the placed level"
    if any(m.type.use == "constant" for m in written_by(node)):  # type: ignore[union-attr]
        return "it stores to a constant"
    if target is None:
        return None
    if unit is not None and unit not in {u.name for u in target.matrix}:
        return f"{target.name} has no matrix unit {unit!r}"
    return unknown_scope(memory_of(node), target) if is_place(node) else None


def result_rule() -> Rule:
    """A result is not read before it is written (in program order)."""
    written: set[Node] = set()

    def rule(node: Node, enclosing: tuple[Node, ...]) -> str | None:
        read = set() if node.op is placed.atomic_add else read_by(node)  # added to what it is
        for memory in read - written:
            if memory.op is argument_op and memory.type.use == "result":  # type: ignore[union-attr]
                return "it reads a result that nothing has written yet"
        written.update(written_by(node))
        return None

    return rule


def unknown_scope(type_: Memory, target: Target | None) -> str | None:
    """What is wrong with the Scope of a Memory."""
    if target is None or type_.scope in target.memories:
        return None
    return f"{target.name} has no Scope {type_.scope!r}, only {', '.join(target.memories)}"


def faults(body: Body, target: Target | None) -> Iterator[str]:
    """Parameters are global Memories with a known mark. Places fit into their Scopes; a cache
    (which is only prefetched into) has no limit, and registers are a role's own."""
    for parameter in body.parameters:
        name, type_ = parameter.attrs["name"], parameter.type
        if not isinstance(type_, Memory):
            yield f"the parameter {name} is {type_}, no Memory"
        elif type_.use not in USES:
            yield f"{name} is marked {type_.use!r}, not of {USES}"
        elif wrong := unknown_scope(type_, target):
            yield f"{name}: {wrong}"
    taken = Counter[str]()
    for node in body.block.find("allocate"):
        taken[memory_of(node).scope] += place_bytes(node)
    for scope, space in target.memories.items() if target is not None else ():
        size = taken[scope]
        if scope != "register" and space.copies != ("prefetch",) and size > space.bytes:
            yield f"places take {size} bytes of {scope}, which has {space.bytes}"


# ---- Findings -----------------------------------------------------------------------------------


HINTS = {  # of rules, where one fits all that break them
    "deadlock": "count who arrives, with how many bytes, and look at the parity",
    "race": "order the two: arrive on a barrier after the one, wait for it before the other",
    "phase": "wait for the barrier's phase before it is used again, in this role or one before it",
    "arrivals": "the count of a barrier is who arrives in one phase",
    "bytes": "expect exactly the bytes that the copies land",
    "fence": "fence('async') after them, then a barrier, then the asynchronous op",
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


Findings = list[Finding]


def line_of(node: Node | None) -> str:
    """The kernel's own line of a Node, with the op that stands there."""
    return "" if node is None else f"{node.location or 'an unknown line'} ({node.op.name})"


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


def place_bytes(node: Node) -> int:
    """Bytes of a place."""
    return node.dtype.storage_bytes(prod(node.shape))


def place_name(node: Node) -> str:
    """A place or a parameter in words: its name, or Scope, shape and dtype."""
    if "name" in node.attrs:
        return str(node.attrs["name"])
    type_ = memory_of(node)
    shape = "x".join(str(s) for s in type_.shape)
    return f"the {type_.scope} place {shape} {type_.dtype.name}"
