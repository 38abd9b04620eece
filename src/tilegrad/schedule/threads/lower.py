"""Lower any group for a Target whose programs are blocks of threads.

Invariant: the Bodies together compute what the group stores.
"""

from __future__ import annotations

from ...core.config import config
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.node import Node
from ...tile.build import Body
from ...tile.check import PLACED_OPS, verify_body, walk
from ...tile.prove import require
from ..fuse import DOTS, Group
from .axis import lower_cumulative
from .both import Both, lower_both
from .loops import lower_loops
from .sort import lower_sort
from .space import Roles


def lower_threads(
    group: Group, reads: list[Node], values: set[Node], target: Target, name: str
) -> list[tuple[Body, Roles]]:
    """Bodies with the roles of their parameters, in the order they run."""
    if isinstance(group, Both):
        return lower_both(group, reads, values, target, name)
    if group.kind in ("loops", "mixed"):
        return lower_loops(group, reads, values, target, name)
    if group.kind in DOTS:
        from ..dot_gpu import lower_dot_gpu

        found = lower_dot_gpu(group, reads, values, target, name)
        if config().verify:
            for body, _ in found:
                check_placed(body, target)
        return found
    if group.kind == "cumulative":
        return lower_cumulative(group, reads, name)
    if group.kind == "sort":
        return lower_sort(group, reads, name)
    raise InternalError("schedule.threads", f"no lowering for {group.kind}: {group.values}")


def check_placed(body: Body, target: Target) -> None:
    """Races, deadlock and fences of a library kernel with what fusion has put into it."""
    if any(node.op.name in PLACED_OPS for node, _ in walk(body.block)):
        verify_body(body, "placed", target, "schedule.threads")
        require(body, target, "schedule.threads")
