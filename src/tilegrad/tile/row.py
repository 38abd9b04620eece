"""One row per Tile op: how it is typed, what it computes, and what it does to memory and time.

A row is a function: its inputs and keywords are the op's inputs and attrs, its body infers the
type, its docstring is the op's meaning in words. Beside it stand `numpy`, the meaning over arrays,
and `effects`, which names what a Node reads, writes, arrives at and waits for. Interpreter and
checks follow these; none has a table of ops of its own. Invariant: scalars of an Effect are
inputs of the Node or plain integers, so an Effect says the same before and after they are known.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..core.dtype import DType
from ..core.errors import InternalError, user_location
from ..ir.node import DIALECTS, Dialect, Infer, Node, Op
from ..ir.types import Memory, Shape, Type

tile = Dialect("tile")
Scalar = Node | int


@dataclass(frozen=True)
class Touch:
    """Elements of a Memory that are read or written: a box at an index (tile axis i is Memory
    axis axes[i]; all of it without an index), of it those where a mask holds, or those at linear
    `offsets`."""

    memory: Node
    writes: bool
    index: tuple[Scalar, ...] = ()
    shape: Shape = ()
    axes: Shape = ()
    mask: Node | None = None
    offsets: Node | None = None
    pages: Node | None = None  # numbers added to the first index: a box for each, one below another
    when: Node | None = None  # it happens only where this holds
    some: bool = False  # only data says which elements of the box, or of the Memory
    clips: bool = False  # what lies outside of the Memory is 0, or is dropped

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The index of an op that has an input for each axis."""
        return tuple(i for i in self.index if isinstance(i, Node))

    @property
    def bytes(self) -> int:
        """Bytes of the box."""
        return self.memory.dtype.storage_bytes(math.prod(self.shape))


class Make(NamedTuple):
    """A place, or an array of barriers, is set up."""


class Work(NamedTuple):
    """Done at some time by the role's engine of a kind, in the group being collected."""

    engine: str
    touches: tuple[Touch, ...]
    alone: bool = False  # only once all before it is done

    @property
    def by_threads(self) -> bool:
        """Whether the role's own threads do it: each knows of its part alone, until they meet."""
        return self.engine == "copy_threads"


class Land(NamedTuple):
    """A box is written at some time, and its bytes land on a barrier: in this program, or in those
    of the cluster whose bit of the mask, moved by `first`, is set (-1: in all)."""

    into: Touch
    source: Touch | None
    barrier: Node
    stage: Scalar
    mask: int | None = None
    first: Scalar = 0
    parts: int = 0  # of how many programs each gets a share
    tells: bool = True  # who waits knows of all that the role did, or of the bytes alone


class Arrive(NamedTuple):
    """One arrival at a barrier, in the programs that a Land says, which may announce bytes."""

    barrier: Node
    stage: Scalar
    bytes: int = 0
    mask: int | None = None
    first: Scalar = 0


class Wait(NamedTuple):
    """Until the phase of a parity is over."""

    barrier: Node
    stage: Scalar
    parity: Scalar


class Meet(NamedTuple):
    """Arrive with the role's threads at a numbered barrier, and wait there or go on."""

    number: int
    threads: int
    waits: bool


class Fence(NamedTuple):
    """What was stored is seen: 'async' ops, other programs ('global'), the 'matrix' unit."""

    kind: str


class Close(NamedTuple):
    """The group of an engine that is being collected is closed."""

    engine: str


class Drain(NamedTuple):
    """Until at most `pending` groups of an engine are under way."""

    engine: str
    pending: int


class Depend(NamedTuple):
    """Until the launches before are done."""


Effect = Touch | Work | Land | Arrive | Wait | Meet | Fence | Close | Drain | Depend | Make
Effects = Callable[[Node], tuple[Effect, ...]]


class TileOp(Op):
    """An Op with the rest of its row."""

    __slots__ = ("effects", "numpy", "placed", "row")

    def __init__(
        self,
        name: str,
        infer: Infer,
        *,
        numpy: Callable[..., Any] | None = None,
        effects: Effects | None = None,
        placed: bool = False,
        **facts: Any,
    ) -> None:
        super().__init__(tile, name, self.typed, **facts)
        self.row, self.numpy, self.effects, self.placed = infer, numpy, effects, placed

    def typed(self, *inputs: Node, **attrs: Any) -> Type:
        """The type that the row gives; an error names the op."""
        try:
            return self.row(*inputs, **attrs)
        except InternalError as error:
            error.name(f"tile.{self.name}")
            raise


def row(
    category: str = "",
    *,
    name: str = "",
    effect: bool = False,
    numpy: Callable[..., Any] | None = None,
    effects: Effects | Effect | None = None,
    placed: bool = False,
) -> Callable[[Infer], TileOp]:
    """The op that a function of inputs and attrs is the row of; one Effect is every Node's."""
    found = effects if effects is None or callable(effects) else lambda node: (effects,)

    def make(infer: Infer) -> TileOp:
        given = inspect.signature(infer).parameters.values()
        attrs = [p.name for p in given if p.kind is p.KEYWORD_ONLY and p.name != "blocks"]
        return TileOp(
            name or infer.__name__,
            infer,
            attrs=tuple(attrs),
            effect=effect or effects is not None,
            category=category,
            meaning=" ".join((infer.__doc__ or "").split()),
            numpy=numpy,
            effects=found,
            placed=placed,
        )

    return make


