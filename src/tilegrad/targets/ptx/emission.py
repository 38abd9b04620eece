"""One Body being emitted: the parts that every op's function is handed.

Invariant: a part knows only the parts it was made of; ops know the parts, and no part knows an op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from ...core.target import Target
from ...ir.block import Block
from ...ir.node import Node
from ...tile.bounds import Bounds
from ...tile.build import Body, body_sites
from ...tile.row import memory_of, touches_of
from .plan_spread import SpreadPlan
from .program import TensorMap
from .shared import SWIZZLES, Memo, Shared, Threads
from .values import Carried, Values
from .write import Writer

Emit = Callable[["Emission", Node], list[str] | None]  # an op: the registers of its value


class Emission(Writer):
    """The text, the threads, shared memory and values of one Body."""

    def __init__(self, body: Body, target: Target, walk: Callable[[Emission, Block], None]) -> None:
        super().__init__()
        self.body, self.target, self._walk = body, target, walk
        self.nodes = list(body.block.all_nodes())
        self.warps = warps_of(body)
        self.memo = Memo()
        self.bounds = Bounds(body)
        self.plan = SpreadPlan(body, self.bounds, self.warps)
        self.threads = Threads(self, self.memo, 32 * self.warps)
        self.shared = Shared(self.threads)
        self.values = Values(self.bounds, self.plan, self.shared)
        self.carried: dict[Node, Carried] = {}  # places in registers
        self.barriers: dict[Node, int] = {}  # offset of each array of barriers
        self.maps: dict[TensorMap, str] = {}  # and their addresses
        self.pointers: dict[Node, str] = {}  # global address (b64) or shared address (b32)
        self.results: dict[Node, dict[int, list[str]]] = {}  # of loops and branches
        self.sites: dict[Node, int] = {}  # numbers of conditions
        self.fault = ""  # where the number of one that fails is left

    def block(self, block: Block) -> None:
        """Emit every Node of a Block."""
        self._walk(self, block)

    def has(self, *names: str) -> bool:
        """Whether the Body has one of some ops."""
        return any(n.op.name in names for n in self.nodes)

    @property
    def overlaps(self) -> bool:
        """Whether launches may overlap on the machine; where not, nothing waits."""
        return (self.target.cpu or "sm_90a").startswith("sm_9")

    @cached_property
    def waits_before(self) -> Node | None:
        """The Node before which the entry waits, so that launches may overlap, of a Body that does
        not say itself when, on a machine that can: the first, or where constants are read before
        all else the one behind them."""
        says = ("role", "grid_dependency_wait", "grid_launch_dependents")
        if not self.overlaps or self.has(*says):
            return None
        nodes = self.body.block.nodes
        uses = [{memory_of(t.memory).use for t in touches_of(n)} for n in nodes]
        late = next((i for i, n in enumerate(nodes) if n.blocks or uses[i] - {"constant"}), 0)
        return nodes[late if any(uses[:late]) and not body_sites(self.body) else 0]

    @cached_property
    def swizzled(self) -> bool:
        """Whether some place is swizzled: its address must be a multiple of 1024."""
        return any(SWIZZLES.get(n.attrs["layout"]) for n in self.body.block.find("allocate"))


def warps_of(body: Body) -> int:
    """Warps of a program: those of its roles, else what the Body notes, else four."""
    roles = [n.attrs["warps"] for n in body.block.nodes if n.op.name == "role"]
    return sum(roles) if roles else int(body.notes.get("warps", 4))
