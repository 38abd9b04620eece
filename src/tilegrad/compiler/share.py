"""Equal loops are one loop: Nodes that own Blocks and say the same on the same inputs become one.

Pure Nodes are interned when they are built; those with Blocks are not, since each Block has
arguments of its own. A derivative that computes its forward again, and several results of one
custom function, give such copies. Invariant: no two Nodes that remain share an argument of their
Blocks, and no value changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.target import Target
from ..graph import build, ops
from ..ir.block import Block, pure_block
from ..ir.node import Node, exact, topological
from ..ir.rewrite import Log

NAME = "equal loops"


def share_loops(
    arguments: Sequence[Node], results: Sequence[Node], log: Log, target: Target | None = None
) -> list[Node]:
    """The results with equal owners of Blocks made one."""
    order = topological(results)
    if not any(n.blocks for n in order):
        return list(results)
    return _Sharing(log).mapped(order, results)


class _Sharing:
    """One run: the arguments met so far, each in one Block only."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.met: set[Node] = set()

    def mapped(self, order: Sequence[Node], results: Sequence[Node]) -> list[Node]:
        """What became of the results of Nodes in order; equal owners among them are one."""
        done: dict[Node, Node] = {}
        known: dict[Any, Node] = {}
        for node in order:
            inputs = tuple([done.get(i, i) for i in node.inputs])
            if not node.blocks:
                done[node] = node if inputs == node.inputs else node.with_inputs(inputs)
                continue
            key = (node.op, inputs, *[block_key(b) for b in node.blocks], _attrs(node))
            if key in known:
                self.log.fired[NAME] = self.log.fired.get(NAME, 0) + 1
            else:
                blocks = tuple([self.own(b) for b in node.blocks])
                same = inputs == node.inputs and blocks == node.blocks
                known[key] = node if same else node.with_inputs(inputs, blocks)
            done[node] = known[key]
        return [done.get(r, r) for r in results]  # an argument may be a result

    def own(self, block: Block) -> Block:
        """The Block with arguments that no other has, and equal loops inside of it made one."""
        if block.captures():
            return block
        if any(a in self.met for a in block.arguments):
            block = build.fresh_block(block)
        self.met.update(block.arguments)
        if not any(n.blocks for n in block.nodes):
            return block
        results = tuple(self.mapped(block.nodes, block.results))
        if results == block.results:
            return block
        return pure_block(block.name, block.arguments, results)


def _attrs(node: Node) -> tuple[Any, ...]:
    """What a Node says besides its inputs; the derivatives of a custom function are done."""
    return tuple(
        [exact(v) for n, v in node.attrs.items() if not (n == "rules" and node.op is ops.custom)]
    )


def block_key(block: Block) -> tuple[Any, ...]:
    """What tells a Block from others, whatever its arguments are called."""
    numbers: dict[Node, Any] = {a: i for i, a in enumerate(block.arguments)}
    lines: list[Any] = [tuple([a.type for a in block.arguments])]
    for node in block.nodes:
        numbers[node] = len(numbers)
        inputs = tuple([numbers.get(i, i) for i in node.inputs])
        inner = tuple([block_key(b) for b in node.blocks])
        lines.append((node.op, inputs, _attrs(node), inner))
    return (*lines, tuple([numbers.get(r, r) for r in block.results]))
