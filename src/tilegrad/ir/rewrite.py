"""Rewriting: apply named Rules to a fixed point, and replace values.

Rules are indexed by the Op at their root. Nodes are visited inputs first; a Node that a Rule
makes is visited in turn, so one call reaches the fixed point and only changed Nodes are seen
again. Blocks of Nodes are rewritten too. Invariant: the result computes the same values, and
the location of a replaced Node survives in its replacement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.errors import InternalError
from .block import Block, argument_op, pure_block
from .node import Node, Op, needs, topological
from .pattern import Rule, RuleSet

LIMIT = 64  # Rules in a row on one Node before we call it a loop


@dataclass
class Log:
    """What a rewrite did: how often each Rule fired."""

    fired: dict[str, int] = field(default_factory=dict)

    def note(self, rule: Rule) -> None:
        """Count one firing."""
        self.fired[rule.name] = self.fired.get(rule.name, 0) + 1


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
    results = replace(block.results, changed)
    return pure_block(block.name, block.arguments, tuple(results))


def rewrite(roots: Sequence[Node], rules: RuleSet, log: Log | None = None) -> list[Node]:
    """The roots with every Rule applied to a fixed point."""
    log = Log() if log is None else log
    index: dict[Op, list[Rule]] = rules.by_op()
    done: dict[Node, Node] = {}
    for root in roots:
        _settle(root, index, rules, done, log)
    return [done[r] for r in roots]


def _settle(
    root: Node, index: Mapping[Op, list[Rule]], rules: RuleSet, done: dict[Node, Node], log: Log
) -> None:
    """Bring `root` and everything below it to the fixed point; results go to `done`."""
    stack: list[Node] = [root]
    steps: dict[Node, int] = {}
    waiting: dict[Node, Node] = {}  # Node -> what a Rule made of it, not yet settled
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        if node in waiting:
            new = waiting[node]
            if new in done:
                done[node] = done[new]
                stack.pop()
            else:
                stack.append(new)
            continue
        missing = [i for i in needs(node) if i not in done]
        if missing:
            stack.extend(missing)
            continue
        new = _rewrite_blocks(rebuild(node, done), rules, log)
        if new is node:
            made = _fire(node, index, log)
            if made is None:
                done[node] = node
                stack.pop()
                continue
            new = made
        if new is node:
            done[node] = node
            stack.pop()
            continue
        steps[new] = steps.get(node, 0) + 1
        if steps[new] > LIMIT:
            raise InternalError("rewrite", f"Rules loop at {node!r}: {list(log.fired)[-4:]}")
        waiting[node] = new


def _fire(node: Node, index: Mapping[Op, list[Rule]], log: Log) -> Node | None:
    for rule in index.get(node.op, ()):
        new = rule.apply(node)
        if new is not None and new is not node:
            if new.type != node.type:
                raise InternalError(
                    f"rule {rule.name}", f"{node!r} became {new!r}, another type"
                )
            log.note(rule)
            return new
    return None


def _rewrite_blocks(node: Node, rules: RuleSet, log: Log) -> Node:
    if not node.blocks:
        return node
    blocks = []
    for block in node.blocks:
        results = tuple(rewrite(block.results, rules, log))
        same = results == block.results
        blocks.append(block if same else pure_block(block.name, block.arguments, results))
    if tuple(blocks) == node.blocks:
        return node
    return node.with_inputs(node.inputs, tuple(blocks))


def rewrite_block(block: Block, rules: RuleSet, log: Log | None = None) -> Block:
    """A pure Block with every Rule applied to a fixed point."""
    results = tuple(rewrite(block.results, rules, log))
    return block if results == block.results else pure_block(block.name, block.arguments, results)


def live(nodes: Iterable[Node]) -> list[Node]:
    """Nodes without arguments and inputs of Blocks, for counting."""
    return [n for n in nodes if n.op is not argument_op]
