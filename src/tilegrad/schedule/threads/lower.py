"""Lower any group for a Target whose programs are blocks of threads.

Invariant: the Bodies together compute what the group stores.
"""

from __future__ import annotations

from ...core.errors import InternalError
from ...core.target import Target
from ...ir.node import Node
from ...tile.build import Body
from ..fuse import DOTS, Group
from .axis import lower_cumulative
from .loops import lower_loops
from .pair import Pair, lower_pair
from .sort import lower_sort
from .space import Roles


def lower_threads(
    group: Group, reads: list[Node], values: set[Node], target: Target, name: str
) -> list[tuple[Body, Roles]]:
    """Bodies with the roles of their parameters, in the order they run."""
    if isinstance(group, Pair):
        return lower_pair(group, reads, values, target, name)
    if group.kind in ("loops", "mixed"):
        return lower_loops(group, reads, values, target, name)
    if group.kind in DOTS:
        from ..dot_gpu import lower_dot_gpu

        return lower_dot_gpu(group, reads, values, target, name)
    if group.kind == "cumulative":
        return lower_cumulative(group, reads, name)
    if group.kind == "sort":
        return lower_sort(group, reads, name)
    raise InternalError("schedule.threads", f"no lowering for {group.kind}: {group.values}")
