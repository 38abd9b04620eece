"""Lower a `call`: the Bodies of a user's or a library's kernel become Launches.

Invariant: each parameter of a Body stands for an argument of the call, a result of it, a state
that is both, or scratch where nobody wants a result; the Bodies launched hold no tile too large
for the Target.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..core.config import config
from ..core.errors import InternalError, UserError
from ..core.target import Target
from ..graph import ops
from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, high
from ..ir.types import Tile, product
from ..tile.build import Body
from ..tile.callee import KernelCallee
from ..tile.check import PLACED_OPS, verify_body
from ..tile.legalize import legalize
from ..tile.prove import require
from .family import Bodies, Family, Made, Offer, Verdict
from .region import Region


class CallFamily(Family):
    """Kernels that a Graph calls: users' own, and those that a pass has chosen."""

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """Bodies with what each parameter stands for: ('read', i), ('store', i), ('scratch', (type,
        i)) for result i that nobody wants, or ('state', i) for the call's argument i, written in
        place."""
        node, target = region.anchor, region.target
        callee = node.attrs["callee"]
        if node.op is not ops.call or not isinstance(callee, KernelCallee):
            raise InternalError("schedule.call", f"{callee!r} has no Bodies")
        if callee.level == "placed" and "shared" not in target.memories:
            raise UserError(
                f"the kernel {callee.name} is written at the placed level",
                op=callee.name,
                expected="a Target with roles and shared memory",
                got=target.name,
                hint="run it with the interpreter, or write a portable kernel for this machine",
                location=node.location,
            )
        results = region.items
        found: Bodies = []
        for body, roles in callee.launches_for(target):
            given: list[Any] = []
            for kind, place in roles:
                if kind == "read":
                    given.append(("read", region.inputs.index(node.inputs[place])))
                elif kind == "state":
                    given.append(("state", place))
                elif place in results:
                    given.append(("store", results[place]))
                else:
                    given.append(("scratch", (callee.types("store")[place], place)))
            found.append(Made(body, given))
        return found

    def verdict(self, region: Region, verdict: Verdict) -> Verdict:
        """Who offered what where a pass has chosen the kernel."""
        return region.anchor.attrs["callee"].verdict or verdict


def legalize_call(body: Body, kind: str, target: Target) -> Body:
    """The pass: of a kernel that is called, a Body of its own (later stages leave notes in it)
    with no tile too large for the Target."""
    portable = body.notes.get("level", "portable") == "portable"
    new = legalize(body, target) if portable else body
    return Body(new.name, new.block, new.grid, dict(new.notes))


def check_call(body: Body, kind: str, target: Target) -> Body:
    """The pass: raise where a kernel that is called breaks a rule, or does not fit the Target."""
    if config().verify:
        level = body.notes.get("level", "portable")
        verify_body(body, level, target, where="schedule.call")
    if "shared" in target.memories:
        _check_dots(body, target)
        require(body, target)  # budgets of this machine, and all that the kernel was checked for
    return body


def _check_dots(body: Body, target: Target) -> None:
    """Threads that hold a tile together share out a dot evenly: its sizes are powers of two."""
    for node in body.block.find("dot"):
        sizes = (*node.shape, node.inputs[0].shape[1])
        if any(size & (size - 1) for size in sizes):
            raise UserError(
                f"a dot of sizes (m, n, k) = {sizes} does not fit {target.name}",
                op="tile.dot",
                expected="powers of two",
                location=node.location,
                hint="load larger tiles: what lies beyond the end of an array does not count",
            )


def work_of_body(body: Body) -> Size:
    """About how many operations the programs of a Body do, Symbols at their bounds; counted once,
    however many layers launch it."""
    if "work" not in body.notes:
        body.notes["work"] = product(body.grid) * _work(body.block)
    return body.notes["work"]


def _work(block: Block) -> int:
    total = 0
    for node in block.nodes:
        if node.op.name == "loop":
            lower, upper = (_known(i) for i in node.inputs[:2])
            trips = max(1, ceil_divide(upper - lower, node.attrs["step"]))
            total += trips * _work(node.blocks[0])
        elif node.blocks:
            total += max(_work(b) for b in node.blocks)
        elif node.op.name == "dot":
            total += 2 * prod(node.inputs[0].shape) * node.inputs[1].shape[1]
        elif isinstance(node.type, Tile):
            total += prod(node.type.shape)
    return total


def _known(node: Node) -> int:
    """A loop's bound, guessed where it is known only at run time."""
    if node.op.name == "constant":
        return int(node.attrs["value"])
    if node.op.name == "symbol":
        return high(node.attrs["value"])
    if node.op.name == "reduce":
        return 0  # of what is counted at run time
    return 0 if not node.inputs else max(_known(i) for i in node.inputs)


def check_body(body: Body, kind: str, target: Target) -> Body:
    """The pass: races, deadlock and fences of a library kernel with what fusion has put into it."""
    if kind != "call" and body.block.find(*PLACED_OPS):
        verify_body(body, "placed", target, "schedule.call")
        require(body, target, "schedule.call")
    return body
