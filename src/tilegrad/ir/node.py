"""Nodes and Ops: the one data structure of every IR.

A Node is an Op applied to inputs, with typed static attrs and a type inferred from them. Pure
Nodes are interned: building the same value twice gives the same object, so common
subexpressions never exist twice. Nodes of an Op marked `effect`, and Nodes that own Blocks,
are made anew each time. Invariant: a Node never changes after it is made.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.dtype import DType
from ..core.errors import InternalError, Location, user_location
from .types import Array, Type, check_addressable, product

if TYPE_CHECKING:
    from .block import Block

Infer = Callable[..., Type]
Step = TypeVar("Step")
_serial = itertools.count()


class _Place(threading.local):
    location: Location | None = None


_place = _Place()


@contextmanager
def located(location: Location | None) -> Iterator[None]:
    """Nodes made inside get this location instead of the caller's line."""
    before, _place.location = _place.location, location
    try:
        yield
    finally:
        _place.location = before


class Node:
    """One vertex of an IR."""

    __slots__ = ("__weakref__", "attrs", "blocks", "inputs", "location", "op", "serial", "type")

    op: Op
    inputs: tuple[Node, ...]
    attrs: dict[str, Any]
    type: Type
    blocks: tuple[Block, ...]
    location: Location | None
    serial: int

    def __repr__(self) -> str:
        return f"<{self.op.name}#{self.serial} {self.type!r}>"

    @property
    def shape(self) -> Any:
        """Sizes of its type: ints, or Exprs where they are symbolic."""
        type_: Any = self.type
        return type_.shape

    @property
    def size(self) -> Any:
        """Number of its elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Any:
        """Bytes of its elements, as its type has them."""
        type_: Any = self.type
        return type_.bytes

    @property
    def dtype(self) -> DType:
        """Dtype of its type."""
        type_: Any = self.type
        return type_.dtype

    def with_inputs(
        self, inputs: tuple[Node, ...], blocks: tuple[Block, ...] | None = None
    ) -> Node:
        """The same Op and attrs on other inputs; the location survives."""
        if inputs == self.inputs and blocks is None:
            return self
        return self.op.make(
            inputs, self.attrs, self.blocks if blocks is None else blocks, location=self.location
        )


class Op:
    """The kind of a Node: name, attr names, inference and what may be assumed of it."""

    __slots__ = (
        "attrs",
        "category",
        "commutative",
        "dialect",
        "effect",
        "infer",
        "meaning",
        "name",
    )

    def __init__(
        self,
        dialect: Dialect,
        name: str,
        infer: Infer,
        *,
        attrs: tuple[str, ...] = (),
        effect: bool = False,
        commutative: bool = False,
        category: str = "",
        meaning: str = "",
    ) -> None:
        self.dialect, self.name, self.infer, self.attrs = dialect, name, infer, attrs
        self.effect, self.commutative, self.category = effect, commutative, category
        self.meaning = meaning
        dialect.add(self)

    def __repr__(self) -> str:
        return f"{self.dialect.name}.{self.name}"

    def __reduce__(self) -> Any:
        return (_op_named, (self.dialect.name, self.name))

    def __call__(self, *inputs: Node, blocks: tuple[Block, ...] = (), **attrs: Any) -> Node:
        """Build a Node of this Op, located at the user's line."""
        return self.make(inputs, attrs, blocks)

    def make(
        self,
        inputs: tuple[Node, ...],
        attrs: dict[str, Any],
        blocks: tuple[Block, ...] = (),
        *,
        type: Type | None = None,
        location: Location | None = None,
    ) -> Node:
        """Build a Node, inferring its type unless it is given."""
        try:
            values = tuple([attrs[name] for name in self.attrs])
        except KeyError as missing:
            raise InternalError(repr(self), f"attr {missing} is missing") from None
        unique = self.effect or bool(blocks)
        if not unique:
            key = (self, inputs, tuple([exact(v) for v in values]), type)
            found = _interned.get(key)
            if found is not None:
                return found
        node = Node.__new__(Node)
        node.op, node.inputs, node.blocks = self, inputs, blocks
        node.attrs = dict(zip(self.attrs, values))
        node.location = location or _place.location or user_location()
        if type is not None:
            node.type = type
        elif blocks:
            node.type = self.infer(*inputs, blocks=blocks, **node.attrs)
        else:
            node.type = self.infer(*inputs, **node.attrs)
        if node.type.__class__ is Array:
            check_addressable(node.type, self.name)
        node.serial = next(_serial)
        if not unique:
            _interned[key] = node
        return node


