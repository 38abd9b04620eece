"""The kernels that draw tokens, for a Target: how many tokens of a row a program takes at a time.

A block of threads takes many and shares them out; a thread with vectors takes a few, and looks
whether a block has any token before it counts places. Invariant: which token is drawn does not
depend on the Target, but for how sums are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.target import Target
from ..graph import build, ops
from ..ir.node import Node
from ..ir.rewrite import Log
from ..ir.symbol import high
from ..ir.types import Tuple
from ..kernels import draw as kernels
from ..tile.define import Definition
from ..tile.plan import Plan

NEAR = 2048  # tokens of a list that a program takes at a time
OF_VECTORS = 64  # tokens of a row that a program takes at a time, where it is one thread
LEAST, MOST = 256, 4096  # the same, of a block of threads
EACH = 256  # tokens that a warp takes


def chooser(target: Target, order: Sequence[Node], results: Sequence[Node], log: Log) -> Draw:
    """The choices for the Nodes of one Block."""
    return Draw(target, log)


class Draw:
    """See `choose.Chooser`."""

    def __init__(self, target: Target, log: Log) -> None:
        self.target, self.log = target, log

    def choose(self, node: Node, done: dict[Node, Node]) -> list[Node]:
        """The result of one of the ops."""
        inputs, columns = [done[i] for i in node.inputs], high(node.inputs[0].shape[1])
        if node.op is ops.top_k:
            return self._call(kernels.largest, inputs, columns, **node.attrs)
        if node.op is ops.add_listed:
            return self._call(kernels.biased, inputs, columns)
        p, floats, limits, seeds, slots, positions = inputs
        skip = not self.target.has_threads
        listed = self._call(
            kernels.pick, [p, floats, limits, slots], columns, skip=skip, **node.attrs
        )
        given = [p, *listed, floats, seeds, slots, positions]
        near = min(NEAR, self._block(columns))
        return self._call(kernels.draw, given, columns, near=near, **node.attrs)

    def _block(self, columns: int) -> int:
        """Tokens of a row that a program takes at a time."""
        if not self.target.has_threads:
            return OF_VECTORS
        return min(MOST, max(LEAST, 1 << (columns - 1).bit_length()))

    def _call(
        self, definition: Definition, inputs: Sequence[Node], columns: int, **static: Any
    ) -> list[Node]:
        """A kernel's results for rows of so many columns."""
        block = self._block(columns)
        plan = Plan().with_(warps=block // EACH) if self.target.has_threads else Plan()
        given = definition.bind([n.type for n in inputs], {"block": block, **static}, plan)
        callee = definition.callee(given, plan, self.target)
        self.log.fired[callee.name] = self.log.fired.get(callee.name, 0) + 1
        made = ops.call(*inputs, callee=callee)
        return build.items(made) if isinstance(made.type, Tuple) else [made]
