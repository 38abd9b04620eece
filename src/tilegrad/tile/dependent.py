"""The dependent-launch rule, on paths: a Body that waits for its dependency does so on all of them.

`protocol` follows the wait through barriers in the programs it runs; here the shape of the code is
judged, for all programs: a `grid_dependency_wait` under a condition or in a loop that hangs on the
program's number, a Symbol or data may be left out by a program that was not run, and an access
under such a condition may come before it in one. Invariant: a Body without the op is launched
plainly and has no Findings.
"""

from __future__ import annotations

from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import high, low
from .check import walk
from .finding import Finding, finding
from .row import touches_of
from .skeleton import Skeleton, computable

ALL, SOME, NONE = "all", "some", "none"
TELL = {"grid_dependency_wait", "wait", "named_sync"}  # what a role may know of the dependency by


def check_dependent(skeleton: Skeleton) -> list[Finding]:
    """Waits that stand on some paths only."""
    body = skeleton.body
    waits = [(n, around) for n, around in walk(body.block) if n.op.name == "grid_dependency_wait"]
    found = []
    for node, around in waits:
        parts = [n for n in around if n.op.name == "role"]
        block = parts[0].blocks[0] if parts else body.block
        unsure = [n for n in around if n.op.name in ("branch", "loop") and varies(skeleton, n)]
        if unsure and state(block) != ALL:
            who = f"the role {parts[0].attrs['name']}" if parts else "the program"
            text = f"{who} comes to grid_dependency_wait on some paths only"
            found.append(finding("dependent", text, node, unsure[-1]))
    return found + (early(skeleton) if waits else [])


def early(skeleton: Skeleton) -> list[Finding]:
    """Accesses that only some programs come to, before the wait and before anything that another
    role could tell of it with."""
    block = skeleton.body.block
    roles = [n for n in block.nodes if n.op.name == "role"]
    told: list[Node] = []
    found = _early(skeleton, block, "the program", False, told)
    before = bool(told)
    for role in roles:
        who = str(role.attrs["name"])
        found += [] if before else _early(skeleton, role.blocks[0], who, False, [])
    return found


def _early(
    skeleton: Skeleton, block: Block, who: str, unsure: bool, told: list[Node]
) -> list[Finding]:
    """Walk a Block until something tells of the dependency; `told` holds what does."""
    found: list[Finding] = []
    for node in block.nodes:
        name = node.op.name
        if name in TELL:
            told.append(node)
        if told or name == "role":
            break
        for touch in touches_of(node) if unsure else ():
            memory, verb = touch.memory, "writes" if touch.writes else "reads"
            if memory not in skeleton.body.parameters:
                continue
            if touch.writes or memory.type.use != "constant":  # type: ignore[union-attr]
                what = f"{verb} {memory.attrs['name']} in some programs"
                text = f"{who} {what} before it knows of grid_dependency_wait"
                found.append(finding("dependent", text, node))
        inside = unsure or (name in ("branch", "loop") and varies(skeleton, node))
        for inner in node.blocks:
            found += _early(skeleton, inner, who, inside, told)
    return found


def state(block: Block) -> str:
    """Whether all paths through a Block wait, some do, or none."""
    result = NONE
    for node in block.nodes:
        here = NONE
        if node.op.name == "grid_dependency_wait":
            here = ALL
        elif node.op.name == "branch":
            arms = {state(b) for b in node.blocks}
            here = arms.pop() if len(arms) == 1 else SOME
        elif node.op.name == "loop":
            here = state(node.blocks[0])
            lower, upper = (i.attrs.get("value") for i in node.inputs[:2])
            if here == ALL and (lower is None or upper is None or low(upper) <= high(lower)):
                here = SOME
        elif node.op.name == "role":
            here = state(node.blocks[0])
        if here == ALL:
            return ALL
        result = SOME if SOME in (here, result) else NONE
    return result


def varies(skeleton: Skeleton, node: Node) -> bool:
    """Whether a condition or bound differs between programs, Symbols or data."""
    stack = list(node.inputs[:1] if node.op.name == "branch" else node.inputs[:2])
    seen: set[Node] = set()
    while stack:
        scalar = stack.pop()
        if scalar in seen:
            continue
        seen.add(scalar)
        name = scalar.op.name
        if name in ("program", "symbol", "cluster_rank"):
            return True
        if name not in ("constant", "get") and scalar not in skeleton.owner:
            if not computable(scalar):
                return True
        stack += skeleton.parts(scalar)
    return False
