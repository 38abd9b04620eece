"""The verifier: whether a Block is well formed, for every IR; run after every pass in tests.

Every value used is an argument, an earlier Node or a value of an enclosing Block (so there are
no cycles); every Op is of the dialect; types are what inference gives; attrs are complete and
hashable. A dialect adds what only it knows as rules. Invariant: verify reads, never changes;
what it finds is our fault, so it raises InternalError with the pass and the Node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..core.errors import InternalError, TilegradError
from .block import Block, argument_op, common
from .node import DIALECTS, Dialect, Node
from .text import print_node
from .types import Type

# What is wrong with a Node, or None; `enclosing` are the Nodes whose Blocks hold it, outermost
# first.
Rule = Callable[[Node, tuple[Node, ...]], "str | None"]


def verify(
    block: Block,
    dialect: Dialect | str | Iterable[Dialect | str],
    rules: Sequence[Rule] = (),
    *,
    where: str = "verify",
) -> None:
    """Check a closed Block of a dialect (or several); `where` names the pass that made it."""
    given = [dialect] if isinstance(dialect, (Dialect, str)) else list(dialect)
    dialects = {DIALECTS[d].name if isinstance(d, str) else d.name for d in given}
    _Verifier(dialects | {common.name}, tuple(rules), where).block(block, ())


class _Verifier:
    def __init__(self, dialects: set[str], rules: tuple[Rule, ...], where: str) -> None:
        self.dialects, self.rules, self.where = dialects, rules, where
        self.visible: set[Node] = set()
        self.placed: set[Node] = set()  # effect Nodes and owners of Blocks: in one place only
        self.open: set[int] = set()  # Blocks we are inside of

    def fail(self, message: str, node: Node | None = None) -> InternalError:
        shown = "" if node is None else f"\n    {print_node(node)}\n  "
        return InternalError(self.where, message + shown)

    def block(self, block: Block, enclosing: tuple[Node, ...]) -> None:
        if id(block) in self.open:
            raise self.fail(f"the Block {block.name} contains itself", enclosing[-1])
        self.open.add(id(block))
        added: list[Node] = []
        for argument in block.arguments:
            if argument.op is not argument_op:
                raise self.fail(f"an argument of the Block {block.name} is not one", argument)
            self.place(argument, block, added)
        own: set[Node] = set()
        for node in block.nodes:
            if node in own:
                raise self.fail(f"this Node is twice in the Block {block.name}", node)
            own.add(node)
            self.node(node, block, enclosing)
            self.place(node, block, added)
        for result in block.results:
            if result not in self.visible:
                raise self.fail(f"a result of the Block {block.name} is not visible in it", result)
        self.visible.difference_update(added)
        self.open.discard(id(block))

    def place(self, node: Node, block: Block, added: list[Node]) -> None:
        if node.op.effect or node.blocks:
            if node in self.placed:
                raise self.fail(f"this Node of the Block {block.name} is elsewhere too", node)
            self.placed.add(node)
        if node not in self.visible:
            self.visible.add(node)
            added.append(node)

    def node(self, node: Node, block: Block, enclosing: tuple[Node, ...]) -> None:
        op = node.op
        if op is argument_op:
            raise self.fail(f"an argument is among the Nodes of the Block {block.name}", node)
        if op.dialect.name not in self.dialects or op.dialect.ops.get(op.name) is not op:
            names = ", ".join(sorted(self.dialects))
            raise self.fail(f"the op {op!r} is not of the dialects {names}", node)
        for index, source in enumerate(node.inputs):
            if source not in self.visible:
                raise self.fail(
                    f"input {index} ({source!r}) is neither an argument, nor an earlier Node, nor "
                    f"a value of an enclosing Block of {block.name}",
                    node,
                )
        self.attrs(node)
        for inner in node.blocks:
            self.block(inner, (*enclosing, node))
        self.type(node)
        for rule in self.rules:
            message = rule(node, enclosing)
            if message is not None:
                raise self.fail(message, node)

    def attrs(self, node: Node) -> None:
        if tuple(node.attrs) != node.op.attrs:
            raise self.fail(f"attrs are {tuple(node.attrs)} and not {node.op.attrs}", node)
        for name, value in node.attrs.items():
            try:
                hash(value)
            except TypeError:
                raise self.fail(f"attr {name} is not hashable: {value!r}", node) from None

    def type(self, node: Node) -> None:
        """Where an op infers None its type is given, and only its presence is checked."""
        expected: Type | None
        try:
            if node.blocks:
                expected = node.op.infer(*node.inputs, blocks=node.blocks, **node.attrs)
            else:
                expected = node.op.infer(*node.inputs, **node.attrs)
        except (TilegradError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self.fail(f"its type cannot be inferred ({error})", node) from error
        if node.type is None:
            raise self.fail("it has no type", node)
        if expected is not None and expected != node.type:
            raise self.fail(f"its type is {node.type} where {expected} is inferred", node)
