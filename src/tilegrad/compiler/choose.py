"""Choose the kernels of ops that nothing but kernels computes: a paged cache, drawing tokens; and
how products with picked weights are computed.

Runs first, so that every later pass sees calls and what lies around them. The Families of such an
op offer for it (`schedule/chosen.py`), and are imported where a Graph has the op. Invariant: for a
Target, none of these ops is left but products of groups; without one nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.target import Target
from ..graph import ops
from ..ir.block import Block, pure_block
from ..ir.node import Node, located, topological
from ..ir.rewrite import Log, rebuild

PAGED, DRAWS = (ops.paged_append, ops.paged_attention), (ops.draw, ops.top_k, ops.add_listed)
GROUPS = (ops.group_rows, ops.route, ops.grouped_outer)
CHOSEN = (*PAGED, *DRAWS, *GROUPS, ops.picked_dot, ops.grouped_dot)


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
    return node.op in CHOSEN or any(_has_choice(n) for b in node.blocks for n in b.nodes)


def _replace(
    order: Sequence[Node],
    results: Sequence[Node],
    done: dict[Node, Node],
    target: Target,
    log: Log,
) -> None:
    """What Nodes in order become, into `done`."""
    from ..schedule.chosen import Surroundings, choose

    near = Surroundings(order, set(results), log)
    chosen: dict[Node, list[Node]] = {}
    for node in order:
        if node.op is ops.get and node.inputs[0] in chosen:
            done[node] = chosen[node.inputs[0]][node.attrs["index"]]
        elif node.op in CHOSEN:
            with located(node.location):
                chosen[node] = choose(node, [done[i] for i in node.inputs], near, target)
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
