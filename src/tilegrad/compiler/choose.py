"""Choose the kernels of ops that nothing but kernels computes: a paged cache, drawing tokens.

Runs first, so that every later pass sees calls and what lies around them. Each op has a chooser,
a file of its own that is imported where a Graph has the op. A chooser makes the values that take
the place of a Node's results, given what its inputs became; it may take other Nodes of the same
Block with it. Invariant: for a Target, none of these ops is left; without one nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from ..core.target import Target
from ..graph import ops
from ..ir.block import Block, pure_block
from ..ir.node import Node, Op, located, topological
from ..ir.rewrite import Log, rebuild

CHOOSERS: dict[Op, str] = {  # the file, in this folder
    ops.paged_append: "choose_paged",
    ops.paged_attention: "choose_paged",
    ops.draw: "choose_draw",
    ops.top_k: "choose_draw",
    ops.add_listed: "choose_draw",
}


class Chooser(Protocol):
    """The choices for the Nodes of one Block, or of the outermost Graph."""

    def choose(self, node: Node, done: dict[Node, Node]) -> list[Node]:
        """The values that a Node's results become, and the name of what computes them; Nodes of
        `done` became others."""


def choose_kernels(
    arguments: Sequence[Node], results: list[Node], log: Log, target: Target | None
) -> list[Node]:
    """The pass."""
    order = topological(results)
    if target is None or not any(_has_choice(n) for n in order):
        return list(results)
    done: dict[Node, Node] = {}
    _replace(order, results, done, target, log)
    return [done[r] for r in results]


def _has_choice(node: Node) -> bool:
    return node.op in CHOOSERS or any(_has_choice(n) for b in node.blocks for n in b.nodes)


def _replace(
    order: Sequence[Node],
    results: Sequence[Node],
    done: dict[Node, Node],
    target: Target,
    log: Log,
) -> None:
    """What Nodes in order become, into `done`."""
    choosers: dict[str, Any] = {}
    chosen: dict[Node, list[Node]] = {}
    for node in order:
        if node.op is ops.get and node.inputs[0] in chosen:
            done[node] = chosen[node.inputs[0]][node.attrs["index"]]
        elif node.op in CHOOSERS:
            name = CHOOSERS[node.op]
            if name not in choosers:
                made = import_module(f".{name}", __package__).chooser
                choosers[name] = made(target, order, results, log)
            with located(node.location):
                chosen[node] = choosers[name].choose(node, done)
            if node.type == chosen[node][0].type:
                done[node] = chosen[node][0]
        else:
            new = rebuild(node, done)
            if any(_has_choice(n) for b in new.blocks for n in b.nodes):
                blocks = tuple([_chosen_block(b, target, log) for b in new.blocks])
                new = new.with_inputs(new.inputs, blocks)
            done[node] = new


def _chosen_block(block: Block, target: Target, log: Log) -> Block:
    outside = set(block.captures())
    done: dict[Node, Node] = {n: n for n in (*block.arguments, *outside)}
    _replace(block.nodes, block.results, done, target, log)
    results = tuple([done[r] for r in block.results])
    return pure_block(block.name, block.arguments, results, lambda n: n in outside)
