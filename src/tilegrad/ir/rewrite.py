"""Rewriting: apply named Rules to a fixed point, and replace values.

Nodes are visited inputs first; a Node that a Rule makes is visited in turn, so one call
reaches the fixed point and only changed Nodes are seen again. Blocks of Nodes are rewritten
too: pure Blocks by their results, Blocks with effects Node by Node in their order.
Invariant: the result computes the same values, and the location of a replaced Node survives
in its replacement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.collector import no_collection
from ..core.errors import InternalError
from .block import Block, argument_op, pure_block
from .node import Node, needs, topological
from .pattern import RuleSet

LIMIT = 256  # replacements that wait for one another before we call it a loop


@dataclass
class Log:
    """What a rewrite did: how often each Rule fired, how many were tried, Nodes settled.

    Notes are sentences for `explain`: why something that was looked for was not found.
    """

    fired: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    settled: int = 0
    notes: list[str] = field(default_factory=list)

    def count(self, name: str, times: int = 1) -> None:
        """What fired so many times more: a Rule, or what a pass that is no Rule does."""
        self.fired[name] = self.fired.get(name, 0) + times


# ---- replacing values -----------------------------------------------------------------------


def replace(roots: Sequence[Node], mapping: Mapping[Node, Node]) -> list[Node]:
    """The roots with Nodes of the mapping replaced wherever they are used, Blocks included."""
    done: dict[Node, Node] = dict(mapping)
    for node in topological(roots, stop=lambda n: n in mapping):
        if node not in done:
            done[node] = rebuild(node, done)
    return [done[r] for r in roots]


def rebuild(node: Node, done: Mapping[Node, Node]) -> Node:
    """The Node on replaced inputs and captures."""
    inputs = tuple([done.get(i, i) for i in node.inputs])
    if not node.blocks:
        return node if inputs == node.inputs else node.with_inputs(inputs)
    blocks = tuple([_rebuild_block(b, done) for b in node.blocks])
    if inputs == node.inputs and blocks == node.blocks:
        return node
    return node.with_inputs(inputs, blocks)


def _rebuild_block(block: Block, done: Mapping[Node, Node]) -> Block:
    changed = {c: done[c] for c in block.captures() if c in done and done[c] is not c}
    if not changed:
        return block
    moved: dict[Node, Node] = {a: a for a in block.arguments}
    moved.update({c: done.get(c, c) for c in block.captures()})
    for node in block.nodes:
        moved[node] = rebuild(node, moved)
    nodes = list(dict.fromkeys([moved[n] for n in block.nodes]))
    return Block(block.name, block.arguments, nodes, tuple([moved[r] for r in block.results]))


# ---- applying Rules -------------------------------------------------------------------------


def rewrite(roots: Sequence[Node], rules: RuleSet, log: Log | None = None) -> list[Node]:
    """The roots with every Rule applied to a fixed point."""
    sweep = _Sweep(rules, Log() if log is None else log)
    with no_collection():
        return [sweep.settle(r) for r in roots]


def rewrite_block(block: Block, rules: RuleSet, log: Log | None = None) -> Block:
    """A Block with every Rule applied to a fixed point."""
    with no_collection():
        return _Sweep(rules, Log() if log is None else log).block(block)


class _Sweep:
    """One run of a RuleSet; `done` maps every Node met to what became of it."""

    def __init__(self, rules: RuleSet, log: Log) -> None:
        self.rules, self.log = rules, log
        self.done: dict[Node, Node] = {}

    def settle(self, root: Node) -> Node:
        """Bring `root` and everything below it to the fixed point."""
        done = self.done
        if root in done:
            return done[root]
        stack: list[Node] = [root]
        waiting: dict[Node, Node] = {}  # Node -> what it became, not yet settled itself
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            new = waiting.get(node)
            if new is None:
                sources = needs(node) if node.blocks else node.inputs
                missing = [s for s in sources if s not in done]
                if missing:
                    stack += missing
                    if waiting and any(s in waiting for s in missing):
                        raise self._loop(node)
                    continue
                new = self._step(node)
                if new is node or new in done:
                    done[node] = done.setdefault(new, new)
                    stack.pop()
                    continue
                waiting[node] = new
                if new in waiting or len(waiting) > LIMIT:
                    raise self._loop(node)
                stack.append(new)
            elif new in done:
                done[node] = done[new]
                del waiting[node]
                stack.pop()
            else:
                stack.append(new)
        return done[root]

    def _step(self, node: Node) -> Node:
        """The Node on settled inputs with settled Blocks, then by the first Rule that fires."""
        self.log.settled += 1
        done = self.done
        inputs = tuple([done[i] for i in node.inputs])
        if node.blocks:
            blocks = tuple([self.block(b) for b in node.blocks])
            if inputs != node.inputs or blocks != node.blocks:
                return node.with_inputs(inputs, blocks)
        elif inputs != node.inputs:
            node = node.with_inputs(inputs)
            if node in done:
                return node
        log = self.log
        for rule, variants in self.rules.candidates(node):
            log.attempts += 1
            new = rule.apply(node, variants)
            if new is not None:
                if new.type != node.type:
                    raise InternalError(
                        f"rule {rule.name}", f"{node!r} became {new!r}, another type"
                    )
                log.count(rule.name)
                return new
        done[node] = node
        return node

    def block(self, block: Block) -> Block:
        """The Block on settled captures, its Nodes settled."""
        captured = [self.settle(c) for c in block.captures()]
        if any(n.op.effect for n in block.nodes):
            return self._ordered(block, captured)
        results = tuple([self.settle(r) for r in block.results])
        if results == block.results:
            return block
        outside = set(captured)
        return pure_block(block.name, block.arguments, results, lambda n: n in outside)

    def _ordered(self, block: Block, captured: Sequence[Node]) -> Block:
        known = {*captured, *block.arguments}
        nodes: list[Node] = []
        for old in block.nodes:
            for node in topological([self.settle(old)], stop=lambda n: n in known):
                if node not in known:
                    nodes.append(node)
                    known.add(node)
        results = tuple([self.settle(r) for r in block.results])
        if nodes == block.nodes and results == block.results:
            return block
        return Block(block.name, block.arguments, nodes, results)

    def _loop(self, node: Node) -> InternalError:
        names = ", ".join(self.log.fired)
        return InternalError("rewrite", f"Rules of {self.rules.name} loop at {node!r}: {names}")


def live(nodes: Iterable[Node]) -> list[Node]:
    """Nodes without arguments and inputs of Blocks, for counting."""
    return [n for n in nodes if n.op is not argument_op]