def made(effect: Callable[..., Effect]) -> Effects:
    """The one Effect of a Node, made of its inputs and attrs."""
    return lambda node: (effect(*node.inputs, **node.attrs),)


class Misfit(InternalError):
    """What a row raises where its inputs do not fit: a mistake of the kernel's author, where the
    language made the Node at `location`."""

    def __init__(self, message: str, expected: str = "", got: DType | None = None) -> None:
        super().__init__("", message if got is None else f"{message} for {got}")
        self.expected, self.got = expected, got  # of dtypes
        self.location = user_location()


def memory_of(node: Node) -> Memory:
    """The type of a Memory or place."""
    if not isinstance(node.type, Memory):
        raise Misfit(f"{node!r} is not a Memory")
    return node.type


# ---- reading rows -----------------------------------------------------------------------------


def compute(node: Node, inputs: Sequence[Any]) -> Any:
    """The value of a pure Node on given inputs."""
    op = node.op
    if not isinstance(op, TileOp) or op.numpy is None or op.effect:
        raise InternalError("tile.interpret", f"no meaning is known for {op!r}")
    with np.errstate(all="ignore"):
        return op.numpy(node, *inputs)


def is_place(node: Node) -> bool:
    """Whether a Memory is allocated and not a parameter."""
    return isinstance(node.type, Memory) and node.op.name in ("allocate", "register_tile")


def constant_of(node: Node) -> Any:
    """The number that a tile is everywhere, where its text says it, else None."""
    while node.op.name == "broadcast":
        node = node.inputs[0]
    return node.attrs["value"] if node.op.name == "constant" else None


def effects_of(node: Node) -> tuple[Effect, ...]:
    """What a Node does besides giving a value."""
    found = _known.get(node)
    if found is None:
        op = node.op
        made = isinstance(op, TileOp) and op.effects is not None
        found = _known[node] = op.effects(node) if made else ()  # type: ignore[attr-defined]
    return found


_known: WeakKeyDictionary[Node, tuple[Effect, ...]] = WeakKeyDictionary()


def touches_of(node: Node) -> Iterator[Touch]:
    """All that a Node reads and writes, at once or at some time."""
    for effect in effects_of(node):
        if isinstance(effect, Touch):
            yield effect
        elif isinstance(effect, Work):
            yield from effect.touches
        elif isinstance(effect, Land):
            yield from (t for t in (effect.source, effect.into) if t is not None)


def touch_of(node: Node) -> Touch:
    """The elements that a plain op of memory moves: what it writes, if it writes any."""
    *_, found = touches_of(node)
    return found


def moved_tile(node: Node) -> Node:
    """The tile that a plain op of memory moves."""
    return node if node.op.name in ("load", "gather") else node.inputs[1]


def read_by(node: Node) -> set[Node]:
    """Memories that a Node reads."""
    return {t.memory for t in touches_of(node) if not t.writes}


def written_by(node: Node) -> set[Node]:
    """Memories that a Node writes."""
    return {t.memory for t in touches_of(node) if t.writes}


def read_and_write(touch: Touch) -> tuple[Touch, Touch]:
    """A read of elements, and then a write of the same."""
    return replace(touch, writes=False), replace(touch, writes=True)


def box(
    memory: Node,
    writes: bool,
    index: tuple[Scalar, ...],
    shape: Shape,
    axes: Shape,
    *,
    mask: Node | None = None,
    clips: bool = False,
) -> Touch:
    """A box at an index of all axes."""
    some = mask is not None and not is_place(memory)
    return Touch(memory, writes, index, shape, axes, mask, some=some, clips=clips)


def lead(
    memory: Node,
    writes: bool,
    index: tuple[Scalar, ...] = (),
    rows: tuple[Scalar, int] | None = None,
) -> Touch:
    """The tile at a leading index of a place, or `rows` (first, count) of it."""
    shape = memory.shape[len(index) :]
    first: Scalar = 0
    if rows is not None:
        first, shape = rows[0], (rows[1], *shape[1:])
    rest = (first, *[0] * (len(shape) - 1)) if shape else ()
    axes = tuple(range(len(index), len(index) + len(shape)))
    return Touch(memory, writes, (*index, *rest), shape, axes)


def emitters(*files: ModuleType) -> dict[str, Callable[..., Any]]:
    """What emits each op: the function of a target's files that has the op's name, with a '_'
    before it where Python has that word."""
    found: dict[str, Callable[..., Any]] = {}
    named = {name for dialect in DIALECTS.values() for name in dialect.ops}
    for file in files:
        for name, function in vars(file).items():
            own = inspect.isfunction(function) and function.__module__ == file.__name__
            if own and (op := name.lstrip("_")) in named:
                if op in found:
                    raise InternalError("tile", f"{op} is emitted twice: again in {file.__name__}")
                found[op] = function
    return found
