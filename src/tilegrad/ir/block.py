"""Blocks: ordered bodies with arguments and results, for functions, loops, roles and branches.

A pure Block (a Graph) needs no order of its own: `nodes` is any topological order. A Block of
effects (a Body) keeps the order in which its Nodes were built. Invariant: every Node a Block
uses is one of its arguments, one of its earlier Nodes, or a value captured from outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ..core.errors import InternalError
from .node import Dialect, Node, Op, topological
from .types import Type

_argument_serial = itertools.count()

# One `argument` Op serves all IRs; its type is given, never inferred.
common = Dialect("common")
argument_op = Op(common, "argument", lambda **_: None, attrs=("name", "serial"), effect=True)  # type: ignore[arg-type]


def argument(name: str, type_: Type) -> Node:
    """A fresh argument of a Block."""
    return argument_op.make((), {"name": name, "serial": next(_argument_serial)}, type=type_)


class Block:
    """Arguments, ordered Nodes and results; `name` is for people."""

    __slots__ = ("_captures", "arguments", "name", "nodes", "results")

    def __init__(
        self,
        name: str,
        arguments: tuple[Node, ...],
        nodes: list[Node] | None = None,
        results: tuple[Node, ...] = (),
    ) -> None:
        self.name, self.arguments, self.results = name, arguments, results
        self.nodes: list[Node] = [] if nodes is None else nodes
        self._captures: tuple[Node, ...] | None = None

    def __repr__(self) -> str:
        return f"<block {self.name}: {len(self.nodes)} nodes>"

    def all_nodes(self) -> Iterator[Node]:
        """Every Node, those of Blocks within too, in order."""
        for node in self.nodes:
            yield node
            for inner in node.blocks:
                yield from inner.all_nodes()

    def find(self, *names: str) -> list[Node]:
        """The Nodes of ops of some names, those of Blocks within too, in order."""
        return [node for node in self.all_nodes() if node.op.name in names]

    def captures(self) -> tuple[Node, ...]:
        """Values from outside that the Block's Nodes use (empty for a closed Block)."""
        if self._captures is None:
            own = {id(a) for a in self.arguments}
            outside: dict[Node, None] = {}
            for node in self.nodes:
                own.add(id(node))
            for node in self.nodes:
                sources = list(node.inputs)
                for inner in node.blocks:
                    sources.extend(inner.captures())
                for source in sources:
                    if id(source) not in own:
                        outside[source] = None
            for result in self.results:
                if id(result) not in own:
                    outside[result] = None
            self._captures = tuple(outside)
        return self._captures

    def __reduce__(self) -> tuple[object, ...]:
        return (Block, (self.name, self.arguments, self.nodes, self.results))


def pure_block(
    name: str,
    arguments: tuple[Node, ...],
    results: tuple[Node, ...],
    outside: Callable[[Node], bool] | None = None,
) -> Block:
    """A Block of pure Nodes: the order is found from the results.

    Nodes for which `outside` holds are captured: they and what they need stay out.
    """
    given = {id(a) for a in arguments}

    def stop(node: Node) -> bool:
        if id(node) in given or node.op is argument_op:
            return True
        return outside is not None and outside(node)

    nodes = [n for n in topological(results, stop) if not stop(n)]
    return Block(name, arguments, nodes, results)


class Builder:
    """Appends Nodes to the innermost open Block, in the order they are built."""

    def __init__(self) -> None:
        self.open: list[Block] = []
        self.known: list[set[int]] = []

    def block(self, name: str, arguments: tuple[Node, ...] = ()) -> AbstractContextManager[Block]:
        """Open a new Block; Nodes built inside `with` go into it."""
        return self.within(Block(name, arguments))

    @contextmanager
    def within(self, block: Block) -> Iterator[Block]:
        """The same with a Block that may have Nodes already."""
        self.open.append(block)
        self.known.append({id(n) for n in (*block.arguments, *block.nodes)})
        try:
            yield block
        finally:
            self.open.pop()
            self.known.pop()

    def add(self, node: Node) -> Node:
        """Append a Node unless it is already visible from here."""
        if not self.open:
            raise InternalError("builder", "no Block is open")
        if any(id(node) in known for known in self.known):
            return node
        for source in node.inputs:
            if not any(id(source) in known for known in self.known):
                self.add(source)
        self.open[-1].nodes.append(node)
        self.known[-1].add(id(node))
        return node
