"""Equal loops are one loop: Nodes that own Blocks and say the same on the same inputs become one.

Pure Nodes are interned when they are built; those with Blocks are not, since each Block has
arguments of its own. A derivative that computes its forward again, and several results of one
custom function, give such copies; a derivative of a scan also repeats it and gives more out, and
then the longer one is read for both. Invariant: no two Nodes that remain share an argument of
their Blocks, and no value changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.target import Target
from ..graph import build, ops
from ..ir.block import Block, pure_block
from ..ir.node import Node, exact, needs, topological
from ..ir.rewrite import Log, rebuild

NAME, REPEATED = "equal loops", "repeated scans"


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
                self.log.count(NAME)
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


# ---- one scan for two ---------------------------------------------------------------------------


def _covers(small: Node, large: Node) -> list[int] | None:
    """Which items of `large` are the items of `small`, if its steps do all that small's do."""
    count, other = small.attrs["carries"], large.attrs["carries"]
    if [small.attrs[k] for k in ("length", "reverse")] != [
        large.attrs[k] for k in ("length", "reverse")
    ]:
        return None
    matches = []
    for i, (source, mine) in enumerate(zip(small.inputs, small.blocks[0].arguments)):
        found = [
            j
            for j, (value, theirs) in enumerate(zip(large.inputs, large.blocks[0].arguments))
            if value is source
            and theirs.type == mine.type
            and (i < count) == (j < other)
            and j not in matches
        ]
        if not found:
            return None
        matches.append(found[0])
    steps = build.inline(small.blocks[0], [large.blocks[0].arguments[j] for j in matches])
    results = large.blocks[0].results
    if any(results[matches[i]] is not step for i, step in enumerate(steps[:count])):
        return None
    if any(step not in results[other:] for step in steps[count:]):
        return None
    return matches[:count] + [other + results[other:].index(s) for s in steps[count:]]


def share_scans(
    arguments: Sequence[Node], results: Sequence[Node], log: Log, target: Target | None = None
) -> list[Node]:
    """The results with a scan that another scan repeats and extends read from that one.

    Interning decides: a step of the first, built on the arguments of the second, must be among
    its results (so scans whose steps own Blocks are left alone).
    """
    order = topological(results)
    scans = sorted((n for n in order if n.op is ops.scan), key=lambda n: -len(n.blocks[0].nodes))
    scans.sort(key=lambda n: -len(n.blocks[0].results))
    chosen: dict[Node, tuple[Node, list[int]]] = {}
    for i, large in enumerate(scans):
        for small in scans[i + 1 :] if large not in chosen else ():
            if small not in chosen and set(small.inputs) <= set(large.inputs):
                items = _covers(small, large)
                if items is not None:
                    chosen[small] = (large, items)
    if chosen:
        log.count(REPEATED, len(chosen))
    return _read_from(results, chosen) if chosen else list(results)


def _read_from(roots: Sequence[Node], chosen: dict[Node, tuple[Node, list[int]]]) -> list[Node]:
    """The roots with items of each chosen scan read from the scan that covers it."""
    done: dict[Node, Node] = {}
    opened: set[Node] = set()
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        covered = node.op is ops.get and node.inputs[0] in chosen
        sources = (chosen[node.inputs[0]][0],) if covered else needs(node)
        missing = [s for s in sources if s not in done]
        if node in done:
            stack.pop()
        elif missing and node in opened:
            return list(roots)  # the two wait for each other
        elif missing:
            opened.add(node)
            stack.extend(missing)
        else:
            stack.pop()
            if covered:
                large, items = chosen[node.inputs[0]]
                done[node] = ops.get(done[large], index=items[node.attrs["index"]])
            else:
                done[node] = rebuild(node, done)
    return [done[r] for r in roots]