class Dialect:
    """The op set of one IR."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: dict[str, Op] = {}
        DIALECTS[name] = self

    def add(self, op: Op) -> None:
        """Register an Op; a name is taken once."""
        if op.name in self.ops:
            raise InternalError(self.name, f"op {op.name} is defined twice")
        self.ops[op.name] = op


DIALECTS: dict[str, Dialect] = {}
_interned: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()


def exact(value: Any) -> Any:
    """A key that tells apart what == does not: 0.0 and -0.0, 1 and True and 1.0, in tuples too.

    Every nan is one value, so that constants of nan are interned like others.
    """
    kind = value.__class__
    if kind is tuple:
        return tuple([exact(v) for v in value])
    if kind is int or kind is str:
        return value
    return (kind, repr(value)) if isinstance(value, float) else (kind, value)


def _op_named(dialect: str, name: str) -> Op:
    return DIALECTS[dialect].ops[name]


def topological(roots: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> list[Node]:
    """Every Node the roots need, inputs before users; Blocks of Nodes are not entered, but
    values from outside that their Nodes use come first. Below a Node that stops, nothing."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        stack: list[Node | None] = [root]
        while stack:
            node = stack.pop()
            if node is None:  # what is below it is in order: its turn
                order.append(stack.pop())  # type: ignore[arg-type]
                continue
            if node in seen:
                continue
            seen.add(node)
            below = needs(node) if node.blocks else node.inputs
            if stop is not None and below and stop(node):
                below = ()
            missing = [n for n in reversed(below) if n not in seen]
            if missing:
                stack += (node, None, *missing)
            else:
                order.append(node)
    return order


def walk(
    starts: Iterable[Step], step: Callable[[Step], Sequence[Step]], forward: bool = False
) -> Iterator[Step]:
    """Nodes (or Nodes with what is known of them) from some on, each once: step(one) says where to
    go on, and is asked after one was given. Next ones come in their order where the walk is
    `forward`, else the last one first."""
    stack, seen = list(starts), set()
    if forward:
        stack.reverse()
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            yield one
            found = step(one)
            stack.extend(reversed(found) if forward else found)


DEEP, LARGE, PATHS = 96, 1024, 1 << 14  # of what functions that recurse may read


def is_shallow(roots: Iterable[Node], inside: Container[Op]) -> bool:
    """Whether functions that call themselves can read what the roots need, as far as ops are
    `inside`: paths are short and few (what is shared is read each time). Looks at no more."""
    found: dict[Node, tuple[int, int]] = {}  # longest path, number of paths
    stack = list(roots)
    while stack:
        node = stack[-1]
        depth, paths, ready = 0, 0, True
        for i in node.inputs:
            if i.op not in inside:
                continue
            if i in found:
                depth, paths = max(depth, found[i][0]), paths + found[i][1]
            else:
                stack.append(i)
                ready = False
        if ready:
            found[node] = (depth + 1, max(1, paths))
            stack.pop()
            while stack and stack[-1] in found:
                stack.pop()
        if depth >= DEEP or paths > PATHS or len(found) > LARGE or len(stack) > 8 * DEEP:
            return False
    return True


def next_serial() -> int:
    """A serial number below that of every Node made from now on."""
    return next(_serial)


def needs(node: Node) -> tuple[Node, ...]:
    """Inputs of the Node and the outside values its Blocks capture."""
    if not node.blocks:
        return node.inputs
    captured: list[Node] = list(node.inputs)
    for block in node.blocks:
        captured.extend(block.captures())
    return tuple(captured)


def users(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """For each Node, the Nodes that read it, in order."""
    found: dict[Node, list[Node]] = {}
    for node in nodes:
        for source in dict.fromkeys(needs(node)):
            found.setdefault(source, []).append(node)
    return found
