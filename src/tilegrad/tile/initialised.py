"""Places that are read before anything wrote them, by the order of the code.

For Bodies of the portable level, where one thread of control runs: a place counts as written from
the first store to any part of it; a loop counts as run at least once unless its bounds say that it
is not (a loop that may be empty is as a rule empty for the reader too). `protocol` judges the
placed level, box by box. Invariant: an 'error' is a read that comes before every write on all
paths, a 'warning' one that does on some.
"""

from __future__ import annotations

from ..ir.block import Block
from ..ir.node import Node
from ..ir.symbol import high, low
from .build import Body
from .finding import Finding, finding, place_name
from .row import is_place, read_by, written_by


def check_initialised(body: Body) -> list[Finding]:
    """Reads of places that nothing has written."""
    walker = _Walker()
    walker.block(body.block, set(), set())
    return list(walker.found.values())


class _Walker:
    def __init__(self) -> None:
        self.found: dict[Node, Finding] = {}

    def block(self, block: Block, surely: set[Node], maybe: set[Node]) -> None:
        """Walk a Block; the sets of written places grow."""
        for node in block.nodes:
            name = node.op.name
            if name == "branch":
                self.branch(node, surely, maybe)
            elif name == "loop":
                lower, upper = (i.attrs.get("value") for i in node.inputs[:2])
                empty = lower is not None and upper is not None and high(upper) <= low(lower)
                self.block(node.blocks[0], set(surely) if empty else surely, maybe)
            elif node.blocks:
                for inner in node.blocks:
                    self.block(inner, surely, maybe)
            else:
                self.node(node, surely, maybe)

    def branch(self, node: Node, surely: set[Node], maybe: set[Node]) -> None:
        arms = []
        for inner in node.blocks:
            arm = set(surely)
            self.block(inner, arm, maybe)
            arms.append(arm)
        surely |= set.intersection(*arms)
        maybe |= set.union(*arms)

    def node(self, node: Node, surely: set[Node], maybe: set[Node]) -> None:
        for memory in filter(is_place, read_by(node)):
            if memory not in surely and memory not in self.found:
                text = f"{place_name(memory)} is read before anything wrote it"
                level = "error"
                if memory in maybe:
                    level, text = "warning", text + " on some paths"
                self.found[memory] = finding(
                    level, "uninitialised", text, node, memory, "write it first on every path"
                )
        surely |= written_by(node)
        maybe |= written_by(node)
